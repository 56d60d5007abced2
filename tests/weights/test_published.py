"""Weights as their authors publish them: every format is read, and what was made to do harm is refused in one line."""

from __future__ import annotations

import collections
import io
import os
import pickle
import re
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lpips
import pytest
import torch
from safetensors.torch import save_file

from tandem.io.published import read_state_dict
from tests.models.helpers import Call, assert_same_bits, one_line_of

WEIGHTS = {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.tensor([1, 2, 3])}
MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)


def save_old(content: Any, path: Path, pickle_protocol: int = 2) -> None:
    torch.save(content, path, pickle_protocol=pickle_protocol, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [torch.save, save_old, save_file], ids=["zip", "old", "safetensors"])
def test_every_format_gives_the_tensors_that_are_asked_for(save: Callable[..., None], tmp_path: Path) -> None:
    path = tmp_path / ("weights.safetensors" if save is save_file else "weights.pth")
    save(WEIGHTS, path)
    found = read_state_dict(path)
    assert_same_bits(found, WEIGHTS)
    assert read_state_dict(path, {"a.bias", "b.bias"}).keys() == {"a.bias"}


def test_a_published_file_of_before_pytorch_1_6_is_read_onto_the_cpu() -> None:
    path = Path(lpips.__file__).parent / "weights/v0.1/vgg.pth"  # saved on cuda:0
    heads = read_state_dict(path)
    assert list(heads) == [f"lin{i}.model.1.weight" for i in range(5)]
    assert {tensor.device.type for tensor in heads.values()} == {"cpu"}
    assert_same_bits(heads, torch.load(path, map_location="cpu", weights_only=True))


def test_tensors_as_the_first_versions_of_pytorch_wrote_them_are_read(tmp_path: Path) -> None:
    weight = WEIGHTS["a.weight"]
    old = Call(torch._utils._rebuild_tensor, weight._typed_storage(), 0, (3, 4), (4, 1))
    save_old(collections.OrderedDict(weight=old), tmp_path / "old.pth")
    assert torch.equal(read_state_dict(tmp_path / "old.pth")["weight"], weight)


@pytest.mark.parametrize("save", [torch.save, save_old], ids=["zip", "old"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_file_with_a_call_is_refused_and_not_run(save: Callable[..., None], protocol: int, tmp_path: Path) -> None:
    for call in (Call(os.mkdir, str(tmp_path / "trace")), Call(bytearray, 10**12)):
        save({"a": call}, tmp_path / "x.pth", pickle_protocol=protocol)
        complaint = one_line_of(read_state_dict, tmp_path / "x.pth")
        assert "without running code" in complaint and not (tmp_path / "trace").exists()
        assert protocol > 2 or re.search(r"it calls for \S+, and no plain tensor needs that", complaint)


def old_file(elements: bytes) -> bytes:
    """A state dict with one tensor whose storage has as many elements as an instruction says."""
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpu" + elements + b"NtQ"
    sizes = b"K\x00K\x01\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtR"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + sizes
    return MAGIC + b"\x80\x02}U\x01a" + tensor + b"s." + pickle.dumps(["0"], 2) + struct.pack("<qf", 1, 2.5)


def test_an_old_file_may_claim_no_more_elements_than_it_can_hold(tmp_path: Path) -> None:
    path, many = tmp_path / "x.pth", b"\x8a\x06" + (2**40).to_bytes(6, "little")
    path.write_bytes(old_file(b"K\x01"))
    assert read_state_dict(path)["a"].tolist() == [2.5]
    for said in (many, many + b"q\x090h\x09"):  # put away and fetched again, too
        path.write_bytes(old_file(said))
        assert "its tensors are larger than the file" in one_line_of(read_state_dict, path)


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())


def cut_short(path: Path) -> None:
    (save_file if path.suffix == ".safetensors" else save_old)(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:-4])


NO_WEIGHTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tar.pth": (tar, "holds no weights"),
    "cut.pth": (cut_short, "holds no weights"),
    "empty.pth": (lambda path: path.write_bytes(b""), "holds no weights"),
    "page.pth": (lambda path: path.write_text("<html>Not found</html>"), "holds no weights"),
    "words.pth": (lambda path: torch.save({"a": "b"}, path), "something beside names and tensors"),
    "list.pth": (lambda path: torch.save([torch.zeros(1)], path), "it holds a list, not a dict"),
    "stride0.pth": (lambda path: torch.save({"a": torch.zeros(1).expand(10**6)}, path), "are larger than the file"),
    "pipe.pth": (os.mkfifo, "not a regular file"),
    "nothing.pth": (lambda path: None, "cannot read"),
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_what_holds_no_weights_is_one_line_that_names_the_file(name: str, tmp_path: Path) -> None:
    write, complaint = NO_WEIGHTS[name]
    write(tmp_path / name)
    assert complaint in one_line_of(read_state_dict, tmp_path / name)
