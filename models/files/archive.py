"""A look through a .pt file before PyTorch reads it.

``torch.load(weights_only=True)`` runs no code from a file. But a file may still tell it to allocate any amount of
memory: by members that unpack to more than the file, or by calls such as bytearray(10**12), which it admits.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

# All that plain tensors in dicts need. bytearray, sparse and meta tensors are not among them.
_CALLS = {
    "collections OrderedDict",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_tensor_v2",
    *(
        f"torch {kind}Storage"
        for kind in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
    ),
}

# Sizes of the records that end a zip file: zip64's end of the table of contents, its locator, and the plain end.
_ZIP64_END, _LOCATOR, _END = 56, 20, 22


def check_archive(path: Path) -> None:
    """Nothing in the file is compressed, hidden, or calls for more than plain tensors.

    Raises:
        OSError, ValueError, zipfile.BadZipFile: it is such a file, or no .pt file of PyTorch 1.6 or later.
    """
    with zipfile.ZipFile(path) as archive:
        if not _has_one_table_of_contents(path, archive.start_dir):
            raise ValueError("it can be read in more than one way")
        members = archive.infolist()
        pickles = [member for member in members if member.filename.lower().endswith("/data.pkl")]
        if len(pickles) != 1:  # PyTorch's reader does not tell capitals from small letters
            raise ValueError(f"it holds data.pkl {len(pickles)} times")
        unpacked = sum(max(member.file_size, member.compress_size) for member in members)
        if any(member.compress_type for member in members) or unpacked > path.stat().st_size:
            raise ValueError("it would unpack to more than the file; PyTorch writes no such files")
        instructions = archive.read(pickles[0])
    for opcode, argument, _ in pickletools.genops(instructions):
        if opcode.name == "GLOBAL" and argument not in _CALLS:
            raise ValueError(f"it calls for {'.'.join(str(argument).split())}, and no plain tensor needs that")


def _has_one_table_of_contents(path: Path, start: int) -> bool:
    """Whether every reader must find the table of contents at ``start``, where Python's zipfile did."""
    with path.open("rb") as file:
        end_of_file = file.seek(0, 2)
        file.seek(-min(end_of_file, _ZIP64_END + _LOCATOR + _END), 2)
        tail = file.read()
    zip64, locator, end = tail[: -_LOCATOR - _END], tail[-_LOCATOR - _END : -_END], tail[-_END:]
    if not (end.startswith(b"PK\5\6") and end.endswith(b"\0\0")):  # no comment that could hold another end
        return False
    if not locator.startswith(b"PK\6\7"):
        return start == int.from_bytes(end[16:20], "little")
    zip64_at = end_of_file - _END - _LOCATOR - _ZIP64_END
    return (
        zip64.startswith(b"PK\6\6")
        and zip64_at == int.from_bytes(locator[8:16], "little")
        and start == int.from_bytes(zip64[48:56], "little")
    )
