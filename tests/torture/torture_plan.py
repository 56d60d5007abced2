"""What torture.py does to a run, drawn from a seed before anything starts."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from launching import Launcher

# For each moment, the relative frequency of drawing it ("end" is drawn only for the last blow of a trial), and the
# longest delay of the blow after it in seconds (for "start-up", as a fraction of the duration of a start).
MOMENTS = {"start-up": (2, 1.1), "update": (2, 0.06), "save": (5, 0.03), "saved": (2, 0.02), "end": (5, 0.3)}
POLITE = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@dataclass(frozen=True)
class Blow:
    """What happens to one start of the run."""

    launcher: Launcher
    moment: str  # a key of MOMENTS
    after: int  # updates after the newest checkpoint that must have been completed
    delay: float  # fraction in [0, 1] of the longest delay in MOMENTS
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

    stays: bool  # the launcher never changes, so that the result must be equal bit for bit
    save_every: int  # updates between saves
    keep: int  # number of newest checkpoints that are kept
    num_workers: int
    blows: list[Blow]
    last: Launcher  # the launcher of the last start, which finishes the run

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
            killed_after = draw.uniform(0, 0.2) if draw.random() < 0.4 else None
            return Blow(start, moment, after, delay, draw.choice(POLITE), draw.choice(victims), killed_after)
        if moment == "save":
            delay **= 3  # most blows fall in the first milliseconds, because a save takes only a few
            victims = [victim for victim in victims if victim != "last"]  # only the root saves
        victims += ["everything"] if start.name == "python" else ["everything", "launcher"]
        return Blow(start, moment, after, delay, signal.SIGKILL, draw.choice(victims), None)

    save_every, keep, num_workers = draw.randint(1, 3), draw.randint(1, 3), draw.randint(0, 2)
    return Plan(stays, save_every, keep, num_workers, [blow(i == kills - 1) for i in range(kills)], launcher())


def _stages(name: str, processes: int) -> list[Launcher]:
    return [Launcher(name, processes, stage) for stage in (range(4) if name == "deepspeed" else [None])]
