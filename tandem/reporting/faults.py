"""Faults and resumes of a run, as marks in its curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tandem.io.reading import counted
from tandem.training.run_folder.starts import describe_placement

# Kind of mark, noun for what is counted, and the action of the run.
_COUNTS = {"skipped_updates": ("skipped", "update", "skipped"), "bad_samples": ("bad", "bad sample", "replaced")}


def marks(starts: Sequence[Mapping[str, Any]], rises: Mapping[str, Sequence[Sequence[float]]]) -> list[dict[str, Any]]:
    """Marks in the order of updates: {"step", "kind", "text"}.

    Kinds: "killed" (the updates after the last save were lost), "resumed" (from a save that was made because the run
    was asked to stop), "extended", "skipped" and "bad". The text of a resume names a change of machine or processes.

    Args:
        starts: The lines of starts.jsonl.
        rises: For each count of faults its rises: first and last update, and by how much.
    """
    events = [*_resume_marks(starts)]
    for name, intervals in rises.items():
        kind, noun, action = _COUNTS[name]
        for first, last, count in intervals:
            updates = f"update {last:,.0f}" if first == last else f"updates {first:,.0f} to {last:,.0f}"
            events.append({"step": last, "kind": kind, "text": f"{counted(int(count), noun)} {action} by {updates}"})
    return sorted(events, key=lambda event: event["step"])


def _resume_marks(starts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for previous, start in pairwise(starts):
        step, changed_flags = start.get("step"), start.get("changed")
        if type(step) is not int or step < 0:
            continue
        is_other_length = isinstance(changed_flags, dict) and not {"max_steps", "epochs"}.isdisjoint(changed_flags)
        end_text = str(previous.get("ended"))
        if end_text.startswith("finished"):
            kind, cause = "extended", "had finished"
        elif end_text.startswith("asked to stop"):
            kind, cause = "resumed", "was asked to stop"
        else:
            loss_text = "had saved nothing" if step == 0 else "lost what came after it"
            kind, cause = "killed", f"was killed or failed, and {loss_text}"
        old_machine, machine = describe_placement(previous), describe_placement(start)
        move = f"; from {old_machine} to {machine}" if old_machine != machine else f", on {machine}" if machine else ""
        with_length = " with another length" if is_other_length else ""
        text = f"started again from update {step:,}{with_length}: the start before {cause}{move}"
        yield {"step": step, "kind": kind, "text": text}
