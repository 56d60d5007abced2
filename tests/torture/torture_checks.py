"""What torture.py checks of a run folder: read from the disk and the log, without the product's code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.training.metrics.directions import EVALUATION_SECONDS

# Metrics that two runs need not share.
WALL_CLOCK = {
    "samples_per_second", "seconds", "time", "data_seconds", "communication_seconds", "save_seconds",
    EVALUATION_SECONDS, "peak_host_memory_gb", "gflop_per_sample", "tflops_per_second",
}  # fmt: skip


class Lost(Exception):
    """The run did not keep a promise."""


def checkpoint_steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def unfinished_saves(run: Path) -> set[int]:
    """Saves and deletions that are under way or were killed, by inode, because a name can be used again."""
    with contextlib.suppress(FileNotFoundError), os.scandir(run / "checkpoints") as entries:
        return {entry.inode() for entry in entries if entry.name.startswith((".unfinished-", ".unwanted-"))}
    return set()


def finished_step(run: Path) -> int | None:
    """The update whose weights model/ holds, once the run has reached its end."""
    path = run / "model" / "training.json"
    return json.loads(path.read_text())["step"] if path.exists() else None


def verified_files(checkpoint: Path) -> set[str]:
    """Names of a checkpoint's files, apart from SHA256SUMS.

    Raises:
        Lost: the files do not match the checkpoint's SHA256SUMS.
    """
    there = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}
    if there.pop("SHA256SUMS", None) is None:
        raise Lost(f"{checkpoint} has no SHA256SUMS")
    lines = (checkpoint / "SHA256SUMS").read_text().splitlines()
    said = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if there != said:
        wrong = sorted(name for name in there.keys() | said.keys() if there.get(name) != said.get(name))
        raise Lost(f"{checkpoint} is damaged: {', '.join(wrong)}")
    return set(there)


def check_checkpoints(run: Path, before: Sequence[int], keep: int, files: set[str]) -> None:
    """Check that every checkpoint holds exactly `files`, complete, and that none of the `keep` newest checkpoints that
    existed `before` is gone."""
    there = checkpoint_steps(run)
    if aside := sorted(path.name for path in (run / "checkpoints").glob("damaged-*")):
        raise Lost(f"the run found {', '.join(aside)} in {run}")
    for step in there:
        if (found := verified_files(checkpoint_path(run, step))) != files:
            raise Lost(f"{checkpoint_path(run, step)} holds {sorted(found)} instead of {sorted(files)}")
    if gone := set(sorted({*there, *before})[-keep:]) - set(there):
        raise Lost(f"checkpoints {sorted(gone)} are gone; before the kill there were {list(before)}, now {there}")


def check_kept_up(run: Path, trained: Sequence[int], save_every: int) -> None:
    """Check that at most two saves lie between a run and its newest checkpoint, because a save waits for the one before
    it."""
    # The last update that was logged may not have got as far as its save.
    saves_begun = (max(trained, default=0) - 1) // save_every
    newest = max(checkpoint_steps(run), default=0)
    if newest < save_every * (saves_begun - 1):
        raise Lost(f"the newest checkpoint is {newest}, though update {trained[-1]} was reached")


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl, without a last line that a kill has left incomplete.

    Raises:
        Lost: the lines are not those of the updates 1, 2, 3, ..., each once.
    """
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    all_metrics = [json.loads(line) for line in lines if line.endswith(b"\n")]
    metrics = [line for line in all_metrics if EVALUATION_SECONDS not in line]
    steps = [line["step"] for line in metrics]
    evaluations = {line["step"]: line for line in all_metrics if EVALUATION_SECONDS in line}
    if steps != list(range(1, len(steps) + 1)) or len(evaluations) + len(steps) != len(all_metrics):
        raise Lost(f"{path} holds the updates {steps}: one is there twice or missing")
    return [line | evaluations.get(line["step"], {}) for line in metrics]


def trained_steps(log: str) -> list[int]:
    """Updates that a start has completed, as its log shows them."""
    return [int(step) for step in re.findall(r"update +(\d+)/", log)]


def next_line(run: Path) -> int:
    """The update whose line the next start must log first: the one after the newest checkpoint."""
    steps = checkpoint_steps(run)
    return steps[-1] + 1 if steps else 1


def check_continuation(log: str, newest: int | None, first: int, run: Path) -> None:
    """Check that a start which got as far as training went on from the newest checkpoint, said so, and first logged the
    line of update `first`."""
    trained, said = trained_steps(log), re.search(r"resumed from (\S+)", log)
    if trained and trained[0] != first:
        raise Lost(f"the run went on with update {trained[0]}, though the newest checkpoint was {newest}")
    if newest is not None and "images to train on" in log and not said:
        raise Lost(f"the run did not say that it resumed, though checkpoint {newest} was there")
    if said and (newest is None or Path(said[1]) != checkpoint_path(run, newest)):
        raise Lost(f"the run resumed from {said[1]}, though the newest checkpoint was {newest}")


def check_polite_end(log: str, run: Path, updates: int) -> None:
    """Check that a run which was asked to stop while it trained saved its last update, unless it reached its end
    first."""
    said, steps, logged = re.search(r"asked to stop: saved update (\d+)", log), checkpoint_steps(run), read_metrics(run)
    if said is None:
        if finished_step(run) != updates:
            raise Lost("the run was asked to stop and ended without a save")
    elif not steps or int(said[1]) != steps[-1] or len(logged) != next_line(run) - 1:
        raise Lost(f"the run said that it saved update {said[1]}; it saved {steps} and logged {len(logged)} updates")


def check_last_words(log: str, script: str) -> None:
    """Check that no process of the script ended with a traceback. Launchers have tracebacks of their own, and Python
    has one for a SIGINT in the first tenth of a second, while the script imports what could handle it."""
    in_script = rf'File "[^"]*{script}", line'
    log = re.sub(rf"{in_script} \d+, in <module>\n[^\n]*\b(?:from|import) (?:(?!{in_script}).)*?\bKeyboardInterrupt\n",
                 "", log, flags=re.DOTALL)  # fmt: skip
    if found := re.search(rf"{in_script}[^\0]*", log):
        raise Lost(f"a process ended with a traceback: {found[0][:3000]}")


def check_same_run(run: Path, reference: Path) -> None:
    """Check that every metric of every update, the final weights, the last checkpoint and the pictures are equal bit
    for bit."""
    for ours, theirs in zip(read_metrics(run), read_metrics(reference), strict=True):
        names = (ours.keys() | theirs.keys()) - WALL_CLOCK
        if wrong := sorted(name for name in names if ours.get(name) != theirs.get(name)):
            raise Lost(f"update {ours['step']} is not the uninterrupted run's in {wrong}: {ours}, {theirs}")
    parts = checkpoint_path(reference, checkpoint_steps(reference)[-1]).glob("*.safetensors")
    pictures = sorted((reference / "samples").glob("*"))
    for path in [*parts, reference / "model/model.safetensors", *pictures]:
        if path.read_bytes() != (run / path.relative_to(reference)).read_bytes():
            raise Lost(f"{path.relative_to(reference)} is not the uninterrupted run's")


def loss_difference(run: Path, reference: Path) -> float:
    """The largest relative difference of a loss."""
    pairs = zip(read_metrics(run), read_metrics(reference), strict=True)
    return max(abs(ours["loss"] - theirs["loss"]) / abs(theirs["loss"]) for ours, theirs in pairs)
