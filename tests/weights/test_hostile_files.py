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
from tandem.models import DiscreteVAE
from tandem.weights.formats.detection import FORMATS
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
    return dict(DiscreteVAE.from_dict({**VAE, **overrides}).state_dict())


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


def in_itself() -> list[Any]:
    ring: list[Any] = []
    ring.append(ring)
    return ring


def with_pickle(path: Path, operations: bytes) -> None:
    """A dict whose key is what these operations make of the empty tuple."""
    pt(path)
    rezipped(path, change=lambda pickled: b"\x80\x02})" + operations + b"K\x01s.")


RAN = Path("ran")  # made by code that runs, in the folder of the test
CALLS = {
    "posix.system": Call(os.system, f"mkdir {RAN}"), "calls for": Call(eval, f"__import__('os').mkdir('{RAN}')"),
    "bytearray": Call(bytearray, 10**10),
}  # fmt: skip
# Arguments that no model has, in a file and in a folder, and what the message has to say.
ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "num_tokens 10^15": ({"num_tokens": 10**15}, "num_tokens 1000000000000000"),
    "num_tokens 10^9": ({"num_tokens": 10**9}, "num_tokens 1000000000"),
    "4 million blocks": ({"num_resnet_blocks": 4_000_000}, "many more weights than the file"),
    "word": ({"hidden_dim": "5" * 1000}, "DiscreteVAE"),
    "10^15 in an object": ({"hidden_dim": [1, {"a": [{"b": 10**15}]}]}, "hidden_dim 1000000000000000"),
    "argument that moves the cursor": ({"\x1b[2J": 1}, ""),
}  # fmt: skip
# Values of arguments that JSON cannot hold.
NO_JSON: dict[str, tuple[Any, str]] = {
    "tensor in an object": ([{"a": torch.ones(5)}], "a Tensor"), "object of numbers": ({1: 5}, "keys"),
    "list in itself": (in_itself(), "too deeply"),
}  # fmt: skip
PT_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{f"hparams that call {said}": (lambda path, call=call: pt(path, call), said) for said, call in CALLS.items()},
    **{f"hparams: {name}": (lambda path, wrong=wrong: pt(path, {**HPARAMS, **wrong}), said)
       for name, (wrong, said) in ABSURD.items() if name != "argument that moves the cursor"},
    **{f"hparams: {name}": (lambda path, value=value: pt(path, {**HPARAMS, "hidden_dim": value}), said)
       for name, (value, said) in NO_JSON.items()},
    "code in weights": (lambda path: pt(path, weights=Call(os.system, f"mkdir {RAN}")), "posix.system"),
    "sparse": (lambda path: pt(path, weights={"a": torch.zeros(9, 9).to_sparse()}), "sparse"),
    "meta": (lambda path: pt(path, weights={"a": torch.zeros(10**12, device="meta")}), "meta"),
    "stride 0": (stride_0, "larger than the file"), "one storage for all": (one_storage, "larger than the file"),
    "deflated": (lambda path: (pt(path), rezipped(path, zipfile.ZIP_DEFLATED)), "unpack"),
    "overlapping members": (lambda path: (pt(path, weights=weights_of(hidden_dim=99)), member_twice(path)), "unpack"),
    "bytes in front": (lambda path: (pt(path), edited(path, lambda pt: b"PK\3\4" + pt)), "more than one way"),
    "truncated": (lambda path: (pt(path), edited(path, lambda pt: pt[:-100])), "cut off"),
    "legacy": (lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), "holds nothing"),
    "plain pickle": (lambda path: path.write_bytes(pickle.dumps(CALLS["posix.system"], 2)), "without running code"),
    "empty": (lambda path: path.write_bytes(b""), ""),
    "state_dict alone": (lambda path: torch.save({"state_dict": {}}, path), "state_dict"),
    "few hparams": (lambda path: pt(path, {"image_size": 16}), "codebook_dim, hidden_dim"),
    "weight that is a number": (lambda path: pt(path, weights={"a": 1}), "not a tensor"),
    "key of 2 million tuples": (lambda path: with_pickle(path, b"\x85" * 2_000_000), "1024"),
    "key of 2^40 values": (lambda path: with_pickle(path, b"q\0h\0\x86" * 40), "1024"),
    "pickle of 5 MB": (lambda path: with_pickle(path, b"K\0" * 2_500_000), "data.pkl"),
    "whole numbers": (lambda path: pt(path, weights=cast(torch.int64)), "torch.int64"),
}  # fmt: skip


def folder(path: Path, config: Any = None, **changes: Any) -> None:
    """A model folder whose config says something else."""
    DiscreteVAE.from_dict(VAE).save_pretrained(path)
    if changes:
        config = {**json.loads((path / "config.json").read_text()), **changes}
    if config is not None:
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def safetensors(path: Path, header: Any, header_bytes: int | None = None) -> None:
    """A model folder whose weights file has this header, and 24 bytes of data."""
    folder(path)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = struct.pack("<Q", len(text) if header_bytes is None else header_bytes)
    (path / "model.safetensors").write_bytes(length + text + bytes(24))


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def sharded(path: Path, second: Any = "2.safetensors") -> None:
    """A folder of two files and an index that names them so, with all that it names in place."""
    folder(path)
    (path / "model.safetensors").unlink()
    weights, files = weights_of(), ("1.safetensors", second)
    named = {name: files[index % 2] for index, name in enumerate(weights)}
    for file in {file for file in files if isinstance(file, str) and "\0" not in file and not file.startswith("/etc")}:
        target = path / file
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: weights[name] for name in weights if named[name] == file}, target)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))


def moved_out(path: Path, name: str) -> None:
    """Of a whole folder, one file is a link to its content elsewhere."""
    sharded(path) if name == "2.safetensors" else folder(path)
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


# Headers of safetensors that are no headers; the second one's data are beyond the file, those of others overlap, ...
HEADERS: dict[str, dict[str, Any]] = {
    "of 10 GB": {"header": {}, "header_bytes": 10**10}, "beyond": {"header": {"a": tensor([10**10], 0, 4 * 10**10)}},
    "deep": {"header": b'{"a":' * 50_000}, "overlap": {"header": {"a": tensor([4], 0, 16), "b": tensor([4], 8, 24)}},
    "overflow": {"header": {"a": tensor([2**62, 4], 0, 24)}}, "shape": {"header": {"a": tensor([9], 0, 24)}},
}  # fmt: skip
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{name: (lambda path, wrong=wrong: folder(path, **wrong), said) for name, (wrong, said) in ABSURD.items()},
    **{f"header: {name}": (lambda path, how=how: safetensors(path, **how), "not a model folder")
       for name, how in HEADERS.items()},
    **{f"shard {name!r}": (lambda path, name=name: sharded(path, name), "no file in the folder")
       for name in ("../2.safetensors", "/etc/passwd", "", "2\0", 2)},
    **{f"{name} that is a link out": (lambda path, name=name: moved_out(path, name), f"{name} is a link")
       for name in ("2.safetensors", "model.safetensors", "config.json")},
    "4 million tokens": (lambda path: folder(path, num_tokens=4_000_000), "should have shape"),
    "depth": (lambda path: folder(path, '{"a":' * 100_000), "too deeply"),
    "config of no model": (lambda path: folder(path, "{}"), "names no model"),
    "no weights": (lambda path: (folder(path), (path / "model.safetensors").unlink()), "model.safetensors"),
    "weights cut short": (
        lambda path: (folder(path), edited(path / "model.safetensors", lambda file: file[: len(file) // 2])), ""),
    "one weight more": (lambda path: more_weights(path, {"b": torch.ones(2)}), "b should have shape none"),
    "unknown model": (lambda path: folder(path, model="os"), "holds a os"),
    "model of no name": (lambda path: folder(path, model="\x1b[2J\nDiscreteVAE"), "names no model"),
    "endless config": (lambda path: replaced(path, "config.json", lambda file: os.symlink("/dev/zero", file)), "link"),
    "config that waits": (lambda path: replaced(path, "config.json", os.mkfifo), "not a regular file"),
    "weights that wait": (lambda path: replaced(path, "model.safetensors", os.mkfifo), "not a regular file"),
    "shape without data for a number": (
        lambda path: more_weights(path, {"a": torch.zeros(0, 10**12)}, num_tokens=10**9), "num_tokens 1000000000"),
    "cursor": (lambda path: more_weights(path, {"\x1b[2J": torch.ones(1)}), "?[2J"),
    "shard without its tensor": (
        lambda path: index(path, {"weight_map": dict.fromkeys(weights_of(), "2.safetensors")}), "codebook.weight"),
    "index without a map": (lambda path: index(path, {}), "weight_map"),
}  # fmt: skip

HOSTILE = {
    **{f"pt: {name}": ("vae.pt", *case) for name, case in PT_FILES.items()},
    **{f"folder: {name}": ("model", *case) for name, case in FOLDERS.items()},
}
# One for each way in which a file is read.
THROUGH_TRAINING = ("pt: code in weights", "pt: stride 0", "pt: hparams: num_tokens 10^15", "folder: num_tokens 10^9",
                    "folder: header: of 10 GB", "folder: shard '/etc/passwd'")  # fmt: skip


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
    load = DiscreteVAE.from_pretrained if hostile.name == "model" else FORMATS["dalle"].load
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
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
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
    model = DiscreteVAE.from_dict(VAE)
    state: Any = model.state_dict(keep_vars=True)
    torch.save({"hparams": {**HPARAMS, "lr": 1e-3}, "weights": state, "epoch": 3, "names": ["a"]}, tmp_path / "vae.pt")
    assert type(state).__name__ == "OrderedDict" and isinstance(state["codebook.weight"], torch.nn.Parameter)
    if by_another_hand:
        cpu, gpu = (b"X" + struct.pack("<I", len(place)) + place for place in (b"cpu", b"cuda:0"))
        rezipped(tmp_path / "vae.pt", change=lambda pickled: pickled.replace(cpu, gpu))
        assert b"cuda:0" in (tmp_path / "vae.pt").read_bytes()
    loaded = FORMATS["dalle"].load(tmp_path / "vae.pt").state_dict()
    assert_same_bits(loaded, state)


def test_a_folder_of_several_files_is_read_as_one(tmp_path: Path) -> None:
    """The index's own way, with links that stay inside."""
    torch.manual_seed(3)
    sharded(tmp_path / "model")
    (tmp_path / "model" / "2.safetensors").rename(tmp_path / "model" / "two")
    os.symlink("two", tmp_path / "model" / "2.safetensors")
    torch.manual_seed(3)
    DiscreteVAE.from_dict(VAE)  # the draws for the folder itself
    expected = weights_of()
    assert_same_bits(DiscreteVAE.from_pretrained(tmp_path / "model"), expected)


def test_a_long_clip_or_a_large_codebook_is_no_absurd_number(tmp_path: Path) -> None:
    """5 million entries, because the file holds 5 million; an image size, which is no weight's dimension."""
    model = DiscreteVAE.from_dict(
        {**VAE, "num_tokens": 5_000_000, "codebook_dim": 1, "hidden_dim": 1, "image_size": 2**20}
    )
    model.save_pretrained(tmp_path)
    assert DiscreteVAE.from_pretrained(tmp_path).config == model.config
