"""Two jobs per launcher, each of which does tasks for all test modules. The modules read the output of the tasks.

The function ``tasks(launcher, kind, jobs)`` of a test module lists the tasks of a launcher. There is one job of kind
"rounded" and one of kind "bits", because --batch_parts decides how a process rounds from its first product on. A job
runs in one of pytest's workers when its output is first needed; the other workers wait for it. A job is started once:
it goes on after a task that fails, and if it ends before its last task, those that it has not done have failed.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from benchmarks.launching import Launcher, run


class Task(NamedTuple):
    name: str
    do: str  # a script or a function, in the format of job_worker.py
    flags: list[str]
    more: dict[str, Any] = {}  # noqa: RUF012  (arguments of the function)


class Jobs:
    """The jobs of a test session.

    Args:
        folder: Folder of all outputs, shared by pytest's workers.
        modules: Test modules whose tests are to run.
    """

    def __init__(self, folder: Path, modules: list[ModuleType]) -> None:
        self.folder, self._modules = folder, modules
        self._done: dict[tuple[Launcher, str], list[str]] = {}

    def output(self, launcher: Launcher, kind: str, name: str) -> Path:
        """The folder in which the task of this name left its output."""
        folder = self.path(launcher, kind, name)
        if str(folder) not in self._finished(launcher.without_stage, kind):
            errors = [path.read_text() for path in sorted(folder.parent.glob(f"{folder.name}.*.rank*"))]
            raise AssertionError("".join(errors) or f"not done:\n{self.said(launcher, kind)[-6000:]}")
        return folder

    def said(self, launcher: Launcher, kind: str) -> str:
        """The output of the whole job."""
        return (self.folder / f"{launcher.without_stage}-{kind}.log").read_text()

    def path(self, launcher: Launcher, kind: str, name: str) -> Path:
        """The folder in which the task of this name leaves its output."""
        return self.folder / kind / str(launcher) / name

    def _finished(self, launcher: Launcher, kind: str) -> list[str]:
        """Outputs of the tasks that the job has done. Runs the job, unless it has been run already."""
        if (launcher, kind) not in self._done:
            tasks, log, done = (self.folder / f"{launcher}-{kind}.{end}" for end in ("json", "log", "done"))
            with open(tasks.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not log.exists():
                    log.write_text("")  # if the job raises an error, it is not run again
                    listed = [task for one in _stages(launcher) for task in self._tasks(one, kind)]
                    listed.sort(key=lambda task: "--batch_parts" not in task["flags"])
                    done.write_text("")
                    tasks.write_text(json.dumps(listed))
                    finished = run(launcher.bare, "tests/launch/job_worker.py", [str(tasks)])
                    log.write_text(finished.output)
                    if finished.returncode and len(done.read_text().splitlines()) == len(listed):
                        done.write_text("")  # all were done, but the job failed at its end
            self._done[launcher, kind] = done.read_text().splitlines() if done.exists() else []
        return self._done[launcher, kind]

    def _tasks(self, launcher: Launcher, kind: str) -> list[dict[str, Any]]:
        tasks = {task.name: task for module in self._modules for task in module.tasks(launcher, kind, self)}
        listed = []
        for task in tasks.values():
            folder = self.path(launcher, kind, task.name)
            folder.mkdir(parents=True)
            flags = [*task.flags, *launcher.flags]
            listed.append({"do": task.do, "flags": flags, "output": str(folder), "more": task.more})
        return listed


def _stages(launcher: Launcher) -> list[Launcher]:
    if launcher.name != "deepspeed":
        return [launcher]
    return [Launcher("deepspeed", launcher.processes, zero_stage=stage) for stage in range(4)]
