"""An output folder that the same command goes on filling after it was cut off, and that no other command touches."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..feed import Processes

SETTINGS_FILE = "settings.json"
_LONGEST_VALUE = 40

# Writes a file whole or not at all, also where the process is killed.
WriteFile = Callable[[Path, bytes], None]


class Workers(Processes, Protocol):
    """Processes that can be asked to stop."""

    def stop_requested(self) -> bool: ...


class Rounds:
    """Shards spread over processes: yields this process's shard of each round, None where none is left for it, equally
    often on every process. Ends early where a signal asks for it, after the round under way.

    Args:
        shards: What is to be done, the same on every process.
        processes: Who does it.
        report: Told how many shards are done, after each round.
    """

    def __init__(self, shards: Sequence[int], processes: Workers, report: Callable[[int], None]) -> None:
        self._shards, self._processes, self._report = shards, processes, report
        #: Shards that are not done.
        self.left = len(shards)

    def __iter__(self) -> Iterator[int | None]:
        world = self._processes.world_size
        for first in range(0, len(self._shards), world):
            mine = first + self._processes.rank
            yield self._shards[mine] if mine < len(self._shards) else None
            self.left = max(0, self.left - world)
            self._report(len(self._shards) - self.left)
            # The second says what the first one asked of all processes.
            if any([self._processes.stop_requested(), self._processes.stop_requested()]):
                return


def open_output(
    folder: Path,
    settings: Mapping[str, Any],
    processes: Processes,
    *,
    write: WriteFile,
    hold: Callable[[Path], Any],
    fresh: bool,
    say: Callable[[str], None],
) -> Any:
    """Make, lock and claim a folder, on one process for all of them. Collective.

    Args:
        folder: Where to write.
        settings: As for `claim_folder`, and the same on every process.
        processes: Who writes there.
        write: Writes a file whole or not at all.
        hold: Locks a file for as long as what it returns is kept.
        fresh: Move away what an earlier command wrote, to `<folder>.old-<n>`.
        say: Told where to.

    Returns:
        What `hold` gave, on the process that writes.

    Raises:
        UserMistake: one line, where the folder cannot be written, or is in use, or holds something else.
    """
    on_all = processes.gather_objects(settings)
    lock = None
    with processes.agreement():
        if any(theirs != on_all[0] for theirs in on_all):
            raise ValueError("the processes do not see the same files, or compute on different devices")
        if processes.rank == 0:
            try:
                if fresh and folder.is_dir():
                    with hold(folder / ".lock"):
                        moved = move_away(folder)
                    say(f"starting over; what was in {folder} is in {moved}" if moved else f"{folder} held nothing yet")
                folder.mkdir(parents=True, exist_ok=True)
                lock = hold(folder / ".lock")
                claim_folder(folder, settings, write)
            except OSError as error:
                reason = error.strerror or error
                raise ValueError(f"cannot write the folder {folder}: {reason}; give another --output") from None
    return lock


def explained(write: WriteFile) -> WriteFile:
    """`write`, with a ValueError of one line where the disk does not take the file."""

    def write_or_explain(path: Path, content: bytes) -> None:
        try:
            write(path, content)
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cannot write {path}: {reason}; mend that, and the same command goes on") from None

    return write_or_explain


def claim_folder(folder: Path, settings: Mapping[str, Any], write: WriteFile) -> None:
    """Begin in an empty folder, or go on in one that was begun with the same settings.

    Args:
        folder: Is there. Names that begin with a dot do not count.
        settings: Everything that what is written here depends on, as JSON values; kept in settings.json.
        write: Writes that file.

    Raises:
        ValueError: one line, where the folder holds something else; it names each setting that differs.
        OSError: the folder cannot be read or written.
    """
    path = folder / SETTINGS_FILE
    if path.exists():
        _require_equal(folder, _read_object(path), settings)
        return
    if others := sorted(name for name in os.listdir(folder) if not name.startswith(".")):
        raise ValueError(
            f"{folder} holds {others[0]!r} and no {SETTINGS_FILE}, so it is not a folder that can be continued; give "
            "an --output that is new or empty"
        )
    write(path, json_bytes(settings))


def move_away(folder: Path) -> Path | None:
    """Rename a folder that `claim_folder` began to `<folder>.old-<n>`; where it went, or None where there is none."""
    if not (folder / SETTINGS_FILE).exists():
        return None
    folder = Path(os.path.abspath(folder))
    number = 1
    while (old := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    os.rename(folder, old)
    return old


def json_bytes(value: Any) -> bytes:
    """The content of a JSON file for people to read."""
    return (json.dumps(value, indent=2) + "\n").encode()


def sha256_of(paths: Iterable[Path]) -> str:
    """Hexadecimal SHA-256 of files, one after the other: of one file, what `sha256sum` says."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _require_equal(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    now = json.loads(json.dumps(now))  # tuples become lists, as they did in the file
    differences = [
        f"{name} was {_shown(before.get(name))} and is now {_shown(now.get(name))}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if differences:
        raise ValueError(
            f"cannot go on in {folder}, which was begun with other settings: {', '.join(differences)}; use the old "
            "ones, give another --output, or start over with --fresh"
        )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read {path}: {reason}; give another --output, or start over with --fresh") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; give another --output, or start over with --fresh")
    return content


def _shown(value: Any) -> str:
    """A value in little space."""
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:12]}..."
