"""What torture.py does to a run, drawn from a seed before anything starts."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from launching import Launcher

# How often each moment is drawn (the end: for a trial's last blow alone), and within how many seconds of it the blow
# falls (start-up: within what part of its length).
MOMENTS = {"start-up": (2, 1.1), "update": (2, 0.06), "save": (5, 0.03), "saved": (2, 0.02), "end": (5, 0.3)}
POLITE = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@dataclass(frozen=True)
class Blow:
    """What happens to one start of the run."""

    launcher: Launcher
    moment: str  # of MOMENTS
    after: int  # updates beyond the checkpoint that must have passed
    delay: float  # in [0, 1], of the seconds in MOMENTS
    signal: signal.Signals
    victims: str  # "root", "last" or "all" ranks, "launcher" alone, or "everything": loader workers too
    killed_after: float | None  # seconds after a polite signal; None: the run may take its time

    @property
    def is_polite(self) -> bool:
        """Whether the run may finish its update and save."""
        return self.signal in POLITE and self.killed_after is None

    def __str__(self) -> str:
        then = "" if self.killed_after is None else ", then SIGKILL"
        return f"{self.signal.name} to {self.victims}{then}"


@dataclass(frozen=True)
class Plan:
    """One trial, drawn before it begins."""

    stays: bool  # one launcher from beginning to end: bit for bit
    save_every: int  # updates
    keep: int  # checkpoints
    num_workers: int
    blows: list[Blow]
    last: Launcher  # finishes what is left

    @property
    def flags(self) -> list[str]:
        """Of train_vae.py."""
        numbers = {"--save_every_n_steps": self.save_every, "--keep_n_checkpoints": self.keep}
        numbers["--num_workers"] = self.num_workers
        return [text for name, number in numbers.items() for text in (name, str(number))]


def draw_plan(seed: int, trial: int, names: Sequence[str], kills: int) -> Plan:
    """The same for the same arguments."""
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
            killed_after = draw.uniform(0, 0.2) if draw.random() < 0.4 else None
            return Blow(start, moment, after, delay, draw.choice(POLITE), draw.choice(victims), killed_after)
        if moment == "save":
            delay **= 3  # most blows fall in its first milliseconds: more than a few it does not take
            victims = [victim for victim in victims if victim != "last"]  # the root alone saves
        victims += ["everything"] if start.name == "python" else ["everything", "launcher"]
        return Blow(start, moment, after, delay, signal.SIGKILL, draw.choice(victims), None)

    save_every, keep, num_workers = draw.randint(1, 3), draw.randint(1, 3), draw.randint(0, 2)
    return Plan(stays, save_every, keep, num_workers, [blow(i == kills - 1) for i in range(kills)], launcher())


def _stages(name: str, processes: int) -> list[Launcher]:
    return [Launcher(name, processes, stage) for stage in (range(4) if name == "deepspeed" else [None])]
