"""Weights as their authors publish them: every format is read, and what was made to do harm is refused in one line."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lpips
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.files.published import read_state_dict

WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.tensor([1, 2, 3])}
MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)


def save_old(content: Any, path: Path, pickle_protocol: int = 2) -> None:
    torch.save(content, path, pickle_protocol=pickle_protocol, _use_new_zipfile_serialization=False)


class Call:
    """Pickled as a call, which runs where the file is unpickled as usual."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("save", [torch.save, save_old, save_file], ids=["zip", "old", "safetensors"])
def test_every_format_gives_the_tensors_that_are_asked_for(save: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / ("weights.safetensors" if save is save_file else "weights.pth")
    save(WEIGHTS, path)
    found = read_state_dict(path)
    assert found.keys() == WEIGHTS.keys() and all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    assert read_state_dict(path, {"a.bias", "b.bias"}).keys() == {"a.bias"}


def test_a_published_file_of_before_pytorch_1_6_is_read() -> None:
    path = Path(lpips.__file__).parent / "weights/v0.1/vgg.pth"
    heads = read_state_dict(path)
    expected = torch.load(path, map_location="cpu", weights_only=True)
    assert list(heads) == [f"lin{i}.model.1.weight" for i in range(5)]
    assert all(torch.equal(heads[name], expected[name]) for name in heads)


def test_tensors_as_the_first_versions_of_pytorch_wrote_them_are_read(tmp_path: Path) -> None:
    weight = WEIGHTS["a.weight"]
    old = Call(torch._utils._rebuild_tensor, weight._typed_storage(), 0, (3, 4), (4, 1))
    save_old(collections.OrderedDict(weight=old), tmp_path / "old.pth")
    assert torch.equal(read_state_dict(tmp_path / "old.pth")["weight"], weight)


@pytest.mark.parametrize("save", [torch.save, save_old], ids=["zip", "old"])
@pytest.mark.parametrize("call", [(os.mkdir, "{}"), (bytearray, 10**12)], ids=["code", "memory"])
def test_a_file_with_a_call_is_refused_and_not_run(
    save: Callable[..., None], call: tuple[Any, ...], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    function, argument = call
    argument = argument.format(trace) if isinstance(argument, str) else argument
    save({"a": Call(function, argument)}, tmp_path / "x.pth")
    with pytest.raises(ValueError, match=r"without running code: it calls for \S+, and no plain tensor needs") as error:
        read_state_dict(tmp_path / "x.pth")
    assert not trace.exists() and "\n" not in str(error.value)


@pytest.mark.parametrize("save", [torch.save, save_old], ids=["zip", "old"])
def test_a_call_in_the_words_of_a_newer_pickle_is_refused_and_not_run(
    save: Callable[..., None], tmp_path: Path
) -> None:
    save({"a": Call(os.mkdir, str(tmp_path / "trace"))}, tmp_path / "x.pth", pickle_protocol=4)
    with pytest.raises(ValueError, match="without running code"):
        read_state_dict(tmp_path / "x.pth")
    assert not (tmp_path / "trace").exists()


def old_file(elements: bytes, memo: bytes = b"") -> bytes:
    """A state dict with one tensor whose storage has as many elements as an instruction says."""
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpu" + elements + b"Nt" + memo + b"Q"
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    )
    return MAGIC + b"\x80\x02}U\x01a" + tensor + b"s." + pickle.dumps(["0"], 2)


def test_an_old_file_may_claim_no_more_elements_than_it_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    path.write_bytes(old_file(b"K\x01") + struct.pack("<qf", 1, 2.5))
    assert read_state_dict(path)["a"].tolist() == [2.5]
    path.write_bytes(old_file(b"\x8a\x06" + (2**40).to_bytes(6, "little")) + struct.pack("<qf", 1, 2.5))
    with pytest.raises(ValueError, match="its tensors are larger than the file"):
        read_state_dict(path)


def test_an_old_file_that_hides_the_number_of_elements_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pth"
    # The number is put away by one instruction and fetched by another: nothing that PyTorch writes.
    path.write_bytes(
        old_file(b"\x8a\x06" + (2**40).to_bytes(6, "little") + b"q\x090h\x09") + struct.pack("<qf", 1, 2.5)
    )
    with pytest.raises(ValueError, match="it describes a tensor in a way that PyTorch does not"):
        read_state_dict(path)


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())


def cut(path: Path) -> None:
    save_old(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:-20])


def cut_safetensors(path: Path) -> None:
    save_file(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("write", "complaint"),
    [
        (tar, "holds no weights"),
        (cut, "holds no weights"),
        (cut_safetensors, "holds no weights"),
        (lambda path: path.write_bytes(b""), "holds no weights"),
        (lambda path: path.write_text("<html>Not found</html>"), "holds no weights"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "holds no weights"),
        (lambda path: torch.save({"a": "b"}, path), "something beside names and tensors"),
        (lambda path: torch.save([torch.zeros(1)], path), "it holds a list, not a dict"),
        (lambda path: torch.save({"a": torch.zeros(1).expand(10**6)}, path), "its weights are larger than the file"),
        (os.mkfifo, "not a regular file"),
        (os.mkdir, "cannot read"),
        (lambda path: None, "cannot read"),
    ],
    ids=["tar", "cut short", "safetensors cut short", "empty", "web page", "pickle", "words", "list", "stride 0",
         "pipe", "folder", "nothing"],
)  # fmt: skip
def test_what_holds_no_weights_is_one_line_that_names_the_file(
    write: Callable[[Path], Any], complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / ("x.safetensors" if write is cut_safetensors else "x.pth")
    write(path)
    with pytest.raises(ValueError, match=complaint) as error:
        read_state_dict(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_values_are_on_the_cpu_wherever_they_were_saved(tmp_path: Path) -> None:
    weights: dict[str, Tensor] = read_state_dict(Path(lpips.__file__).parent / "weights/v0.1/vgg.pth")  # of cuda:0
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
