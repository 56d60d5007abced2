"""Two jobs per launcher, each for the tasks of all test modules, which read what the tasks leave behind.

A test module says in ``tasks(launcher, kind, jobs)`` what one of its launchers has to do. "rounded" is one job; "bits"
is another, because --batch_parts fixes how a process rounds from its first product on. A job runs when something of it
is first asked for, in one of pytest's workers; the others wait for it.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from launching import Launcher, run


class Task(NamedTuple):
    name: str
    do: str  # a script or a function, as job_worker.py has it
    flags: list[str]
    more: dict[str, Any] = {}  # noqa: RUF012  (arguments of the function)


class Jobs:
    """Args:
    folder: Shared by pytest's workers.
    modules: Those whose tests are to run.
    """

    def __init__(self, folder: Path, modules: list[ModuleType]) -> None:
        self.folder, self._modules = folder, modules
        self._done: dict[tuple[Launcher, str], list[str]] = {}

    def output(self, launcher: Launcher, kind: str, name: str) -> Path:
        """The folder in which the task of this name left its output."""
        folder = self._path(launcher, kind, name)
        assert str(folder) in self._finished(launcher.bare, kind), self.said(launcher, kind)[-6000:]
        return folder

    def said(self, launcher: Launcher, kind: str) -> str:
        """The output of the whole job."""
        return (self.folder / f"{launcher.bare}-{kind}.log").read_text()

    def _path(self, launcher: Launcher, kind: str, name: str) -> Path:
        return self.folder / kind / str(launcher) / name

    def _finished(self, launcher: Launcher, kind: str) -> list[str]:
        """Outputs of the tasks that the job has done; starts it, once."""
        if (launcher, kind) not in self._done:
            tasks, log, done = (self.folder / f"{launcher}-{kind}.{end}" for end in ("json", "log", "done"))
            with open(tasks.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not log.exists():
                    log.write_text("")  # should something raise, it is not tried again
                    listed = [task for one in _stages(launcher) for task in self._tasks(one, kind)]
                    listed.sort(key=lambda task: "--batch_parts" not in task["flags"])
                    tasks.write_text(json.dumps(listed))
                    finished = run(launcher, "tests/launch/job_worker.py", [str(tasks)])
                    log.write_text(finished.output)
                    if finished.returncode and len(done.read_text().splitlines()) == len(listed):
                        done.write_text("")  # it failed at its very end
            self._done[launcher, kind] = done.read_text().splitlines() if done.exists() else []
        return self._done[launcher, kind]

    def _tasks(self, launcher: Launcher, kind: str) -> list[dict[str, Any]]:
        stage = [] if launcher.zero_stage is None else ["--zero_stage", str(launcher.zero_stage)]
        tasks = {task.name: task for module in self._modules for task in module.tasks(launcher, kind, self)}
        listed = []
        for task in tasks.values():
            folder = self._path(launcher, kind, task.name)
            folder.mkdir(parents=True)
            listed.append({"do": task.do, "flags": [*task.flags, *stage], "output": str(folder), "more": task.more})
        return listed


def _stages(launcher: Launcher) -> list[Launcher]:
    if launcher.name != "deepspeed":
        return [launcher]
    return [Launcher("deepspeed", launcher.processes, zero_stage=stage) for stage in range(4)]
