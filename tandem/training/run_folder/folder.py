"""The folder of a run: its files, its lock, and whether the arguments fit the run that is resumed there."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.fields import identity
from tandem.io.reading import error_text, read_json_or_empty, read_yaml
from tandem.io.renamed import rename_settings
from tandem.io.writing import acquire_lock, move_aside, other_holder, write_atomically
from tandem.training.checkpoint.listing import latest_checkpoint, unseen_folder_message

from .starts import add_start, script_of, starts

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup

# Data order, split and noise depend on the seeds: with others, a resumed run would not continue the old one, and would
# be validated on samples that it was trained on.
_SEED_FLAGS = ("seed", "split_seed")

# A folder with one of these files holds a run, which is resumed or (with --fresh) moved away, or something else, which
# the run refuses to overwrite. The keys are those that the config.yaml of every run has.
_RUN_FILES = ("config.yaml", "metrics.jsonl", "checkpoints")
_RUN_CONFIG_KEYS = {"output_dir", "keep_n_checkpoints", "on_bad_sample"}


class RunFolder:
    """The folder `output_dir` and its files, which the root reads and writes.

    Args:
        fresh: Rename a run in the folder to `<output_dir>.old-<n>`, so that this one starts over. Without effect on a
            run that was begun under the same torchrun: it starts its processes again when a machine joins, and does not
            count that as a restart.

    Raises:
        UserMistake: one line, if the folder cannot be created or written, or another process uses it.
    """

    def __init__(self, output_dir: str | Path, processes: ProcessGroup, *, fresh: bool = False) -> None:
        self.path = Path(output_dir)
        self.checkpoints_dir, self.samples_dir = self.path / "checkpoints", self.path / "samples"
        self.metrics_file = self.path / "metrics.jsonl"
        #: Created at the end of the run.
        self.model_dir = self.path / "model"
        self._lock_file = self.path / ".lock"
        self._processes, self._torchruns = processes, processes.torchrun_ids()
        #: New path of the run that `fresh` has renamed; None if it has renamed none.
        self.moved_to: str | None
        #: The number of updates of the model in model/; None if model/ is not complete.
        self.finished_step: int | None
        folder_state = None
        with processes.raise_on_all_ranks():  # here the others wait for the root, which may wait for a lock
            if processes.is_root:
                with self._one_line_errors():
                    folder_state = self._open(fresh)
        self.moved_to, self.finished_step = processes.broadcast_object(folder_state)
        #: Whether this process can read the root's folder, from which each process resumes.
        self.is_seen = os.path.exists(self._lock_file)

    def write_sample(self, step: int, content: bytes, ending: str) -> None:
        """Write a picture or film of a step, on the root. Raises OSError."""
        self.check_is_here()
        self.samples_dir.mkdir(exist_ok=True)
        write_atomically(self.samples_dir / f"step_{step:08d}.{ending}", content)

    def check_script(self, script: str) -> None:
        """Raise ValueError, in one line, if the folder holds the run of another script. On the root."""
        run_script = script_of(self.path)
        if run_script and run_script != script:
            raise ValueError(f"{self.path} is a run of {run_script}, not of {script}: give another --output_dir")

    def check_config(
        self,
        config: Mapping[str, Any],
        fixed_flags: Mapping[str, Callable[[Any], Any]],
        explicit_flags: Collection[str],
    ) -> None:
        """Refuse to resume with arguments that would change the model, or with another seed. On the root.

        Args:
            fixed_flags: Flags that may not change, each with a function that returns the compared part of its value.
            explicit_flags: Flags on the command line: others that differ may follow from these.

        Raises:
            ValueError: one line that names the flags that differ, with both values.
        """
        saved = _read_config(self.path)
        old, new = _fill_split_seed(saved), _fill_split_seed(config)
        changed = [
            name
            for name, normalize in {**fixed_flags, **dict.fromkeys(_SEED_FLAGS, identity)}.items()
            if name in config and normalize(old.get(name)) != normalize(new[name])
        ]
        if changed:
            changed = [name for name in changed if saved.get(name) != config[name]] or changed
            reported = [name for name in changed if name in explicit_flags or name in _SEED_FLAGS] or changed
            differences = [
                f"--{name} was {format_setting(saved.get(name))} and is now {format_setting(config[name])}"
                for name in reported
            ]
            raise ValueError(
                f"cannot resume {self.path} as another run: {', '.join(differences)}; use the old values, another "
                "--output_dir, or --fresh to start over"
            )

    def begin(self, config: Mapping[str, Any], details: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Write config.yaml, with every resolved argument as `--config` reads it, and add a line to starts.jsonl: what
        `environment` of starts.py returns, and `details` (JSON values), such as script, backend and processes. On the
        root.

        Returns:
            The settings that differ from those of the previous start: by name, the old and the new value. Empty if
            config.yaml was missing or damaged.
        """
        import yaml  # not at the top: the scripts import this file before they answer --help

        old: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            old = _read_config(self.path)
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        new = yaml.safe_load(text)  # in which tuples have become lists
        differing = {name: [old[name], new[name]] for name in new if old.get(name, new[name]) != new[name]}
        changed: dict[str, list[Any]] = json.loads(json.dumps(differing, default=str))
        with self._one_line_errors():
            write_atomically(self.path / "config.yaml", text.encode())
            add_start(self.path, {"torchruns": self._torchruns, **details, "changed": changed})
        return changed

    @contextlib.contextmanager
    def _one_line_errors(self) -> Iterator[None]:
        """Turn an OSError into a ValueError of one line."""
        try:
            yield
        except OSError as error:
            location = f" (at {error.filename})" if error.filename not in (None, str(self.path)) else ""
            hint = "make room there or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise ValueError(
                f"cannot write the run folder {self.path}: {error_text(error)}{location}; {hint}"
                "give another --output_dir"
            ) from None

    def mark_finished(self, step: int) -> None:
        """Write model/training.json, the record that model/ is complete, with its number of updates. On the root."""
        with self._one_line_errors():
            write_atomically(self.model_dir / "training.json", json.dumps({"step": step}).encode())

    def check_is_here(self) -> None:
        """Raise OSError if the folder was renamed or deleted since this run began; another run may have begun in its
        place. On the root."""
        if not self.path.is_dir():
            raise OSError(f"the run folder {self.path} is gone; if it was renamed, rename it back")
        if holder := other_holder(self._lock_file, self._lock):
            raise OSError(f"the run folder {self.path} now belongs to {holder}")

    def _open(self, fresh: bool) -> tuple[str | None, int | None]:
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"cannot write the run folder {self.path}: it is a file; give another --output_dir")
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"--output_dir {str(self.path)!r} is not UTF-8 text, and weights in a folder of such a name cannot be "
                "read again; give another --output_dir"
            ) from None
        moved_to = None
        files = [name for name in _RUN_FILES if (self.path / name).exists()]
        if files and not self._holds_run():
            raise ValueError(
                f"{self.path} holds {files[0]} of something else than a run, which would be overwritten; give another "
                "--output_dir"
            )
        if fresh and files and not _was_started_by(self.path, self._torchruns):
            if set(Path(os.path.normpath(self.path)).parts) <= {".."}:  # "." is the folder, where it has moved to, too
                raise ValueError(
                    f"--fresh moves the old run aside, and --output_dir {self.path} would still lead to it: give the "
                    "whole path of the folder"
                )
            with acquire_lock(self._lock_file, self._processes.heartbeat):
                moved_to = str(move_aside(self.path))
        Path(os.path.realpath(self.path)).mkdir(parents=True, exist_ok=True)  # of a link, what it leads to
        self._lock = acquire_lock(self._lock_file, self._processes.heartbeat)
        # Write 4 KiB: an empty file can be created on a full disk.
        probe = self.path / ".writable"
        write_atomically(probe, bytes(4096))
        probe.unlink()
        finished_step = read_json_or_empty(self.model_dir / "training.json").get("step")
        return moved_to, finished_step if type(finished_step) is int else None

    def _holds_run(self) -> bool:
        """Whether the folder holds files that only a run writes: names such as config.yaml are common."""
        with contextlib.suppress(ValueError):
            if _read_config(self.path).keys() >= _RUN_CONFIG_KEYS:
                return True
        has_start = any(start.keys() >= {"command", "packages"} for start in starts(self.path))
        return has_start or any(self.checkpoints_dir.glob("*step_*/state.json"))


def read_config_to_resume(args: argparse.Namespace, processes: ProcessGroup) -> dict[str, Any] | None:
    """The config.yaml of the run that these arguments resume, so that they need not repeat the flags of its model; None
    for a new run. Collective.

    Raises:
        UserMistake: one line, if config.yaml cannot be read, or a process does not see it: a later message, such as
            about a missing tokenizer, would mislead.
    """
    folder, config = Path(args.output_dir), None
    torchruns = processes.torchrun_ids() if args.fresh else []
    with processes.raise_on_all_ranks():
        begins_anew = args.dry_run or (
            args.fresh and not processes.is_restart and not _was_started_by(folder, torchruns)
        )
        is_resuming = False
        with contextlib.suppress(OSError):  # an unreadable folder, which `RunFolder` reports
            is_ours = not begins_anew and script_of(folder) in (None, args.script)
            is_resuming = is_ours and processes.is_root and latest_checkpoint(folder / "checkpoints") is not None
        if is_resuming:
            config = json.loads(json.dumps(_read_config(folder), default=str))
    resumed: dict[str, Any] | None = processes.broadcast_object(config)
    with processes.raise_on_all_ranks():
        if resumed is not None and not os.path.exists(folder / "config.yaml"):
            raise ValueError(f"cannot resume: {unseen_folder_message(processes.rank, folder)}")
    return resumed


def _read_config(folder: Path) -> dict[str, Any]:
    """The settings in config.yaml of a run, by their present names. Raises ValueError, in one line, if it cannot be
    read."""
    path = folder / "config.yaml"
    try:
        saved = read_yaml(path)
        settings = rename_settings(saved) if isinstance(saved, dict) else {}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot resume: {path}: {error_text(error)}; restore it, or start over with --fresh"
        ) from None
    # Earlier versions wrote a path as it was given, such as ~/photos.
    return {name: os.path.expanduser(value) if isinstance(value, str) else value for name, value in settings.items()}


def _was_started_by(folder: Path, torchruns: Collection[str]) -> bool:
    """Whether one of these torchruns has started the run in the folder before."""
    launch_ids = [start.get("torchruns") for start in starts(folder)]
    return any(torchrun in ids for ids in launch_ids if isinstance(ids, list) for torchrun in torchruns)


def _fill_split_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which --split_seed has its default, the value of --seed."""
    seed = settings.get("split_seed")
    return {**settings, "split_seed": settings.get("seed") if seed is None else seed}


def format_setting(value: Any) -> str:
    """A setting as in a command: 30 for the number 30.0, 8 16 for a list."""
    if isinstance(value, list | tuple):
        return " ".join(map(format_setting, value)) or "none"
    return "not given" if value is None else f"{value:.12g}" if isinstance(value, float) else str(value)


def check_output_outside_samples(output_dir: str, sources: Mapping[str, str | None]) -> None:
    """Check that a run does not write into a folder of samples, where its pictures would become samples themselves.

    Args:
        sources: Where samples come from, by flag.

    Raises:
        ValueError: one line, if a source is `output_dir`, or holds it outside of hidden folders (names that begin with
            a dot), which are not searched for samples.
    """
    for flag, source in sources.items():
        if source is None or not os.path.isdir(source):
            continue
        path = os.path.relpath(os.path.realpath(output_dir), os.path.realpath(source)).split(os.sep)
        if path == ["."] or not any(part.startswith(".") for part in path):  # ".." leads out of the source
            raise ValueError(
                f"--output_dir {output_dir} is in --{flag} {source}, so that the pictures of the run would become "
                "samples; give an --output_dir outside"
            )
