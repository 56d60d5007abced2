"""Faults and resumes of a run, as marks in its curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

_LENGTH = {"max_steps", "epochs"}
_COUNTS = {"skipped_updates": ("skipped", "update", "skipped"), "bad_samples": ("bad", "bad sample", "replaced")}


def marks(
    begun: Sequence[Mapping[str, Any]], config: Mapping[str, Any], rises: Mapping[str, Sequence[Sequence[float]]]
) -> list[dict[str, Any]]:
    """What happened, in the order of updates: {"step", "kind", "text"}.

    Kinds: "killed" (what came after the last save was lost), "resumed" (went on from a save that was made because the
    run was asked to stop), "extended", "skipped" and "bad". Each start says how it ended, if it could; those of older
    versions do not, so that it follows from whether the save was due. A resume on other processes says so in its text.

    Args:
        begun: The lines of starts.jsonl.
        config: The settings of the last start.
        rises: Of each count of faults, where it rose: first and last update, and by how much.
    """
    found = [*_resumes(begun, config)][::-1]
    for name, places in rises.items():
        kind, what, done = _COUNTS[name]
        for first, last, count in places:
            where = f"update {last:,.0f}" if first == last else f"updates {first:,.0f} to {last:,.0f}"
            plural = "" if count == 1 else "s"
            found.append({"step": last, "kind": kind, "text": f"{count:,.0f} {what}{plural} {done} by {where}"})
    return sorted(found, key=lambda mark: mark["step"])


def _resumes(begun: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """From the newest to the oldest."""
    settings = dict(config)
    for before, now in reversed(list(pairwise(begun))):
        step, changed = now.get("step"), now.get("changed")
        changed = changed if isinstance(changed, dict) else {}
        # The settings of the start before: config.yaml has those of the last one.
        settings |= {name: pair[0] for name, pair in changed.items() if isinstance(pair, list) and len(pair) == 2}
        if type(step) is not int or step < 0:
            continue
        kind, text = _reason(before, step, settings.get("save_every_n_steps"), bool(_LENGTH & changed.keys()))
        was, is_now = place(before), place(now)
        moved = f"; from {was} to {is_now}" if was != is_now else f", on {is_now}" if is_now else ""
        yield {"step": step, "kind": kind, "text": f"{text}{moved}"}


def _reason(before: Mapping[str, Any], step: int, save_every: Any, has_other_length: bool) -> tuple[str, str]:
    at = f"started again from update {step:,}{' with another length' if has_other_length else ''}"
    lost = "had saved nothing" if step == 0 else "lost what came after it"
    if "ended" in before:
        ended = str(before["ended"])
        if ended.startswith("finished"):
            return "extended", f"{at}: the start before had finished"
        if ended.startswith("asked to stop"):
            return "resumed", f"{at}: the start before was asked to stop"
        return "killed", f"{at}: the start before was killed or failed, and {lost}"
    if has_other_length:
        return "extended", at
    if step == 0:
        return "killed", f"{at}: the start before {lost}"
    if type(save_every) is int and (save_every == 0 or step % save_every):
        return "resumed", f"{at}: a save out of turn, so the run was asked to stop"
    if type(save_every) is int:
        return "killed", f"{at}, a regular save: the start before was probably killed, and {lost}"
    return "resumed", at


def place(start: Mapping[str, Any]) -> str:
    """Backend, processes and device of a start, in words; empty if it does not say."""
    if not start.get("backend"):
        return ""
    device = str(start.get("device", "")).split(":")[0]
    stage = f", ZeRO {start['zero_stage']}" if "zero_stage" in start else ""
    return f"{start['backend']} x {start.get('world_size')} {device}{stage}".strip()[:200]
