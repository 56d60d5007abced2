"""Files that were made to do harm: each is refused in one line, before any of its code has run, and before its numbers
have taken memory that its data do not fill."""

from __future__ import annotations

import copy
import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import convert
import train_vae
from models import DiscreteVAE
from models.files.building import build_with_weights
from tests.models.helpers import VAE, Call, assert_same_bits, one_line_of

HPARAMS = {**VAE, "num_resnet_blocks": 0, "channels": 3}

# What reading a file of some kilobytes may take: the largest number that is let through, 2^22, as a list, twice.
MEMORY_BYTES = 256 << 20


@contextmanager
def little_memory() -> Iterator[None]:
    """An allocation beyond MEMORY_BYTES, touched or not, fails in here."""
    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def weights_of(**overrides: Any) -> dict[str, Tensor]:
    return dict(DiscreteVAE(**{**VAE, **overrides}).state_dict())


def cast(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in weights_of().items()}


def shapes_of(**overrides: Any) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in weights_of(**overrides).items()}


def pt(path: Path, hparams: Any = HPARAMS, weights: Any = None) -> None:
    torch.save({"hparams": hparams, "weights": weights_of() if weights is None else weights}, path)


def rezipped(path: Path, method: int = zipfile.ZIP_STORED, change: Callable[[bytes], bytes] = bytes) -> None:
    """The same archive, written by another hand; ``change`` is for the pickle."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, change(content) if name.endswith("/data.pkl") else content)


def member_twice(path: Path) -> None:
    """The largest member stands in the table of contents under a second name, and takes no room for it."""
    with zipfile.ZipFile(path, "a") as archive:
        twin = copy.copy(max(archive.filelist, key=lambda info: info.file_size))
        twin.filename += "9"
        archive.filelist.append(twin)
        archive.comment = b""  # marks the archive as changed


def other_pickle(path: Path) -> None:
    """Python's reader finds data.pkl, and one that does not look at capitals may find another."""
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{archive.namelist()[0].split('/')[0]}/DATA.PKL", b"")


def edited(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def stride_0(path: Path) -> None:
    """8 GB out of one number, in the very shapes that the hparams ask for."""
    shapes = shapes_of(num_tokens=4_000_000, codebook_dim=512)
    weights = {name: torch.zeros(1).expand(shape) for name, shape in shapes.items()}
    pt(path, {**HPARAMS, "num_tokens": 4_000_000, "codebook_dim": 512}, weights)


def one_storage(path: Path) -> None:
    """400 MB out of 4: all of a hundred blocks' weights are views of the same numbers."""
    sizes = {"hidden_dim": 320, "num_resnet_blocks": 50}
    shapes = shapes_of(**sizes)
    numbers = torch.zeros(max(shape.numel() for shape in shapes.values()))
    pt(path, {**HPARAMS, **sizes}, {name: numbers[: shape.numel()].view(shape) for name, shape in shapes.items()})


def longer_storage(path: Path) -> None:
    """The pickle claims 8 GB for a tensor of 1000 numbers."""
    pt(path, weights={**weights_of(), "decoder.0.0.weight": torch.zeros(1000)})
    number = b"M" + struct.pack("<H", 1000)  # BININT2
    rezipped(path, change=lambda pickled: pickled.replace(number, b"J" + struct.pack("<i", 2**31 - 1)))


def in_itself() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


def object_in_itself() -> dict[str, Any]:
    ring: dict[str, Any] = {}
    ring["a"] = [ring]
    return ring


def doubled(times: int) -> dict[str, Any]:
    """2^times empty objects to whoever walks through them, of which one is in the file."""
    value: dict[str, Any] = {}
    for _ in range(times):
        value = {"a": value, "b": value}
    return value


def tuple_as_key(path: Path, tuples: bytes) -> None:
    """A dict whose key is a tuple that these operations make of the empty tuple."""
    pt(path)
    rezipped(path, change=lambda pickled: b"\x80\x02})" + tuples + b"K\x01s.")


RAN = Path("ran")  # made by code that runs, in the folder of the test

PT_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "code in hparams": (lambda path: pt(path, Call(os.mkdir, str(RAN))), "calls for posix.mkdir"),
    "code in weights": (lambda path: pt(path, weights=Call(os.system, f"mkdir {RAN}")), "calls for posix.system"),
    "code as text": (lambda path: pt(path, Call(eval, f"__import__('os').mkdir('{RAN}')")), "calls for"),
    "code by name": (lambda path: pt(path, Call(getattr, "a", "upper")), "getattr"),
    "bytearray of 10 GB": (lambda path: pt(path, Call(bytearray, 10**10)), "bytearray"),
    "sparse": (lambda path: pt(path, weights={"a": torch.zeros(9, 9).to_sparse()}), "_rebuild_sparse_tensor"),
    "meta": (lambda path: pt(path, weights={"a": torch.zeros(10**12, device="meta")}), "_rebuild_meta_tensor"),
    "stride 0": (stride_0, "larger than the file"),
    "one storage for all": (one_storage, "larger than the file"),
    "storage of 8 GB": (longer_storage, "vae.pt"),
    "deflated": (lambda path: (pt(path), rezipped(path, zipfile.ZIP_DEFLATED)), "unpack to more"),
    "overlapping members": (lambda path: (pt(path, weights=weights_of(hidden_dim=99)), member_twice(path)), "unpack"),
    "second pickle": (lambda path: (pt(path), other_pickle(path)), "data.pkl 2 times"),
    "bytes in front": (lambda path: (pt(path), edited(path, lambda pt: b"PK\3\4" + pt)), "more than one way"),
    "comment": (lambda path: (pt(path), edited(path, lambda pt: pt[:-2] + b"\4\0zip!")), "more than one way"),
    "truncated": (lambda path: (pt(path), edited(path, lambda pt: pt[:-100])), "not a zip file"),
    "nothing": (lambda path: None, "No such file"),
    "folder": (os.mkdir, "directory"),
    "legacy": (lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), "without running code"),
    "plain pickle": (lambda path: path.write_bytes(pickle.dumps(Call(os.mkdir, str(RAN)), 2)), "without running code"),
    "empty": (lambda path: path.write_bytes(b""), "not a vae-final.pt"),
    "start of a zip file": (lambda path: path.write_bytes(b"PK\3\4"), "not a vae-final.pt"),
    "state_dict alone": (lambda path: torch.save({"state_dict": {}}, path), "hparams"),
    "list of numbers": (lambda path: torch.save([1, 2], path), "is not a vae-final.pt"),
    "few hparams": (lambda path: pt(path, {"image_size": 16}), "hparams lack codebook_dim, hidden_dim"),
    "no weights": (lambda path: torch.save({"hparams": HPARAMS, "weights": {}}, path), "codebook.weight should have"),
    "weight that is a number": (lambda path: pt(path, weights={"a": 1}), "not a tensor"),
    "num_tokens 10^15": (lambda path: pt(path, {**HPARAMS, "num_tokens": 10**15}), "num_tokens 1000000000000000 is"),
    "4 million blocks": (lambda path: pt(path, {**HPARAMS, "num_resnet_blocks": 4_000_000}), "many more weights"),
    "a number of 90 digits": (lambda path: pt(path, {**HPARAMS, "hidden_dim": 10**89}), "hidden_dim 10000"),
    "tensor as a number": (lambda path: pt(path, {**HPARAMS, "hidden_dim": torch.tensor(5)}), "holds a Tensor"),
    "list as a number": (lambda path: pt(path, {**HPARAMS, "hidden_dim": [5]}), "does not hold a DiscreteVAE"),
    "list in itself": (lambda path: pt(path, {**HPARAMS, "hidden_dim": in_itself()}), "nested too deeply"),
    "object in itself": (lambda path: pt(path, {**HPARAMS, "hidden_dim": object_in_itself()}), "too deeply"),
    "2^60 objects": (lambda path: pt(path, {**HPARAMS, "hidden_dim": doubled(60)}), "more than 1048576 values"),
    "key of 2 million tuples": (lambda path: tuple_as_key(path, b"\x85" * 2_000_000), "a tuple of more than 1024"),
    "key of 2^40 values": (lambda path: tuple_as_key(path, b"q\0h\0\x86" * 40), "a tuple of more than 1024 values"),
    "pickle without a stack": (lambda path: tuple_as_key(path, b"s" * 9), "its pickle is damaged"),
    "pickle of 5 MB": (lambda path: tuple_as_key(path, b"K\0" * 2_500_000), "its data.pkl is longer than"),
    "tensor in an object": (lambda path: pt(path, {**HPARAMS, "hidden_dim": [{"a": torch.ones(5)}]}), "a Tensor"),
    "object of numbers": (lambda path: pt(path, {**HPARAMS, "hidden_dim": {1: 5}}), "a dict whose keys are not all"),
    "whole numbers": (lambda path: pt(path, weights=cast(torch.int64)), "of the kind torch.float32, not torch.int64"),
    "complex weights": (lambda path: pt(path, weights=cast(torch.cfloat)), "calls for torch.ComplexFloatStorage"),
}  # fmt: skip


def folder(path: Path, config: Any = None, **changes: Any) -> None:
    """A model folder whose config says something else."""
    DiscreteVAE(**VAE).save_pretrained(path)
    if changes:
        config = {**json.loads((path / "config.json").read_text()), **changes}
    if config is not None:
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def safetensors(path: Path, header: Any = None, header_bytes: int | None = None, data_bytes: int = 0) -> None:
    """A model folder whose weights file has this header."""
    folder(path)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = struct.pack("<Q", len(text) if header_bytes is None else header_bytes)
    (path / "model.safetensors").write_bytes(length + text + bytes(data_bytes))


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def sharded(path: Path, files: tuple[Any, Any] = ("1.safetensors", "2.safetensors")) -> None:
    """A folder of two files and an index that names them so, with all that it names in place."""
    folder(path)
    (path / "model.safetensors").unlink()
    weights = weights_of()
    named = {name: files[index % 2] for index, name in enumerate(weights)}
    for file in {file for file in files if isinstance(file, str) and "\0" not in file and not file.startswith("/etc")}:
        target = path / file
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: weights[name] for name in weights if named[name] == file}, target)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


def link_out(path: Path) -> None:
    sharded(path)
    os.rename(path / "2.safetensors", path.parent / "elsewhere.safetensors")
    os.symlink("../elsewhere.safetensors", path / "2.safetensors")


def moved_out(path: Path, name: str) -> None:
    """A whole folder, of which one file is a link to its content elsewhere."""
    folder(path)
    os.rename(path / name, path.parent / name)
    os.symlink(f"../{name}", path / name)


def index(path: Path, content: Any) -> None:
    sharded(path)
    (path / "model.safetensors.index.json").write_text(json.dumps(content))


def more_weights(path: Path, weights: dict[str, Tensor], **changes: Any) -> None:
    folder(path, **changes)
    save_file({**weights_of(), **weights}, path / "model.safetensors")


def replaced(path: Path, name: str, make: Callable[[Path], None]) -> None:
    folder(path)
    (path / name).unlink()
    make(path / name)


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "num_tokens 10^15": (lambda path: folder(path, num_tokens=10**15), "num_tokens 1000000000000000 is larger"),
    "channels 10^9": (lambda path: folder(path, channels=10**9), "channels 1000000000 is larger"),
    "layers 1e9": (lambda path: folder(path, num_layers=1e9), "does not hold a DiscreteVAE"),
    "4 million blocks": (lambda path: folder(path, num_resnet_blocks=4_000_000), "many more weights than the file"),
    "4 million channels": (lambda path: folder(path, channels=4_000_000), "should have shape"),
    "number of 5000 digits": (lambda path: folder(path, "[" + "9" * 5000 + "]"), "not a model folder"),
    "word": (lambda path: folder(path, hidden_dim="5" * 1000), "does not hold a DiscreteVAE"),
    "object": (lambda path: folder(path, hidden_dim={"a": 5}), "does not hold a DiscreteVAE"),
    "10^15 in an object": (
        lambda path: folder(path, hidden_dim=[1, {"a": [{"b": 10**15}]}]), "hidden_dim 1000000000000000 is larger"
    ),
    "depth": (lambda path: folder(path, '{"a":' * 100_000), "nested too deeply"),
    "list": (lambda path: folder(path, "[]"), "holds no JSON object"),
    "empty config": (lambda path: folder(path, ""), "is not a model folder"),
    "config of no model": (lambda path: folder(path, "{}"), "names no model"),
    "no text": (lambda path: (folder(path), (path / "config.json").write_bytes(b"\xff")), "is not a model folder"),
    "no folder": (lambda path: None, "No such file"),
    "no config": (lambda path: (folder(path), (path / "config.json").unlink()), "config.json"),
    "no weights": (lambda path: (folder(path), (path / "model.safetensors").unlink()), "model.safetensors"),
    "weights cut short": (
        lambda path: (folder(path), edited(path / "model.safetensors", lambda file: file[: len(file) // 2])), "folder"
    ),
    "one weight more": (lambda path: more_weights(path, {"b": torch.ones(2)}), "b should have shape none, not (2,)"),
    "unknown model": (lambda path: folder(path, model="os"), "holds a os"),
    "model of no name": (lambda path: folder(path, model="\x1b[2J\nDiscreteVAE"), "names no model"),
    "endless config": (
        lambda path: replaced(path, "config.json", lambda file: os.symlink("/dev/zero", file)), "a link that leaves"
    ),
    "config that waits": (lambda path: replaced(path, "config.json", os.mkfifo), "not a regular file"),
    "weights that wait": (lambda path: replaced(path, "model.safetensors", os.mkfifo), "not a regular file"),
    "weights that are a folder": (lambda path: replaced(path, "model.safetensors", os.mkdir), "model.safetensors"),
    "header of 2^63 bytes": (lambda path: safetensors(path, {}, header_bytes=2**63), "not a model folder"),
    "header of 10 GB": (lambda path: safetensors(path, {}, header_bytes=10**10), "not a model folder"),
    "header that is no JSON": (lambda path: safetensors(path, b"\x80\x04."), "not a model folder"),
    "header of depth": (lambda path: safetensors(path, b'{"a":' * 50_000), "not a model folder"),
    "offsets beyond the file": (lambda path: safetensors(path, {"a": tensor([10**10], 0, 4 * 10**10)}), "model folder"),
    "offsets that overlap": (
        lambda path: safetensors(path, {"a": tensor([4], 0, 16), "b": tensor([4], 8, 24)}, data_bytes=24), "folder"
    ),
    "offsets backwards": (lambda path: safetensors(path, {"a": tensor([4], 16, 0)}, data_bytes=16), "model folder"),
    "negative shape": (lambda path: safetensors(path, {"a": tensor([-4], 0, 16)}, data_bytes=16), "model folder"),
    "shape that overflows": (lambda path: safetensors(path, {"a": tensor([2**62, 4], 0, 0)}), "model folder"),
    "shape without data": (lambda path: safetensors(path, {"a": tensor([0, 10**15], 0, 0)}), "codebook.weight should"),
    "shape without data for a number": (
        lambda path: more_weights(path, {"a": torch.zeros(0, 10**12)}, channels=10**9), "channels 1000000000 is larger"
    ),
    "another shape": (lambda path: safetensors(path, {"a": tensor([9], 0, 16)}, data_bytes=16), "model folder"),
    "unknown dtype": (lambda path: safetensors(path, {"a": tensor([4], 0, 16, "X9")}, data_bytes=16), "model folder"),
    "cursor": (lambda path: more_weights(path, {"\x1b[2J": torch.ones(1)}), "?[2J should have shape none"),
    "argument that moves the cursor": (lambda path: folder(path, **{"\x1b[2J": 1}), "does not hold a DiscreteVAE"),
    "shard above": (lambda path: sharded(path, ("1.safetensors", "../2.safetensors")), "no file in the folder"),
    "shard at the root": (lambda path: sharded(path, ("1.safetensors", "/etc/passwd")), "no file in the folder"),
    "shard below": (lambda path: sharded(path, ("1.safetensors", "a/../2.safetensors")), "no file in the folder"),
    "shard that is the folder": (lambda path: sharded(path, ("1.safetensors", ".")), "no file in the folder"),
    "shard of no name": (lambda path: sharded(path, ("1.safetensors", "")), "no file in the folder"),
    "shard with a zero": (lambda path: sharded(path, ("1.safetensors", "2\0")), "no file in the folder"),
    "shard that is a number": (lambda path: sharded(path, ("1.safetensors", 2)), "no file in the folder"),
    "shard that is a link out": (link_out, "2.safetensors is a link that leaves the folder"),
    "weights that are a link out": (
        lambda path: moved_out(path, "model.safetensors"), "model.safetensors is a link that leaves the folder"),
    "config that is a link out": (
        lambda path: moved_out(path, "config.json"), "config.json is a link that leaves the folder"),
    "config of 30 million lists": (lambda path: folder(path, f'{{"a": [{"[]," * 15_000_000}1]}}'), "holds more than"),
    "shard that is missing": (lambda path: (sharded(path), (path / "2.safetensors").unlink()), "No such file"),
    "shard without its tensor": (
        lambda path: index(path, {"weight_map": dict.fromkeys(weights_of(), "2.safetensors")}), "codebook.weight"
    ),
    "index without a map": (lambda path: index(path, {}), "has no weight_map"),
    "index with a list": (lambda path: index(path, {"weight_map": [1]}), "has no weight_map"),
}  # fmt: skip

HOSTILE = {
    **{f"pt: {name}": ("vae.pt", *case) for name, case in PT_FILES.items()},
    **{f"folder: {name}": ("model", *case) for name, case in FOLDERS.items()},
}
# One for each way in which a file is read.
THROUGH_TRAINING = ("pt: code in weights", "pt: stride 0", "pt: num_tokens 10^15", "folder: channels 10^9",
                    "folder: header of 10 GB", "folder: shard at the root")  # fmt: skip


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """PyTorch imports much of itself when it first builds without memory; that is none of a hostile file's doing."""
    good = tmp_path_factory.mktemp("good")
    folder(good / "model")
    pt(good / "vae.pt")
    for name in ("model", "vae.pt"):
        convert.main(["inspect", str(good / name)])
        convert.main(["export", str(good / name), "--to", "model", str(good / f"from {name}")])


@pytest.fixture
def hostile(
    request: pytest.FixtureRequest, warm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The file or folder of a case; whatever is done with it, its code does not run."""
    monkeypatch.chdir(tmp_path)
    name, make, _ = HOSTILE[request.param]
    path = tmp_path / "deep" / "down" / name
    path.parent.mkdir(parents=True)
    make(path)
    yield path
    assert not RAN.exists()


def by_name(cases: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("hostile", "complaint"), [(n, HOSTILE[n][-1]) for n in cases], indirect=["hostile"])


def assert_one_line(line: str, complaint: str) -> None:
    assert complaint in line and "\n" not in line and line.isprintable() and len(line) < 900, line
    assert "allocate" not in line and "MemoryError" not in line, "it was refused only once memory had run out"


@by_name(HOSTILE)
def test_it_is_refused_in_one_line_without_its_code_or_its_memory(
    hostile: Path, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the model, by `convert.py export` and by `convert.py inspect`, which may also read it unharmed."""
    load = DiscreteVAE.from_pretrained if hostile.name == "model" else DiscreteVAE.from_dalle
    with little_memory():
        assert_one_line(one_line_of(load, hostile), complaint)

    with little_memory(), pytest.raises(SystemExit) as raised:
        convert.main(["export", str(hostile), "--to", "model", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert raised.value.code == 2 and error.startswith("convert.py: error: ") and error.count("\n") == 1
    is_model = hostile.is_file() or (hostile / "config.json").is_file()
    assert_one_line(error.rstrip("\n"), complaint if is_model else "expected a run folder")
    assert not (tmp_path / "out").exists()

    with little_memory():
        try:
            convert.main(["inspect", str(hostile)])
        except SystemExit as refused:
            assert refused.code == 2
            assert_one_line(capsys.readouterr().err.rstrip("\n"), "convert.py: error: ")
    assert "\x1b" not in capsys.readouterr().out


@by_name(THROUGH_TRAINING)
def test_init_from_refuses_it_with_exit_code_2(
    hostile: Path, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = "--image_folder demo:shapes:16 --image_size 16 --num_workers 0 --max_steps 1"
    with pytest.raises(SystemExit) as raised:
        train_vae.main([*flags.split(), "--output_dir", str(tmp_path / "run"), "--init_from", str(hostile)])
    assert raised.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train_vae.py: error: ")
    assert_one_line(line, complaint)


@pytest.mark.parametrize("by_another_hand", [False, True])
def test_what_is_harmless_in_a_public_file_is_read(tmp_path: Path, by_another_hand: bool) -> None:
    """A state_dict as it is, saved from a GPU, with hparams and entries that are none of ours."""
    model = DiscreteVAE(**VAE)
    state: Any = model.state_dict(keep_vars=True)
    torch.save({"hparams": {**HPARAMS, "lr": 1e-3}, "weights": state, "epoch": 3, "names": ["a"]}, tmp_path / "vae.pt")
    assert type(state).__name__ == "OrderedDict" and isinstance(state["codebook.weight"], torch.nn.Parameter)
    if by_another_hand:
        cpu, gpu = (b"X" + struct.pack("<I", len(place)) + place for place in (b"cpu", b"cuda:0"))
        rezipped(tmp_path / "vae.pt", change=lambda pickled: pickled.replace(cpu, gpu))
        assert b"cuda:0" in (tmp_path / "vae.pt").read_bytes()
    loaded = DiscreteVAE.from_dalle(tmp_path / "vae.pt").state_dict()
    assert_same_bits(loaded, state)


def test_a_folder_of_several_files_is_read_as_one(tmp_path: Path) -> None:
    """The index's own way, with links that stay inside."""
    torch.manual_seed(3)
    sharded(tmp_path / "model")
    (tmp_path / "model" / "2.safetensors").rename(tmp_path / "model" / "two")
    os.symlink("two", tmp_path / "model" / "2.safetensors")
    torch.manual_seed(3)
    DiscreteVAE(**VAE)  # the draws for the folder itself
    expected = weights_of()
    assert_same_bits(DiscreteVAE.from_pretrained(tmp_path / "model"), expected)


def test_a_long_clip_or_a_large_codebook_is_no_absurd_number(tmp_path: Path) -> None:
    """5 million entries, because the file holds 5 million; an image size, which is no weight's dimension."""
    model = DiscreteVAE(**{**VAE, "num_tokens": 5_000_000, "codebook_dim": 1, "hidden_dim": 1, "image_size": 2**20})
    model.save_pretrained(tmp_path)
    assert DiscreteVAE.from_pretrained(tmp_path).config == model.config


def test_building_is_bounded_even_without_a_limit_on_numbers(warm: None) -> None:
    weights = weights_of()
    with little_memory(), pytest.raises(ValueError, match="many more weights than the file"):
        build_with_weights(lambda: DiscreteVAE(**{**VAE, "num_resnet_blocks": 10**9}), weights)
