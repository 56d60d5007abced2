"""What torture.py counts and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torture_checks import last_words
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
    left_validation: bool = False  # whether the newest checkpoint says that its evaluation is still to be made


@dataclass
class Tally:
    trials: int = 0
    trials_with_blows: int = 0
    launchers: Counter[str] = field(default_factory=Counter)  # that were struck
    faults: Counter[str] = field(default_factory=Counter)  # by kind
    lost_after: Counter[str] = field(default_factory=Counter)  # trials that lost something, by the newest fault
    kills: int = 0
    polite: int = 0
    in_save: int = 0
    in_startup: int = 0
    in_validation: int = 0
    restarts: int = 0
    repeated: int = 0  # updates that were made again
    slowest_end: float = 0.0  # seconds from a blow to the end of the job
    told: int = 0  # of the starts that a blow ended: in how many a process said why
    ended: int = 0
    difference: float = 0.0
    lost: list[str] = field(default_factory=list)

    @property
    def struck(self) -> int:
        """How many faults there were."""
        return sum(self.faults.values())

    def count(self, launcher: Launcher, start: Start, trained: Sequence[int], in_save: bool, updates: int) -> None:
        """Count a start, and the blow that ended it, if any. ``updates``: number of updates logged before the start."""
        self.in_validation += start.left_validation
        self.repeated += max(0, updates + 1 - trained[0]) if trained else 0
        if start.blow:
            self.launchers[str(launcher)] += 1
            self.faults[start.blow.fault] += 1
            self.kills += start.blow.is_kill
            self.polite += start.blow.is_polite
            self.in_save += in_save
            self.in_startup += not trained
            self.slowest_end = max(self.slowest_end, start.seconds)
            self.ended += start.code != 0
            self.told += start.code != 0 and bool(last_words(start.log))

    def __str__(self) -> str:
        others = self.struck - self.kills - self.polite
        lines = [
            f"{self.trials} trials, {self.restarts} restarts, {self.repeated} updates repeated",
            f"{self.kills} kills and {self.polite} polite signals, {others} other faults: {self.in_save} fell into a "
            f"save, {self.in_startup} into a start-up, {self.in_validation} left a validation to the next start; the "
            f"slowest job ended {self.slowest_end:.1f} s later",
            *(f"{count:5d}  {launcher}" for launcher, count in sorted(self.launchers.items())),
            *(
                f"{self.faults[kind]:5d}  {kind}: {self.lost_after[kind] or 'none'} lost"
                for kind in sorted(self.faults | self.lost_after)
            ),
            f"{self.ended} starts were ended; in {self.told} a process was left to say why",
            f"largest relative difference of a loss where the backend changed: {self.difference:.1e}",
            *(f"LOST in {text}" for text in self.lost),
        ]
        return "\n".join([*lines, *(["nothing was lost"] if self.struck and not self.lost else [])])
