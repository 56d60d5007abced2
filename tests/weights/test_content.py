"""Files of weights as people have them: under other names, keys and prefixes, beside a trainer's objects; and what is
no file of weights, which is named, with what to do."""

from __future__ import annotations

import argparse
import collections
import datetime
import errno
import io
import os
import pathlib
import pickle
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lpips
import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

import convert
from tandem.config.models.decoder import DecoderConfig
from tandem.io import writing
from tandem.io.published import read_state_dict
from tandem.io.weights import save_pickled
from tandem.models import VQGAN, Decoder, DiscreteVAE, MuLaN
from tandem.weights.formats.dalle import save_dalle
from tandem.weights.formats.detection import FORMATS, detect_format
from tandem.weights.load import load_model
from tests.models.helpers import MUSICLM, VAE, Call, assert_same_bits, one_line_of, prefixed
from tests.models.reference import tokenizers
from tests.models.reference.autoencoders import images, state_of, written

State = dict[str, Tensor]
STATE, PIXELS = state_of("ldm"), images("ldm")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 334643276\n"


def compiled(state: State) -> State:
    """Of a model whose encoder alone was compiled."""
    return {name.replace("encoder.", "encoder._orig_mod."): tensor for name, tensor in state.items()}


TRAINED = {
    "hyper_parameters": {
        "path": pathlib.PosixPath("/x"), "counts": collections.defaultdict(int, a=1), "when": datetime.timedelta(1),
        "args": argparse.Namespace(a=1), "size": torch.Size((1, 2)), "dtype": torch.float32,
    },
    "optimizer_states": [{"state": {0: {"step": 3}}}], "epoch": 3, "score": np.float64(1.5),
}  # fmt: skip
VARIANTS: dict[str, Any] = {
    "plain": STATE, "under model": {"model": STATE}, "of DeepSpeed": {"module": STATE, "dp_world_size": 2},
    "under weights": {"weights": STATE}, "of a trainer": {"state_dict": STATE, **TRAINED}, "inside": compiled(STATE),
    "of DDP": {"state_dict": prefixed("module.", STATE)}, "compiled": prefixed("_orig_mod.", STATE),
    "compiled in DDP": {"model": prefixed("module._orig_mod.", STATE)},
    "of FSDP": prefixed("_fsdp_wrapped_module.", STATE),
    "in a module of Lightning": {"state_dict": prefixed("model.", STATE)},
    "in one of another name": {"state_dict": {**prefixed("vae.", STATE), "lpips.w": torch.zeros(3)}, **TRAINED},
    "in one with a loss": {"state_dict": {**prefixed("model.module.", STATE), "loss.logvar": torch.zeros(())}},
    "of VA-VAE": {
        "state_dict": {**STATE, "loss.discriminator.main.0.weight": torch.ones(2), "loss.logvar": torch.zeros(()),
                       "linear_proj.weight": torch.zeros(4), "foundation_model.w": torch.ones(1)}, **TRAINED},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_weights_are_read_however_a_trainer_has_kept_them(variant: str, tmp_path: Path) -> None:
    torch.save(VARIANTS[variant], tmp_path / "last.ckpt")
    assert_same_bits(load_model(tmp_path / "last.ckpt"), load_model(written("ldm", tmp_path)))


def test_a_decoder_without_attention_in_its_levels_is_that_of_mar_and_goes_back_under_its_key(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in STATE.items() if not re.match(r"decoder\.up\.\d+\.attn\.", name)}
    torch.save({"model": state}, tmp_path / "kl16.ckpt")
    model = load_model(tmp_path / "kl16.ckpt")
    assert model.config["attention_levels"] == [1, 2] and not model.config["decoder_attention"]
    assert "in the encoder alone" in str(FORMATS["taming"].save(model, tmp_path / "back.ckpt"))
    assert_same_bits(torch.load(tmp_path / "back.ckpt", weights_only=True)["model"], state)
    with torch.no_grad():
        assert not torch.equal(
            model(PIXELS).reconstruction, load_model(written("ldm", tmp_path))(PIXELS).reconstruction
        )


def test_a_file_is_read_by_what_it_holds_whatever_its_name_ends_with(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "safetensors.ckpt")
    torch.save({"state_dict": STATE}, tmp_path / "pickle.safetensors")
    plain = load_model(written("ldm", tmp_path))
    for name in ("safetensors.ckpt", "pickle.safetensors"):
        assert_same_bits(load_model(tmp_path / name), plain)


MUSE = {"image_size": 16, "dim": 16, "num_layers": 2, "codebook_size": 256, "normalize_input": False}
UNET: dict[str, Any] = {
    "dim": [8], "dim_mults": [[1, 2]], "cond_dim": [12], "num_resnet_blocks": [[1, 1]], "self_attn": [[0, 0]],
    "attn_heads": [2], "attn_dim_head": [4], "cross_attn_heads": [8], "cross_attn_dim_head": [64],
    "resnet_groups": [8], "switches": [()], "image_sizes": [8], "noise_schedule": ["cosine"], "objective": ["noise"],
    "learned_variance": [0], "condition_on": ("image",), "image_embed_dim": 5, "image_embed_scale": 1.0,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "dalle": lambda: DiscreteVAE.from_dict(VAE), "muse": lambda: VQGAN.from_dict(MUSE),
    "musiclm": lambda: MuLaN.from_dict(MUSICLM),
    "dalle2": lambda: Decoder(DecoderConfig(**UNET)),
}  # fmt: skip
FIRST_NAMES = {"dalle": "weights", "dalle2": "model"}  # where the weights stand in a file


@pytest.mark.parametrize("name", [*MODELS, "llamagen"])
def test_prefixes_are_taken_off_in_the_files_of_every_package(name: str, tmp_path: Path) -> None:
    path, wrapped = tmp_path / "plain.pt", tmp_path / "wrapped.pt"
    if name == "llamagen":
        path = written(name, tmp_path)
    else:
        FORMATS[name].save(MODELS[name]().eval(), path)
    content = torch.load(path, weights_only=True)
    key = "model" if name == "llamagen" else FIRST_NAMES.get(name)
    torch.save({**content, key: prefixed("module.", content[key])} if key else prefixed("module.", content), wrapped)
    assert detect_format(wrapped) is FORMATS[name]
    assert_same_bits(load_model(wrapped), load_model(path))
    if name in ("muse", "musiclm", "llamagen"):  # in a module of Lightning, with a loss
        state = content[key] if key else content
        torch.save({"state_dict": {**prefixed("net.module.", state), "loss.w": torch.ones(2)}, **TRAINED}, wrapped)
        assert_same_bits(load_model(wrapped), load_model(path))


def test_what_a_published_network_is_read_from_may_have_a_prefix_too(tmp_path: Path) -> None:
    weights = {"features.0.weight": torch.ones(2), "features.0.bias": torch.zeros(2)}
    for content in ({"state_dict": prefixed("module.", weights)}, prefixed("model.", weights)):
        torch.save(content, tmp_path / "vgg.pth")
        assert_same_bits(
            read_state_dict(tmp_path / "vgg.pth", {"features.0.bias"}), {"features.0.bias": torch.zeros(2)}
        )
    both = {"module.a": torch.ones(1), "module._orig_mod.a": torch.zeros(1)}  # which would become the same name
    torch.save(both, tmp_path / "both.pth")
    assert_same_bits(read_state_dict(tmp_path / "both.pth"), both)


def zipped(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "text")


def cut(path: Path, content: bytes, to: int) -> None:
    path.write_bytes(content[:to])


def pickled(path: Path) -> bytes:
    torch.save(STATE, path)
    return path.read_bytes()


NO_WEIGHTS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "a pointer of Git LFS": (lambda path: path.write_bytes(LFS), ("Git LFS", "git lfs pull")),
    "a web page": (lambda path: path.write_text("\n<!DOCTYPE html><html>Sign in</html>"), ("a web page", "login")),
    "nothing": (lambda path: path.write_bytes(b""), ("is empty", "download it again")),
    "a cut zip": (lambda path: cut(path, pickled(path), 5000), ("cut off", "download it again")),
    "cut names": (lambda path: cut(path, save(STATE), 500), ("cut off", "download it again")),
    "cut numbers": (lambda path: cut(path, save(STATE), -9), ("cut off", "download it again")),
    "a whole model": (lambda path: torch.save(nn.Linear(1, 1), path), ("torch.nn.modules", "model.state_dict()")),
    "TorchScript": (lambda path: zipped(path, "m/data.pkl", "m/constants.pkl"), ("TorchScript", "state_dict()")),
    "another zip": (lambda path: zipped(path, "model.ckpt"), ("a zip of 1 files", "unpack")),
    "ONNX": (lambda path: path.write_bytes(b"\x08\x08\x12\x07pytorch\x1a\x052.1.0"), ("ONNX", "PyTorch")),
    "GGUF": (lambda path: path.write_bytes(b"GGUF\3\0\0\0"), ("GGUF", "PyTorch")),
    "HDF5": (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n"), ("HDF5", "PyTorch")),
    "an array": (lambda path: path.write_bytes(b"\x93NUMPY\1\0"), ("NumPy", "PyTorch")),
    "a compressed file": (lambda path: path.write_bytes(b"\x1f\x8b\x08\x00"), ("compressed", "unpack")),
    "a configuration": (lambda path: path.write_text('{"_class_name": "AutoencoderKL"}'), ("JSON", "beside it")),
    "noise": (lambda path: path.write_bytes(bytes(range(200, 250))), ("begins as no file",)),
    "Gumbel": (lambda path: torch.save({**STATE, "quantize.embed.weight": torch.ones(1)}, path), ("GumbelVQ",)),
    "other names": (lambda path: torch.save({"bert.a": torch.ones(1)}, path), ("'bert.a'", "taming, dalle")),
}  # fmt: skip


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("kind", NO_WEIGHTS)
def test_what_is_no_file_of_weights_is_named_with_what_to_do(kind: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"vae.{ending}"
    write, words = NO_WEIGHTS[kind]
    write(path)
    said = one_line_of(load_model, path)
    assert all(word in said for word in words), said
    if kind not in ("Gumbel", "other names"):
        assert all(word in one_line_of(read_state_dict, path) for word in words)


FOLDERS = {
    "zero_to_fp32.py": "a checkpoint of DeepSpeed", "zero_pp_rank_0_mp_rank_00_optim_states.pt": "part of a checkpoint",
    ".metadata": "torch.distributed.checkpoint", "step_00000002_ema_0.1.safetensors": "convert.py average",
    "model.ckpt": "give one of its files in place of the folder, such as",
}  # fmt: skip


@pytest.mark.parametrize("file", FOLDERS)
def test_a_folder_of_another_tool_is_named_with_what_to_do(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"x")
    assert FOLDERS[file] in one_line_of(load_model, tmp_path)


def test_a_file_that_cannot_be_read_is_named() -> None:
    for read in (load_model, detect_format):
        assert one_line_of(read, Path("/proc/self/mem")) == "cannot read /proc/self/mem: Input/output error"


def test_a_pointer_in_a_model_folder_and_a_folder_of_transformers_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DiscreteVAE.from_dict(VAE).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(LFS)
    assert "Git LFS" in one_line_of(load_model, tmp_path / "model")
    with pytest.raises(SystemExit):
        convert.main(["inspect", str(tmp_path / "model")])
    assert "Git LFS" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    assert "one of transformers, ['BertModel']" in one_line_of(load_model, tmp_path)


def test_the_file_of_a_model_folder_leads_to_the_folder(tmp_path: Path) -> None:
    DiscreteVAE.from_dict(VAE).save_pretrained(tmp_path / "model")
    assert f"give {tmp_path / 'model'}" in one_line_of(load_model, tmp_path / "model" / "model.safetensors")


def test_weights_in_any_memory_format_are_saved(tmp_path: Path) -> None:
    model = DiscreteVAE.from_dict(VAE).to(memory_format=torch.channels_last)
    model.save_pretrained(tmp_path)
    save_dalle(model, tmp_path / "vae.pt")
    assert_same_bits(DiscreteVAE.from_pretrained(tmp_path), model)
    assert_same_bits(FORMATS["dalle"].load(tmp_path / "vae.pt"), model)


def test_a_full_disk_is_named_when_a_file_of_torch_save_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes a part of the file. If torch.save wrote to it, it would raise a RuntimeError about a position."""

    class FullDisk(io.FileIO):
        def write(self, content: Any) -> int:
            if self.tell() + len(content) > 100:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    monkeypatch.setattr(writing, "create", lambda path: FullDisk(path, "xb"))
    with pytest.raises(OSError, match=f"cannot write {tmp_path / 'model.pt'}: {os.strerror(errno.ENOSPC)}"):
        save_pickled(STATE, tmp_path / "model.pt")
    assert not any(tmp_path.iterdir())


def test_a_run_without_a_model_yet_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        complaint = one_line_of(DiscreteVAE.from_pretrained, folder)
        assert f"convert.py export {tmp_path / 'run'} DIR --to model" in complaint


def test_a_dalle_file_of_before_1_6_0_is_read_as_three_channels_and_gives_the_public_codes(tmp_path: Path) -> None:
    """96 of the 104 releases of DALLE-pytorch wrote no `channels`. What is written back has all seven hparams."""
    path, state = tmp_path / "vae.pt", tokenizers.state_of("vae")
    torch.save({"hparams": tokenizers.VAE, "weights": state}, path)
    model = FORMATS["dalle"].load(path)
    assert_same_bits(model.state_dict(), state)
    codes = model.get_codebook_indices(tokenizers.images("vae"))
    assert torch.equal(codes, tokenizers.stored_output("vae", "codes"))
    public = tokenizers.stored_output("vae", "reconstruction") / 2 + 0.5  # its decoder leaves them normalised
    torch.testing.assert_close(model.decode(codes), public, rtol=0, atol=1e-5)
    save_dalle(model, tmp_path / "back.pt")
    content = torch.load(tmp_path / "back.pt", weights_only=True)
    assert content["hparams"] == {**tokenizers.VAE, "channels": 3}
    assert_same_bits(content["weights"], state)


# Of every format.

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
    save_old(WEIGHTS, path)
    path.write_bytes(path.read_bytes()[:-4])


NO_STATE_DICT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tar.pth": (tar, "holds no weights"), "cut.pth": (cut_short, "holds no weights"),
    "words.pth": (lambda path: torch.save({"a": "b"}, path), "something beside names and tensors"),
    "config.yaml": (lambda path: path.write_text("dim: 8\n"), "text, such as a configuration; give a run folder"),
    "pipe.pth": (os.mkfifo, "not a regular file"), "nothing.pth": (lambda path: None, "cannot read"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_STATE_DICT)
def test_what_holds_no_state_dict_is_one_line_that_names_the_file(name: str, tmp_path: Path) -> None:
    write, complaint = NO_STATE_DICT[name]
    write(tmp_path / name)
    assert complaint in one_line_of(read_state_dict, tmp_path / name)
