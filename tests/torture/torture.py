"""Kill train_vae.py at random moments through real launchers, start it again, and look for anything that was lost.

    python tests/torture/torture.py --minutes 10                        # make torture
    python tests/torture/torture.py --seed 7 --only 3                   # trial 3 of seed 7 again

Trials alternate. In the first kind backend and processes stay, and every metric of every update, the final weights and
the last checkpoint must equal an uninterrupted run's bit for bit. In the second kind each start has another backend and
number of processes, and the losses must agree with one process's. Among the kills are other faults: requests to stop,
also in a validation; a job that is frozen for some seconds, and an old checkpoint that cannot be deleted, neither
of which may end a run; a loader's worker that is killed; a port that is taken. In half of the trials /dev/shm is small,
where root allows that. After every fault all checkpoints are verified with none of the product's code. Ends with exit
code 1 if anything was lost, and keeps that trial's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).resolve().parents[2]))

from torture_checks import (
    Lost,
    check_checkpoints,
    check_continuation,
    check_kept_up,
    check_last_words,
    check_polite_end,
    check_same_run,
    checkpoint_path,
    checkpoint_steps,
    finished_step,
    loss_difference,
    next_line,
    read_metrics,
    trained_steps,
    unfinished_saves,
    verified_files,
)
from torture_plan import MOMENTS, VALIDATE_EVERY, Blow, Plan, draw_plan
from torture_tally import Start, Tally

from benchmarks.launching import HANG_SECONDS, ONE_PROCESS, WITHOUT_COMPILER, Job, Launcher, send

# A relative 1e-5 is allowed, as tests/launch/test_scripts.py does: rounding alone gives about 1e-7, and a change of
# backend adds nothing to it, because states are handed over in full fp32.
UPDATES, TOLERANCE = 20, 1e-5
SCRIPT = "train_vae.py"
# 12 divides by 1, 2 and 3 processes; of 52 images to train on, about every fourth update begins a new epoch.
FLAGS = ["--image_size", "64", "--num_layers", "2", "--num_tokens", "64", "--hidden_dim", "16", "--emb_dim", "16",
         "--num_resnet_blocks", "1", "--learning_rate", "3e-4", "--image_folder", "demo:shapes:64", "--random_flip",
         "--ema_decay", "0.9", "--batch_size", "12", "--max_steps", str(UPDATES), "--epochs", "100",
         "--log_every_n_steps", "1", "--sample_every_n_steps", "0", "--validate_every_n_steps",
         str(VALIDATE_EVERY)]  # fmt: skip
NAMES = ["python", "torchrun", "deepspeed", "horovodrun"]
# As in a container, only smaller: enough for the semaphores of loader processes, not for their batches too.
IN_SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=640k tmpfs /dev/shm && exec "$@"', "sh"]
EXIT_CODE = 75  # exit code of train_vae.py after it was asked to stop


def wait_for_moment(job: Job, blow: Blow, run: Path, newest: int, startup_seconds: float) -> list[psutil.Process]:
    """Wait for the moment of the blow. Returns the training processes, or none if the job ended before the moment."""
    leftover, seconds = unfinished_saves(run), MOMENTS[blow.moment][1] * blow.delay
    if blow.moment == "start-up":
        has_started = poll(job, lambda: job.seconds >= seconds * startup_seconds and bool(job.ranks()), pause=0.05)
        return job.ranks() if has_started else []
    # Find the processes while the job starts, because a look at all processes takes longer than an update.
    if not poll(job, lambda: len(job.ranks()) == blow.launcher.processes, pause=0.5):
        return []
    ranks = job.ranks()
    until = UPDATES if blow.moment == "end" else min(newest + blow.after, UPDATES)
    if blow.moment == "validation":
        until = min(until // VALIDATE_EVERY * VALIDATE_EVERY + VALIDATE_EVERY, UPDATES) - 1
    if not poll(job, lambda: max(trained_steps(job.output), default=0) >= until, pause=0.003):
        return []
    saved = checkpoint_steps(run)
    # A save takes only some milliseconds, so nothing else is checked while this waits for one.
    if blow.moment == "save" and not poll(job, lambda: bool(unfinished_saves(run) - leftover)):
        return []
    if blow.moment == "saved" and not poll(job, lambda: checkpoint_steps(run) != saved):
        return []
    time.sleep(seconds)
    return ranks


def poll(job: Job, condition: Callable[[], bool], pause: float = 0.0002) -> bool:
    """Wait for the condition. Returns whether it came true before the job's end.

    Raises:
        Lost: the condition does not come true and the job does not end.
    """
    while not condition():
        if job.poll() is not None:
            return False
        if job.seconds > HANG_SECONDS:
            raise Lost(f"it does not get there in {HANG_SECONDS} s:\n{job.stacks()}")
        time.sleep(pause)
    return True


def strike(job: Job, blow: Blow, ranks: Sequence[psutil.Process], run: Path) -> bool:
    """Returns False if there is nothing to strike."""
    if blow.victims == "checkpoint":
        return protect(checkpoint_path(run, checkpoint_steps(run)[0]))
    if blow.is_harmless:
        frozen = job.everything()
        send(frozen, blow.signal)
        time.sleep(blow.restored_after)
        send(frozen, signal.SIGCONT)
    elif blow.victims == "worker":
        workers = [child for rank in ranks for child in rank.children() if child.cmdline() == rank.cmdline()]
        send(workers[-1:], blow.signal)
        return bool(workers)
    else:
        victims = {"root": ranks[:1], "last": ranks[-1:], "launcher": [psutil.Process(job.process.pid)]}
        send(victims.get(blow.victims, ranks), blow.signal)
        if blow.victims == "everything":
            job.kill()
        if blow.killed_after is not None:
            time.sleep(blow.killed_after)
            send(ranks, signal.SIGKILL)
    return True


def protect(folder: Path, on: bool = True) -> bool:
    """Make that nothing in a folder can be deleted. False where this file system or user cannot."""
    if os.geteuid() != 0:
        folder.chmod(0o555 if on else 0o755)
        return True
    flag = "+i" if on else "-i"  # root deletes what is only write-protected
    command = ["chattr", *([] if on else ["-R"]), flag, *(map(str, folder.iterdir()) if on else [str(folder)])]
    with contextlib.suppress(OSError):
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    return False


def taken(port: int) -> socket.socket:
    """A socket that listens on a port."""
    listener = socket.socket()
    listener.bind(("", port))
    listener.listen()
    return listener


class Torture:
    def __init__(self, folder: Path) -> None:
        self.folder, self.tally, self._can_mount = folder, Tally(), False
        self._references: dict[Launcher, tuple[Path, float]] = {}  # run folders, with the seconds that the runs took
        self._commands: list[str] = []  # commands of the present trial
        self._fault = ""  # the newest fault of the present trial
        with contextlib.suppress(OSError):
            self._can_mount = subprocess.run([*IN_SMALL_SHM, "true"], capture_output=True).returncode == 0
        if not self._can_mount:
            say("skipped: trials with a small /dev/shm, which need root and `unshare --mount`")

    def trial(self, number: int, plan: Plan) -> None:
        folder = self.folder / f"trial-{number}"
        folder.mkdir()
        self._commands, blows = [], self.tally.struck
        mode = f"{plan.last}, bit for bit" if plan.stays else "each start on another backend"
        with_small_shm = "small /dev/shm; " if plan.small_shm and self._can_mount else ""
        say(f"trial {number}: {mode}; {with_small_shm}{' '.join(plan.flags)}")
        try:
            reference, _ = self._reference(plan.last if plan.stays else ONE_PROCESS)
            for index, blow in enumerate([*plan.blows, None]):
                self.tally.restarts += index > 0
                if self._start(folder / "run", folder / f"start-{index}.log", blow, plan):
                    break
            self._check_result(folder / "run", reference, plan)
            self._unprotect(folder)
            shutil.rmtree(folder)
        except Lost as loss:
            self._unprotect(folder)
            self.tally.lost_after[self._fault] += 1
            self.tally.lost.append(f"trial {number}: {str(loss).splitlines()[0]}")
            say("\n    ".join([f"LOST in trial {number}: {loss}", *self._commands, f"its files: {folder}"]))
        self.tally.trials += 1
        self.tally.trials_with_blows += self.tally.struck > blows

    def _unprotect(self, folder: Path) -> None:
        for checkpoint in (folder / "run" / "checkpoints").glob("*step_*"):
            protect(checkpoint, on=False)

    def _reference(self, launcher: Launcher) -> tuple[Path, float]:
        """Run folder of an uninterrupted run, which saves only at its end, and the seconds that it took."""
        if launcher not in self._references:
            run = self.folder / f"uninterrupted {launcher}".replace(" ", "-")
            with self._job(launcher, run, ["--save_every_n_steps", "0"], Path(f"{run}.log")) as job:
                if job.wait() != 0:
                    raise Lost(f"the uninterrupted run failed:\n{job.output[-3000:]}")
                self._references[launcher] = run, job.seconds
        return self._references[launcher]

    @contextlib.contextmanager
    def _job(
        self,
        launcher: Launcher,
        run: Path,
        flags: Sequence[str],
        log: Path,
        blow: Blow | None = None,
        small_shm: bool = False,
    ) -> Iterator[Job]:
        command = launcher.command(SCRIPT, [*FLAGS, *flags, "--output_dir", str(run)])
        with contextlib.ExitStack() as stack:
            if blow and blow.victims == "port":
                stack.enter_context(taken(int(command[command.index("--master_port") + 1])))
            # Temporary files lie beside the log: those of killed processes are deleted together with its folder.
            environment = {"TMPDIR": str(log.parent), **WITHOUT_COMPILER}
            job = Job([*IN_SMALL_SHM * (small_shm and self._can_mount), *command], SCRIPT, log, **environment)
            stack.callback(job.kill)
            self._commands.append(" ".join(job.command))
            yield job

    def _start(self, run: Path, log: Path, blow: Blow | None, plan: Plan) -> bool:
        """Start the run once, strike if that is planned, check what is left. Returns whether the run is finished."""
        launcher = blow.launcher if blow else plan.last
        newest, saves = max(checkpoint_steps(run), default=None), unfinished_saves(run)
        first = next_line(run)
        self._fault = blow.fault if blow else "no fault"
        with self._job(launcher, run, plan.flags, log, blow, plan.small_shm) as job:
            start = self._strike(job, run, blow, newest or 0)
        trained, in_save = trained_steps(start.log), bool(unfinished_saves(run) - saves)
        self.tally.count(launcher, start, in_save)
        reference, _ = self._reference(ONE_PROCESS)
        check_checkpoints(run, start.before, plan.keep, verified_files(checkpoint_path(reference, UPDATES)))
        check_continuation(start.log, newest, first, run)
        read_metrics(run)
        check_kept_up(run, trained, plan.save_every)
        check_last_words(start.log, SCRIPT)
        said = f"updates {trained[0]} to {trained[-1]}" if trained else "no update"
        ended = f"{start.blow}, {start.blow.moment}" if start.blow else f"exit code {start.code}"
        say(f"  {launcher}: {said}; {ended}{', inside a save' if in_save else ''}")
        if start.code and (start.blow is None or start.blow.is_harmless):
            raise Lost(f"it failed by itself with exit code {start.code}:\n{start.log[-3000:]}")
        if start.blow and start.blow.is_polite and trained:
            check_polite_end(start.log, run, UPDATES)
            if launcher.name == "python" and "asked to stop" in start.log and start.code != EXIT_CODE:
                raise Lost(f"a run that was asked to stop ended with exit code {start.code}")
        return start.code == 0

    def _strike(self, job: Job, run: Path, blow: Blow | None, newest: int) -> Start:
        """Wait for the moment of the blow, strike, and wait for the job's end.

        Raises:
            Lost: the job does not end.
        """
        fell, before, since = None, checkpoint_steps(run), time.monotonic()
        if blow and blow.victims == "port":
            fell = blow
        elif blow:
            _, startup = self._references.get(blow.launcher, self._reference(ONE_PROCESS))
            if ranks := wait_for_moment(job, blow, run, newest, startup):
                before, since = [*before, *checkpoint_steps(run)], time.monotonic()
                fell = blow if strike(job, blow, ranks, run) else None
        code = job.wait()
        if code is None:
            raise Lost(f"it does not end{f' after {fell}' if fell else ''}:\n{job.stacks()}")
        return Start(code, job.output, fell, before, time.monotonic() - since)

    def _check_result(self, run: Path, reference: Path, plan: Plan) -> None:
        """Check that the finished run equals the uninterrupted one.

        Raises:
            Lost: the runs differ.
        """
        if len(read_metrics(run)) != UPDATES or finished_step(run) != UPDATES:
            raise Lost(f"{len(read_metrics(run))} of {UPDATES} updates at the end; model/ holds {finished_step(run)}")
        if plan.stays:
            check_same_run(run, reference)
            return
        difference = loss_difference(run, reference)
        self.tally.difference = max(self.tally.difference, difference)
        if difference > TOLERANCE:
            raise Lost(f"the losses are not those of one process: relative difference {difference:.1e}")


def say(text: str) -> None:
    print(text, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="no new trial after this (default: 10)")
    parser.add_argument(
        "--trials", type=int, default=sys.maxsize, help="stop after so many in which something happened to a run"
    )
    parser.add_argument("--kills", type=int, default=4, help="kills and other faults in a trial (default: 4)")
    parser.add_argument("--seed", type=int, help="of the plan (default: drawn, and printed)")
    parser.add_argument("--only", type=int, metavar="TRIAL", help="this trial alone")
    installed = [name for name in NAMES if (Path(sys.executable).parent / name).exists()]
    parser.add_argument("--launchers", nargs="+", choices=NAMES, default=installed, help="default: all that are there")
    args = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1_000_000) if args.seed is None else args.seed
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(1))  # so that every `finally` ends its job
    torture = Torture(Path(tempfile.mkdtemp(prefix="torture-")))
    say(f"seed {seed}; {', '.join(args.launchers)}; {args.kills} kills in a trial; in {torture.folder}")
    deadline = time.monotonic() + 60 * args.minutes
    try:
        for trial in itertools.count() if args.only is None else [args.only]:
            if time.monotonic() > deadline or torture.tally.trials_with_blows >= args.trials:
                break
            torture.trial(trial, draw_plan(seed, trial, args.launchers, args.kills))
    finally:
        say(f"seed {seed}: {torture.tally}")
        if not torture.tally.lost:
            shutil.rmtree(torture.folder, ignore_errors=True)
    sys.exit(1 if torture.tally.lost else 0)


if __name__ == "__main__":
    main()
