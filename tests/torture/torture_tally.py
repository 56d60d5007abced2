"""What torture.py counts and reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torture_plan import Blow

from benchmarks.launching import Launcher


@dataclass
class Start:
    """What one start of the run left behind."""

    code: int
    log: str
    blow: Blow | None = None  # the blow, if it was struck
    before: list[int] = field(default_factory=list)  # checkpoints that existed at the start or at the blow
    seconds: float = 0.0  # from the blow, or else from the start, to the end


@dataclass
class Tally:
    trials: int = 0
    trials_with_blows: int = 0
    launchers: Counter[str] = field(default_factory=Counter)  # that were struck
    faults: Counter[str] = field(default_factory=Counter)  # by kind
    lost_after: Counter[str] = field(default_factory=Counter)  # trials that lost something, by the newest fault
    in_save: int = 0
    restarts: int = 0
    slowest_end: float = 0.0  # seconds from a blow to the end of the job
    difference: float = 0.0
    lost: list[str] = field(default_factory=list)

    @property
    def struck(self) -> int:
        """How many faults there were."""
        return sum(self.faults.values())

    def count(self, launcher: Launcher, start: Start, in_save: bool) -> None:
        """Count a start, and the blow that ended it, if any."""
        if start.blow:
            self.launchers[str(launcher)] += 1
            self.faults[start.blow.fault] += 1
            self.in_save += in_save
            self.slowest_end = max(self.slowest_end, start.seconds)

    def __str__(self) -> str:
        lines = [
            f"{self.trials} trials, {self.restarts} restarts, {self.struck} faults, of which {self.in_save} fell into "
            f"a save; the slowest job ended {self.slowest_end:.1f} s later",
            *(f"{count:5d}  {launcher}" for launcher, count in sorted(self.launchers.items())),
            *(
                f"{self.faults[kind]:5d}  {kind}: {self.lost_after[kind] or 'none'} lost"
                for kind in sorted(self.faults | self.lost_after)
            ),
            f"largest relative difference of a loss where the backend changed: {self.difference:.1e}",
            *(f"LOST in {text}" for text in self.lost),
        ]
        return "\n".join([*lines, *(["nothing was lost"] if self.struck and not self.lost else [])])
