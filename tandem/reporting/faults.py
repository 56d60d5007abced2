"""Faults and resumes of a run, as marks in its curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tandem.io.reading import counted
from tandem.training.run_folder.starts import place

# Kind of mark, what is counted, and what was done with it.
_COUNTS = {"skipped_updates": ("skipped", "update", "skipped"), "bad_samples": ("bad", "bad sample", "replaced")}


def marks(begun: Sequence[Mapping[str, Any]], rises: Mapping[str, Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """What happened, in the order of updates: {"step", "kind", "text"}.

    Kinds: "killed" (what came after the last save was lost), "resumed" (went on from a save that was made because the
    run was asked to stop), "extended", "skipped" and "bad". A resume on other processes says so in its text.

    Args:
        begun: The lines of starts.jsonl.
        rises: Of each count of faults, where it rose: first and last update, and by how much.
    """
    found = [*_resumes(begun)]
    for name, places in rises.items():
        kind, what, done = _COUNTS[name]
        for first, last, count in places:
            where = f"update {last:,.0f}" if first == last else f"updates {first:,.0f} to {last:,.0f}"
            found.append({"step": last, "kind": kind, "text": f"{counted(int(count), what)} {done} by {where}"})
    return sorted(found, key=lambda mark: mark["step"])


def _resumes(begun: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for before, now in pairwise(begun):
        step, changed = now.get("step"), now.get("changed")
        if type(step) is not int or step < 0:
            continue
        other_length = isinstance(changed, dict) and not {"max_steps", "epochs"}.isdisjoint(changed)
        ended = str(before.get("ended"))
        if ended.startswith("finished"):
            kind, how = "extended", "had finished"
        elif ended.startswith("asked to stop"):
            kind, how = "resumed", "was asked to stop"
        else:
            lost = "had saved nothing" if step == 0 else "lost what came after it"
            kind, how = "killed", f"was killed or failed, and {lost}"
        was, is_now = place(before), place(now)
        moved = f"; from {was} to {is_now}" if was != is_now else f", on {is_now}" if is_now else ""
        with_length = " with another length" if other_length else ""
        text = f"started again from update {step:,}{with_length}: the start before {how}{moved}"
        yield {"step": step, "kind": kind, "text": text}
