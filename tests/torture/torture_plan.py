"""What torture.py does to a run, drawn from a seed before anything starts."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.launching import CHOSEN_ON_TWO, Launcher

# For each moment, the relative frequency of drawing it ("end" is drawn only for the last blow of a trial), and the
# longest delay of the blow after it in seconds (for "start-up", as a fraction of the duration of a start).
# A "validation" is struck after the update before it was logged.
MOMENTS = {"start-up": (2, 1.1), "update": (2, 0.06), "save": (5, 0.03), "saved": (2, 0.02), "validation": (3, 0.15),
           "end": (5, 0.3)}  # fmt: skip
VALIDATE_EVERY = 4
POLITE = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


@dataclass(frozen=True)
class Blow:
    """What happens to one start of the run."""

    launcher: Launcher
    moment: str  # a key of MOMENTS
    after: int  # updates after the newest checkpoint that must have been completed
    delay: float  # fraction in [0, 1] of the longest delay in MOMENTS
    signal: signal.Signals
    # "root", "last" or "all" ranks, "launcher" alone, or "everything": loader workers too; a loader's "worker", the
    # oldest "checkpoint", which can be deleted no more, or the "port" of the launcher, which is taken
    victims: str
    killed_after: float | None = None  # seconds after a polite signal; None: the run may take its time
    restored_after: float = 0.0  # seconds after which what was stopped is set going again

    @property
    def is_polite(self) -> bool:
        """Whether the run may finish its update and save."""
        return self.signal in POLITE and self.killed_after is None

    @property
    def is_harmless(self) -> bool:
        """Whether the run must go on to its end all the same."""
        return self.victims == "checkpoint" or (self.victims, self.signal) == ("everything", signal.SIGSTOP)

    @property
    def fault(self) -> str:
        """What it is, for the tally."""
        return f"{self}, in a validation" if self.moment == "validation" else str(self)

    def __str__(self) -> str:
        what = {"checkpoint": "a protected checkpoint", "port": "a taken port"}
        then = "" if self.killed_after is None else ", then SIGKILL"
        then += " for a moment" if self.restored_after else ""
        return what.get(self.victims, f"{self.signal.name} to {self.victims}") + then


@dataclass(frozen=True)
class Plan:
    """One trial, drawn before it begins."""

    stays: bool  # the launcher never changes, so that the result must be equal bit for bit
    save_every: int  # updates between saves
    keep: int  # number of newest checkpoints that are kept
    num_workers: int
    blows: list[Blow]
    last: Launcher  # the launcher of the last start, which finishes the run
    small_shm: bool = False  # /dev/shm has no room for the batches of loader processes

    @property
    def flags(self) -> list[str]:
        """Flags of train_vae.py."""
        numbers = {"--save_every_n_steps": self.save_every, "--keep_n_checkpoints": self.keep}
        numbers["--num_workers"] = self.num_workers
        return [text for name, number in numbers.items() for text in (name, str(number))]


def draw_plan(seed: int, trial: int, names: Sequence[str], kills: int) -> Plan:
    """Draw the plan of a trial; equal arguments give equal plans."""
    draw = random.Random(f"{seed}/{trial}")
    every = [each for name in names for each in _stages(name, 1 if name == "python" else 2)]
    random.Random(seed).shuffle(every)
    stays, fixed = trial % 2 == 0, every[trial // 2 % len(every)]

    def launcher() -> Launcher:
        name = draw.choice(names)
        others = _stages(name, 1 if name == "python" else draw.choice([1, 2, 2, 2, 3]))
        return fixed if stays else draw.choice(others)

    def blow(is_last: bool) -> Blow:
        weights = [weight if moment != "end" or is_last else 0 for moment, (weight, _) in MOMENTS.items()]
        (moment,) = draw.choices(list(MOMENTS), weights)
        start, after, delay = launcher(), draw.randint(1, 4), draw.random()
        victims = ["root", "last", "all"] if start.processes > 1 else ["root"]
        if draw.random() < 0.25:
            return _other_fault(draw, start, after, delay)
        if draw.random() < 0.3 or moment == "validation":
            killed_after = draw.uniform(0, 0.2) if draw.random() < 0.4 else None
            return Blow(start, moment, after, delay, draw.choice(POLITE), draw.choice(victims), killed_after)
        if moment == "save":
            delay **= 3  # most blows fall in the first milliseconds, because a save takes only a few
            victims = [victim for victim in victims if victim != "last"]  # only the root saves
        victims += ["everything"] if start.name == "python" else ["everything", "launcher"]
        return Blow(start, moment, after, delay, signal.SIGKILL, draw.choice(victims), None)

    save_every, keep, num_workers = draw.randint(1, 3), draw.randint(1, 3), draw.randint(0, 2)
    blows = [blow(i == kills - 1) for i in range(kills)]
    small_shm = trial % 4 in (1, 2)
    num_workers = max(num_workers, int(any(blow.victims == "worker" for blow in blows)), 2 * small_shm)
    return Plan(stays, save_every, keep, num_workers, blows, launcher(), small_shm)


def _other_fault(draw: random.Random, start: Launcher, after: int, delay: float) -> Blow:
    """Something else than a signal at a process."""
    has_port = start.name in ("torchrun", "deepspeed")
    victims = draw.choice(["frozen", "checkpoint", "worker", *(["port"] if has_port else [])])
    if victims == "frozen":
        moment = draw.choice(["start-up", "update", "save", "validation"])
        seconds = draw.uniform(65, 75) if draw.random() < 0.25 else draw.uniform(1, 8)
        return Blow(start, moment, after, delay, signal.SIGSTOP, "everything", restored_after=seconds)
    moment = {"checkpoint": "saved", "worker": "update", "port": "start-up"}[victims]
    return Blow(start, moment, after, delay, signal.SIGKILL, victims)


def _stages(name: str, processes: int) -> list[Launcher]:
    """The launcher with each ZeRO stage, and with each backend that is only chosen by its flag."""
    if name == "deepspeed":
        return [Launcher(name, processes, stage) for stage in range(4)]
    chosen = [replace(launcher, processes=processes) for launcher in CHOSEN_ON_TWO if launcher.name == name]
    return [Launcher(name, processes), *chosen]
