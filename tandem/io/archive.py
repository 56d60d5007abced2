"""Checks of a .pt file before PyTorch reads it.

``torch.load(weights_only=True)`` runs no code from a file. But a file can still make it allocate any amount of memory,
by members that unpack to more than the file, or by calls such as bytearray(10**12), which it allows.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from .reading import check_regular

# The only calls that plain tensors in dicts need. bytearray, sparse and meta tensors are not among them.
_KINDS = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_CALLS = {
    "collections OrderedDict", "torch._utils _rebuild_parameter", "torch._utils _rebuild_tensor_v2",
    *(f"torch {kind}Storage" for kind in _KINDS),
}  # fmt: skip
# The oldest files, such as torchvision's VGG, need one more call.
_OLD_CALL = "torch._utils _rebuild_tensor"
_LIGHTNING = ("pytorch_lightning", "lightning.pytorch", "lightning.fabric", "lightning_fabric")
#: Classes, as "module name", of objects beside the weights in a trainer's checkpoint: hyperparameters, callbacks,
#: paths, versions. None of them is imported: `substitute_for` gives the substitutes.
IGNORED_CLASSES = frozenset((
    *(f"{package}.{name}" for package in _LIGHTNING for name in (
        "callbacks ModelCheckpoint", "callbacks.model_checkpoint ModelCheckpoint", "utilities.parsing AttributeDict",
        "utilities.data AttributeDict")),
    *(f"omegaconf.{name}" for name in (
        "dictconfig DictConfig", "listconfig ListConfig", "base ContainerMetadata", "base Metadata", "nodes AnyNode",
        "nodes StringNode", "nodes IntegerNode", "nodes FloatNode", "nodes BooleanNode")),
    *(f"__builtin__ {kind}" for kind in ("dict", "list", "int", "long", "float", "str", "unicode", "bool", "tuple")),
    *(f"pathlib{part} {kind}Path" for part in ("", "._local") for kind in ("Posix", "Windows", "")),
    *(f"datetime {kind}" for kind in ("datetime", "timedelta", "date")), "typing Any", "collections defaultdict",
    "argparse Namespace", "types SimpleNamespace", "torch Size", "torch device",
    *(f"torch {kind}" for kind in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")),
    "numpy.core.multiarray scalar", "numpy._core.multiarray scalar", "numpy dtype", "_codecs encode",
    # Versions in older files, whose classes have changed over the years.
    "packaging.version Version", "packaging.version _Version", "packaging._structures InfinityType",
    "packaging._structures NegativeInfinityType",
))  # fmt: skip

# The last records of a zip file: the zip64 end of central directory (signature, ..., offset of the directory), the
# zip64 locator (signature, ..., offset of the record before), and the end of central directory (signature, ..., offset
# of the directory, length of a comment).
_ENDS = struct.Struct("<4s44xQ 4s4xQ4x 4s12xIH")

# Far more than the names and shapes of a state dict take. In an old file the values of the tensors follow the pickles.
_LONGEST_PICKLES_BYTES = 1 << 22

_STATE_DICT = 3  # index among the pickles of an old file

#: Prefixes of the names of layers wrapped by torch.compile, FSDP or checkpointing, in a file.
WRAPPER_NAMES = re.compile(rb"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

_SEARCHED_BYTES = 1 << 20  # of the beginning of a file, where `has_weight_name` looks

# Values in a tuple and in the tuples inside it, with repetitions. PyTorch's tuples hold seven, among them a shape and
# strides.
_LARGEST_TUPLE = 1 << 10

_MEMO_WRITES, _MEMO_READS = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}

#: The advice about a file that holds a whole model or program instead of a state dict.
STATE_DICT_ADVICE = "save the weights alone where it was made: torch.save(model.state_dict(), 'weights.pt')"


class Ignored:
    """The substitute for an object of an ignored class: it ignores its state in the file."""

    def __new__(cls, *args: Any) -> Ignored:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def substitute_for(name: str) -> tuple[Any, str]:
    """For a name in `IGNORED_CLASSES`: the substitute for the class, and the name in PyTorch's form (`module.name`)."""
    class_name = name.replace("__builtin__ long", "builtins int").replace("__builtin__ unicode", "builtins str")
    class_name = class_name.replace("__builtin__", "builtins").replace(" ", ".")
    # A dict in the place of a defaultdict, because PyTorch sets the items of mappings only.
    return ((lambda *_: {}) if name.endswith("defaultdict") else Ignored), class_name


def has_weight_name(path: Path, name: bytes) -> bool:
    """Whether ``name`` occurs in the first `_SEARCHED_BYTES` bytes of a .pt, .pth or .safetensors file, where the
    names of the weights stand. Runs no code of the file. Raises ValueError, in one line, if it is no regular file."""
    with check_regular(path).open("rb") as file:
        return name in WRAPPER_NAMES.sub(b"", file.read(_SEARCHED_BYTES))


def check_archive(path: Path) -> None:
    """Check that nothing in a .pt file is compressed or hidden, and that it calls only for plain tensors and
    `IGNORED_CLASSES`.

    Raises:
        OSError, ValueError, zipfile.BadZipFile: the check fails, or the file is no .pt file of PyTorch 1.6 or later.
    """
    with zipfile.ZipFile(path) as archive:
        if not _has_one_table_of_contents(path, archive.start_dir):
            raise ValueError("it can be read in more than one way")
        members = archive.infolist()
        # lower(), because PyTorch's reader ignores the case of names
        pickles = [member for member in members if member.filename.lower().endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it holds data.pkl {len(pickles)} times")
        if pickles[0].file_size > _LONGEST_PICKLES_BYTES:
            raise ValueError(f"its data.pkl is longer than {_LONGEST_PICKLES_BYTES} bytes")
        n_bytes = sum(max(member.file_size, member.compress_size) for member in members)
        if any(member.compress_type for member in members) or n_bytes > path.stat().st_size:
            raise ValueError("it would unpack to more than the file; PyTorch writes no such files")
        instructions = archive.read(pickles[0])
    for opcode, argument in _read_operations(instructions):
        _check_call(opcode, argument, _CALLS)


def check_old_file(path: Path) -> None:
    """Check that a file of the format before PyTorch 1.6 calls only for plain tensors that it holds.

    It consists of five pickles (magic number, version, machine, state dict, names of storages), then the storages.

    Raises:
        OSError, ValueError: the check fails, or the file is of another format.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        pickles = io.BytesIO(file.read(_LONGEST_PICKLES_BYTES))
    for number in range(5):
        for opcode, argument in _read_operations(pickles):
            _check_call(opcode, argument, {*_CALLS, _OLD_CALL})
            # PyTorch allocates storages before it reads their data; none can have more numbers than the file has bytes.
            if number == _STATE_DICT and isinstance(argument, int) and argument > size:
                raise ValueError("its tensors are larger than the file")


def check_sizes(path: Path, tensors: Iterable[Tensor]) -> None:
    """Raise a ValueError if tensors read from ``path`` are larger than the file: strides of 0 and storages that
    several tensors share let a tiny file claim huge tensors."""
    if sum(tensor.nbytes for tensor in tensors) > path.stat().st_size:
        raise ValueError(f"{path}: its weights are larger than the file that holds them")


def _read_operations(content: bytes | io.BytesIO) -> Iterator[tuple[str, Any]]:
    """The operations of a pickle and their arguments.

    Raises ValueError at a tuple of more than `_LARGEST_TUPLE` values: hashing tuples that are nested a million deep as
    the key of a dict crashes the process, and hashing 40 levels, each of which holds the next one twice, takes days.
    """
    # The stack and the memo of the pickle machine; each value is represented by the number of values that it holds.
    stack: list[Any] = []  # numbers and marks
    memo: dict[Any, int] = {}
    for opcode, argument, _ in pickletools.genops(content):
        yield opcode.name, argument
        try:
            if opcode.name in _MEMO_WRITES:
                memo[argument] = stack[-1]
                continue
            n_values: int = memo[argument] if opcode.name in _MEMO_READS else 1
            for entry in reversed(opcode.stack_before):
                if entry is pickletools.stackslice:
                    while (size := stack.pop()) is not pickletools.markobject:
                        n_values += size
                elif entry is not pickletools.markobject:
                    n_values += stack.pop()
        except (IndexError, KeyError, TypeError):
            raise ValueError("its pickle is damaged") from None
        is_tuple = opcode.name.startswith("TUPLE")
        if is_tuple and n_values > _LARGEST_TUPLE:
            raise ValueError(f"it holds a tuple of more than {_LARGEST_TUPLE} values")
        size = n_values if is_tuple or opcode.name in _MEMO_READS else 1
        stack += [entry if entry is pickletools.markobject else size for entry in opcode.stack_after]


def _check_call(opcode: str, argument: Any, calls: set[str]) -> None:
    if opcode == "GLOBAL" and argument not in calls and argument not in IGNORED_CLASSES:
        name = ".".join(str(argument).split())
        raise ValueError(f"it calls for {name}, and no plain tensor needs that; {STATE_DICT_ADVICE}")


def _has_one_table_of_contents(path: Path, start: int) -> bool:
    """Whether every zip reader finds the table of contents at ``start``, where Python's zipfile found it."""
    end_of_file = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, end_of_file - _ENDS.size))
        tail = file.read().rjust(_ENDS.size)
    zip64_magic, zip64_start, locator_magic, zip64_position, end_magic, end_start, comment_length = _ENDS.unpack(tail)
    if end_magic != b"PK\5\6" or comment_length:  # a comment could hold another end record
        return False
    if locator_magic != b"PK\6\7":  # no zip64
        return bool(start == end_start)
    return bool(zip64_magic == b"PK\6\6" and zip64_position == end_of_file - _ENDS.size and start == zip64_start)
