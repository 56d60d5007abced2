"""An output folder that the same command continues to fill after an interruption, and that no other command changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tandem.io import writing
from tandem.io.exits import AskedToStop
from tandem.io.reading import counted, error_text, open_regular, read_json
from tandem.io.renamed import rename_settings

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup

SETTINGS_FILE = "settings.json"
_LONGEST_VALUE = 40
_SYNCS_AT_ONCE = 32


class OutputFolder:
    """A folder that rank 0 makes, locks and claims for one command. All processes must construct this object together.

    settings.json holds the settings with which the folder was begun; a command with other settings is refused. The
    folder stays locked as long as the object exists.

    Args:
        settings: Everything that the content depends on, as JSON values, equal on all processes.
        fresh: Move a folder that an earlier command filled to `<path>.old-<n>`, and start over.
        say: Prints a line, on one process only.

    Raises:
        UserMistake: one line, if the folder cannot be written, is in use, or holds something else. The line names
            each setting that differs.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        processes: ProcessGroup,
        *,
        fresh: bool,
        say: Callable[[str], None],
    ) -> None:
        self.path, self.settings, self.processes, self.say = path, settings, processes, say
        all_settings = processes.gather_objects(settings)
        with processes.raise_on_all_ranks():
            if any(settings_of_rank != all_settings[0] for settings_of_rank in all_settings):
                raise ValueError("the processes do not see the same files, or compute on different devices")
            if processes.rank == 0:
                try:
                    self._open(fresh)
                except OSError as error:
                    reason = f"cannot write the folder {path}: {error_text(error)}"
                    raise ValueError(f"{reason}; give another --output") from None

    def write(self, name: str, content: bytes | Iterable[bytes]) -> None:
        """Write a file of the folder, or of one inside it, whole or not at all, even if the process is killed. Its
        content may come in blocks. Raises ValueError, in one line, if the file cannot be written."""
        with create_file(self.path / name, inside=self.path) as file:
            file.writelines([content] if isinstance(content, bytes) else content)

    def write_many(self, files: Iterable[tuple[str, bytes]]) -> None:
        """Write files, each with its name, as `write` does, but sync them at the end: some at once, for which the file
        system needs a small part of the time. After a power cut before the end they may be incomplete."""
        paths = []
        for name, content in files:
            paths.append(self.path / name)
            with create_file(paths[-1], inside=self.path, is_synced=False) as file:
                file.write(content)
        with explain_write_errors(self.path), ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
            list(pool.map(writing.sync, paths))

    def rounds(self, shards: Sequence[int], verb: str) -> Iterator[int | None]:
        """Spread shards over the processes: yields this process's shard of each round, or None if there is none for it,
        so that every process has the same number of rounds. After each round a line states how many shards are `verb`
        (such as "encoded"). Raises AskedToStop after a signal, before the next round."""
        world = self.processes.world_size
        for first in range(0, len(shards), world):
            if self.processes.stop_requested(now=True):
                n_left = len(shards) - first
                self.say(f"asked to stop: the same command goes on with the last {counted(n_left, 'shard')}")
                raise AskedToStop
            position = first + self.processes.rank
            yield shards[position] if position < len(shards) else None
            self.say(f"{verb} {min(first + world, len(shards))} of {counted(len(shards), 'shard')}")

    def _open(self, fresh: bool) -> None:
        """Make, lock and claim the folder. Raises OSError and ValueError."""
        lock = self.path / ".lock"
        if fresh and self.path.is_dir():
            with writing.acquire_lock(lock, self.processes.heartbeat):
                old_folder = writing.move_aside(self.path) if (self.path / SETTINGS_FILE).exists() else None
            line = f"starting over; what was in {self.path} is in {old_folder}"
            self.say(line if old_folder else f"{self.path} held nothing yet")
        Path(os.path.realpath(self.path)).mkdir(parents=True, exist_ok=True)  # of a link, what it leads to
        self._lock = writing.acquire_lock(lock, self.processes.heartbeat)
        self._claim()

    def _claim(self) -> None:
        """Begin in an empty folder, or continue in one that was begun with the same settings."""
        path = self.path / SETTINGS_FILE
        if path.exists():
            self._require_same(path)
        elif others := sorted(name for name in os.listdir(self.path) if not name.startswith(".")):
            raise ValueError(
                f"{self.path} holds {others[0]!r} and no {SETTINGS_FILE}, so it is not a folder that can be continued; "
                "give an --output that is new or empty"
            )
        else:
            writing.write_atomically(path, json_bytes(self.settings))

    def _require_same(self, path: Path) -> None:
        try:
            old_settings = rename_settings(read_json(path))
        except (OSError, ValueError) as error:
            hint = "give another --output, or start over with --fresh"
            raise ValueError(f"cannot read {path}: {error_text(error)}; {hint}") from None
        settings = json.loads(json.dumps(self.settings))  # tuples become lists, as they did in the file
        differences = [
            f"{name} was {_shorten(old_settings.get(name))} and is now {_shorten(settings.get(name))}"
            for name in dict.fromkeys([*old_settings, *settings])
            if old_settings.get(name) != settings.get(name)
        ]
        if differences:
            raise ValueError(
                f"cannot go on in {self.path}, which was begun with other settings: {', '.join(differences)}; use the "
                "old ones, give another --output, or start over with --fresh"
            )


@contextlib.contextmanager
def create_file(path: Path, *, inside: Path | None = None, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Context with a file, perhaps in a new folder, that is written whole or not at all, even if the process is killed.
    An OSError becomes a ValueError, in one line. The folder `inside` has to exist: without its settings, a new one
    could not be continued."""
    with explain_write_errors(path):
        if inside is not None:
            inside.stat()
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing.replacing(path, is_synced=is_synced) as temporary, writing.create(temporary) as file:
            yield file


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError, as of a full disk, into a ValueError of one line that names what was to be written."""
    try:
        yield
    except OSError as error:
        hint = "repair that and start the same command, which goes on"
        raise ValueError(f"cannot write {path}: {error_text(error)}; {hint}") from None


def json_bytes(value: Any) -> bytes:
    """The content of a JSON file for people to read."""
    return (json.dumps(value, indent=2) + "\n").encode()


def sha256_of(paths: Iterable[Path]) -> str:
    """Hexadecimal SHA-256 of the concatenated files; for one file, the same as `sha256sum` prints."""
    digest = hashlib.sha256()
    for path in paths:
        with open_regular(path) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def names_sha256(names: Iterable[str]) -> str:
    """Hexadecimal SHA-256 of paths: each in the bytes of the file system, followed by a zero byte."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(os.fsencode(name) + b"\0")
    return digest.hexdigest()


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:12]}..."
