"""The checkpoints in a folder, by name; without PyTorch, so that a start finds out early whether it resumes."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step_[0-9]{8,}")


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder, or None. Unfinished ones and links are ignored."""
    return next(reversed(list_checkpoints(folder)), None)


def unseen_folder_message(rank: int, folder: Path) -> str:
    """The message if a process does not see the run folder of the root."""
    return (
        f"rank {rank} does not see {folder}; put --output_dir on a disk that all machines see, because every process "
        "reads the checkpoint there to resume"
    )


def step_of(path: Path) -> int:
    """The number of updates before a checkpoint, from its name."""
    return int(path.name.removeprefix("step_"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first. Links are ignored, because one may lead to another run's folder."""
    candidates = (path for path in folder.glob("step_*") if _NAME.fullmatch(path.name))
    return sorted((path for path in candidates if path.is_dir() and not path.is_symlink()), key=step_of)
