"""What is true of every model, whatever it computes.

A row of MODELS says how a model is made and what it is given; each test is about all rows that it can be about.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import tandem.models.features.lpips
from tandem import models
from tandem.config.models.autoencoders import QUANTIZERS
from tandem.io.renamed import without_unmeasured_statistics
from tandem.models import VQGAN, DiscreteVAE, Discriminator, MuLaN, Unet, VideoTokenizer
from tandem.models.base import Pretrained
from tandem.weights.load import load_model
from tests.models import helpers
from tests.models.helpers import (
    across_a_border,
    assert_same_bits,
    kept_bytes,
    lively,
    narrow,
    one_line_of,
    refused,
    some,
    some_images,
    some_pairs,
    some_unet_inputs,
    some_videos,
)

BATCH = 3
TOWER = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
    "layer_norm_eps": 1e-6, "hidden_act": "gelu",
}  # fmt: skip
TEXT_TOWER = {
    **TOWER, "model_type": "bert", "vocab_size": 40, "max_position_embeddings": 12, "type_vocab_size": 2,
    "pad_token_id": 0,
}  # fmt: skip
CLIP_TOWER = {**TOWER, "model_type": "clip_text_model", "vocab_size": 40, "max_position_embeddings": 12}
AUDIO_TOWER = {
    **TOWER, "model_type": "audio-spectrogram-transformer", "num_mel_bins": 32, "max_length": 60, "patch_size": 16,
    "frequency_stride": 10, "time_stride": 8, "qkv_bias": True, "mean": -4.0, "std": 4.5,
}  # fmt: skip
EVERY_LAYER = (
    "attend_space,residual,linear_attend_space,compress_space:6,residual_space,compress_time:6,gateloop_time,adaptive,"
    "attend_time,consecutive_residual:2"
)
EVERY_OPTION = {
    "self_attn": [0, 1], "sparse_attn": True, "memory_efficient": True, "lowres_cond": True, "lowres_noise_cond": True,
    "coordinates": True, "plain_init_conv": True,
}  # fmt: skip


class Case(NamedTuple):
    kind: Callable[..., Any]
    sizes: dict[str, Any]
    inputs: Callable[[Any], dict[str, Tensor]]
    """Of a model: what its forward pass is given for BATCH samples, all of it with the samples along dimension 0."""
    free: dict[str, Any] = {}  # noqa: RUF012
    """Other values for arguments that change no weight."""
    other: dict[str, Any] = {}  # noqa: RUF012
    """Another value of an argument that changes the weights."""


def images(model: Any) -> dict[str, Tensor]:
    return {"images": some_images(BATCH)}


def vqgan(quantizer: str, **sizes: Any) -> Case:
    sizes = {**helpers.VQGAN, "num_resnet_blocks": [0, 1], "quantizer": quantizer, **sizes}
    return Case(VQGAN, sizes, images, {"image_size": 32, "gradient_checkpointing": True}, {"dim": 16})


def taming(quantizer: str, **sizes: Any) -> Case:
    def inputs(model: Any) -> dict[str, Tensor]:
        noise = {"noise": some(BATCH, *model.latent_shape(16, 16))} if quantizer == "kl" else {}
        return {**images(model), **noise}

    free = {"image_size": 32, "gradient_checkpointing": True}
    return Case(VQGAN, {**helpers.TAMING, "quantizer": quantizer, **sizes}, inputs, free, {"dim": 16})


def tokenizer(quantizer: str, **sizes: Any) -> Case:
    sizes = {**helpers.TOKENIZER, "quantizer": quantizer, **sizes}

    def inputs(model: Any) -> dict[str, Tensor]:
        videos = some_videos(BATCH)
        noise = {"noise": some(BATCH, *model.latent_shape(*videos.shape[2:]))} if quantizer == "kl" else {}
        return {"videos": videos, **noise}

    free = {"image_size": 16, "gradient_checkpointing": True, "time_window": 3}
    return Case(VideoTokenizer, sizes, inputs, free, {"init_dim": 8})


def mulan(**sizes: Any) -> Case:
    sizes = {"attn_dropout": 0.2, "ff_dropout": 0.3, "hierarchical_layers": 1, **sizes}

    def inputs(model: Any) -> dict[str, Tensor]:
        return {**some_pairs(model), "dropout_keys": torch.tensor([[1, 2], [3, 4], [2**32 - 1, 0]])}

    free = {"clip_seconds": 0.2, "attn_dropout": 0.0, "init_bias": 1.0, "gradient_checkpointing": True}
    return Case(MuLaN, sizes, inputs, free, {"dim_latent": 7})


def unet(**sizes: Any) -> Case:
    def inputs(model: Any) -> dict[str, Tensor]:
        given = {**some_unet_inputs(BATCH, side=16), "keep_image": torch.tensor([True, False, True]),
                 "keep_text": torch.tensor([False, True, True])}  # fmt: skip
        if model.config["lowres_cond"]:
            given |= {"lowres_image": some(BATCH, 3, 8, 8), "lowres_time": torch.arange(BATCH) * 200}
        return given

    other = {"learned_variance": not sizes.get("learned_variance")}
    return Case(Unet, {**helpers.UNET, **sizes}, inputs, {"gradient_checkpointing": True}, other)


def distance(kind: str) -> Case:
    def inputs(model: Any) -> dict[str, Tensor]:
        return {"reconstructions": (some_images(BATCH) / 10).requires_grad_(), "images": some_images(BATCH, seed=2)}

    return Case(narrow, {"kind": kind}, inputs)


MODELS = {
    "vae": Case(
        DiscreteVAE,
        {**helpers.VAE, "num_resnet_blocks": 1, "smooth_l1_loss": True, "kl_loss_weight": 0.2},
        lambda model: {**images(model), "noise": some(BATCH, *model.noise_shape)},
        {"image_size": 32, "smooth_l1_loss": False}, {"num_tokens": 14},
    ),
    "lfq": vqgan("lfq"), "vq": vqgan("vq"), "fsq": vqgan("fsq", fsq_levels=[8, 5, 4]), "bsq": vqgan("bsq"),
    "ibq": vqgan("ibq"),
    "taming-vq": taming("vq", codebook_size=32, codebook_dim=5, z_channels=6),
    "taming-kl": taming("kl", latent_dim=3, quant_conv=False), "kl": vqgan("kl"),
    "taming-patches-kl": taming("kl", latent_dim=3, latent_patch=2, decoder_attention=False),
    "tokenizer-lfq": tokenizer("lfq"), "tokenizer-vq": tokenizer("vq", separate_first_frame=True),
    "tokenizer-fsq": tokenizer(
        "fsq", fsq_levels=[8, 5, 4], norm="none",
        layers="attend_time,gateloop_time,residual,linear_attend_space,compress_time,attend_space,adaptive"),
    "tokenizer of every layer": tokenizer("ibq", layers=EVERY_LAYER, patch_size=2),
    "tokenizer-kl": tokenizer("kl", latent_dim=3), "tokenizer-wan-kl": tokenizer("kl", latent_dim=3, **helpers.WAN),
    "tokenizer-wan2.2-kl": tokenizer("kl", latent_dim=3, **helpers.WAN_2_2),
    "mulan": mulan(
        **helpers.MULAN, sample_rate=22050, n_fft=512, hop_length=200, n_mels=32, fmin=20.0, fmax=9000.0, patch_size=8,
        init_logit_scale=2.6, init_bias=-5.0),
    "mulan of powers": mulan(**helpers.MULAN, spectrogram="power"),
    "mulan of towers": mulan(
        **{**helpers.MULAN, "audio_depth": 3, "text_dim": 16, "text_depth": 3}, text_tower=TEXT_TOWER,
        audio_tower=AUDIO_TOWER),
    "mulan of clip": mulan(**{**helpers.MULAN, "text_dim": 16, "text_depth": 3}, text_tower=CLIP_TOWER),
    "musiclm": mulan(**helpers.MUSICLM),
    "unet": unet(self_attn=[1, 0], image_embed_scale=2.0, learned_variance=True),
    "unet of every option": unet(**EVERY_OPTION),
    "discriminator": Case(Discriminator, {"dim": 8, "layers": 2}, images, {}, {"dim": 9}),
    "maskbit discriminator": Case(models.MaskBitDiscriminator, {"dim": 32, "layers": 2}, images, {}, {"dim": 9}),
    "video discriminator": Case(
        models.VideoDiscriminator, {"dim": 8, "layers": 2},
        lambda model: {"videos": some_videos(BATCH, 5, 16, 16), "frames": torch.tensor([1, 4, 0])}),
    "vgg": distance("vgg"), "lpips": distance("lpips"), "resnet50": distance("resnet50"),
}  # fmt: skip
SAVED = [name for name, case in MODELS.items() if case.other]
AUTOENCODERS = [name for name, case in MODELS.items() if case.kind in (VQGAN, VideoTokenizer)]
OF_CODES = [name for name in AUTOENCODERS if not name.endswith("kl")]
TOWERS = [name for name in MODELS if "mu" in name]
DISTANCES = ("vgg", "lpips", "resnet50")
RECOMPUTED = ["lfq", "taming-kl", *(name for name in MODELS if "unet" in name or "tokenizer" in name), *TOWERS]
each = pytest.mark.parametrize("name", MODELS)


def built(kind: Any, /, **arguments: Any) -> Any:
    """A model of these arguments, or of a configuration with them."""
    return kind.from_dict(arguments) if isinstance(kind, type) and issubclass(kind, Pretrained) else kind(**arguments)


def made(name: str, **changes: Any) -> Any:
    """A model in eval mode that has seen a batch: the codebooks of some start from it."""
    case = MODELS[name]
    torch.manual_seed(0)
    model = lively(built(case.kind, **{**case.sizes, **changes})).train()
    results(model, case.inputs(model))
    return model.eval()


def results(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """All that a forward pass gives, losses included, by name."""
    out = model.distances(**inputs) if hasattr(model, "distances") else model(**inputs)
    if isinstance(out, Tensor):
        return {"out": out}
    named = {str(head): logits for head, logits in enumerate(out)} if isinstance(out, list) else out._asdict()
    losses = named.pop("losses", {})
    losses = losses if isinstance(losses, dict) else {}
    return {name: value for name, value in (named | losses).items() if isinstance(value, Tensor)}


def of(name: str, model: Any) -> dict[str, Tensor]:
    return results(model, MODELS[name].inputs(model))


def loss_of(found: dict[str, Tensor]) -> Tensor:
    """Another weight for every number of every result that has a graph."""
    parts = [part * torch.linspace(0.5, 1.5, part.numel()).view(part.shape) for part in found.values()
             if part.requires_grad]  # fmt: skip
    return torch.stack([part.mean() for part in parts]).sum()


def gradients(name: str, model: Any) -> dict[str, Tensor]:
    loss_of(of(name, model)).backward()
    return {weight: p.grad for weight, p in model.named_parameters() if p.grad is not None}


@each
def test_no_sample_depends_on_its_neighbours_on_the_graph_or_on_the_global_generator(name: str) -> None:
    model = made(name)
    inputs = MODELS[name].inputs(model)
    before = torch.get_rng_state()
    together = results(model, inputs)
    with torch.no_grad():
        assert_same_bits(results(model, inputs), together)
    assert torch.equal(torch.get_rng_state(), before)
    rows = len(next(iter(inputs.values())))
    compared = {key: value for key, value in together.items() if value.dim() and len(value) == rows}
    assert compared
    for row in range(BATCH):
        alone = results(model, {key: value[row : row + 1] for key, value in inputs.items()})
        for key, value in compared.items():
            # Kernels add in another order for another number of rows, and up to 50 layers follow one another. A
            # distance is a sum of squares of small differences between features.
            bound = 1e-3 if name in DISTANCES else 1e-4
            assert (alone[key][0] - value[row]).abs().max() <= bound * value.abs().max(), key


@pytest.mark.parametrize(("name", "dtype", "how"), [
    *((name, torch.bfloat16, "autocast") for name in MODELS), *((name, torch.float16, "autocast") for name in TOWERS),
    *((name, torch.bfloat16, "weights") for name in MODELS if name not in DISTANCES),
    *((name, torch.float16, "weights") for name in TOWERS),
])  # fmt: skip
def test_in_half_precision_all_that_has_a_gradient_is_fp32_and_near_and_gradients_are_finite(
    name: str, dtype: torch.dtype, how: str
) -> None:
    """A choice of codes may be another, so that what is decoded need not be near."""
    model = made(name)
    expected = of(name, model)
    if how == "weights":
        model.to(dtype)
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        found = of(name, model)
    for key, value in found.items():
        if value.requires_grad:
            assert value.dtype == torch.float32 and value.isfinite().all(), key
        if value.requires_grad and not hasattr(model, "quantizer"):
            assert (value - expected[key]).norm() < 0.25 * expected[key].norm() + 1e-3, key
    loss_of(found).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    computed = any(isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d) for layer in model.modules())
    assert computed == any(not torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize(
    "name", ["vae", *QUANTIZERS, "taming-vq", "taming-kl", "discriminator", "maskbit discriminator"]
)
def test_convolutions_see_activations_channels_last_whatever_the_order_of_the_weights(name: str) -> None:
    """Backends store weights in orders of their own, from which the bits of a result must not follow."""
    model, seen = made(name), []
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d)]
    for layer in layers:
        layer.register_forward_hook(lambda layer, inputs, output: seen.extend([inputs[0], output]))
    expected = of(name, model)
    assert_same_bits(of(name, model.to(memory_format=torch.channels_last)), expected)
    assert len(seen) == 4 * len(layers)
    assert all(map_.is_contiguous(memory_format=torch.channels_last) for map_ in seen)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DISTANCES])
def test_every_weight_has_a_gradient_that_is_finite_and_not_0(name: str) -> None:
    """Silence and an empty caption included."""
    model = made(name).train()
    found = gradients(name, model)
    assert found.keys() == {weight for weight, _ in model.named_parameters()}
    assert all(gradient.isfinite().all() for gradient in found.values())
    # What is added to all logits of a softmax has no effect.
    free = ("to_weights.bias", "mlp.4.bias")
    assert [weight for weight in found if not found[weight].any() and not weight.endswith(free)] == []


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_gradients_have_the_same_bits_and_much_less_is_kept_for_them(name: str) -> None:
    found = []
    for recompute in (False, True):
        deeper = {"audio_depth": 4, "text_depth": 4} if name in TOWERS else {}
        model = made(name, **deeper, gradient_checkpointing=recompute).train()
        inputs = MODELS[name].inputs(model)
        out, kept = kept_bytes(lambda model=model, inputs=inputs: results(model, inputs))
        loss_of(out).backward()
        found.append(({weight: p.grad for weight, p in model.named_parameters()} | dict(model.named_buffers()), kept))
    (expected, all_of_it), (ours, kept) = found
    assert_same_bits(ours, expected)
    assert kept < (0.5 if name == "lfq" else 0.36) * all_of_it


@pytest.mark.parametrize("name", sorted({*AUTOENCODERS, *RECOMPUTED}))
def test_hooks_at_the_borders_of_modules_change_no_bit(name: str) -> None:
    """ZeRO 3 sets such hooks. The order in which several gradients of one tensor are added must not depend on them."""
    found = []
    for is_parted in (False, True):
        model = made(name).train()
        for module in model.modules() if is_parted else ():
            module.register_forward_pre_hook(lambda _, inputs: across_a_border(inputs))
            module.register_forward_hook(lambda _, inputs, output: across_a_border(output))
        found.append(gradients(name, model))
    # A condition's own gradient is a sum over layers and the norms in them. No script has conditions yet.
    ours, expected = ({key: each[key] for key in each if "coder.condition." not in key} for each in found)
    assert_same_bits(ours, expected)


@pytest.mark.parametrize("name", OF_CODES)
def test_codes_decode_to_the_bits_of_the_reconstruction_in_both_modes(name: str) -> None:
    model = made(name)
    inputs = MODELS[name].inputs(model)
    pictures, *cond = inputs.values()
    for training in (True, False):
        out = model.train(training)(**inputs)
        assert out.reconstruction.shape == pictures.shape
        assert out.codes.dtype == torch.int64 and 0 <= out.codes.min() <= out.codes.max() < model.num_codes
        assert set(out.losses) == set(model.quantizer.loss_names)
        assert all(loss.shape == () for loss in out.losses.values()) and not out.features.requires_grad
        with torch.no_grad():
            assert torch.equal(model.encode(pictures, *cond), out.codes)
            assert torch.equal(model.decode(out.codes, *cond), out.reconstruction)
            assert torch.equal(model.decode(out.codes.flatten(1), *cond), out.reconstruction)


PIXELS = {"patch": "pixels", "pad_mode": "reflect"}


@pytest.mark.parametrize(
    ("name", "change"),
    [("lfq", {}), ("lfq", {"normalize_input": False}), ("taming-vq", {}), ("taming-kl", {}), ("tokenizer-lfq", {}),
     ("tokenizer-lfq", PIXELS), ("tokenizer-vq", {}), ("tokenizer-vq", PIXELS), ("tokenizer-wan2.2-kl", {})],
    ids=str,
)  # fmt: skip
def test_the_last_layers_gradient_needs_no_pass_through_the_model(name: str, change: dict[str, Any]) -> None:
    """From features and the gradient of the pictures alone; it is autograd's, and in fp32 in any case."""
    model = made(name, **change).train()
    inputs = MODELS[name].inputs(model)
    for pictures in [inputs["images"]] if "images" in inputs else [inputs["videos"], inputs["videos"][:, :, 0]]:
        out = model(pictures)
        loss = (out.reconstruction - pictures).abs().sum()
        (at_pictures,) = torch.autograd.grad(loss, out.reconstruction, retain_graph=True)
        last = model.last_layer if "images" in inputs else model.decoder.conv_out
        weights = [p for weight, p in last.named_parameters() if weight.endswith("weight")]
        expected = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, weights)])
        assert len(weights) == 1 + (name == "tokenizer-vq")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours = model.last_layer_gradient(out.features, at_pictures)
        torch.testing.assert_close(ours.flatten(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize(("case", "size"), [(vqgan("lfq"), 256), (vqgan("lfq"), 16384), (tokenizer("lfq"), 256)])
def test_the_encoder_learns_from_the_reconstruction(case: Case, size: int, quantizer: str) -> None:
    """Measured with other seeds too: its gradient has 1/80 or more of the norm of the decoder's, with every quantizer.
    Entries that start as small as 1 / size would leave 1e-6 to 1e-10, because IBQ's gradient passes two products with
    them."""
    torch.manual_seed(0)
    model = case.kind.from_dict({**case.sizes, "quantizer": quantizer, "codebook_size": size, "fsq_levels": None})
    inputs = case.inputs(model)
    F.l1_loss(model(**inputs).reconstruction, next(iter(inputs.values()))).backward()
    of_encoder, of_decoder = (
        torch.stack([p.grad.norm() for p in half.parameters() if p.grad is not None]).norm()
        for half in (model.encoder, model.decoder)
    )
    assert of_encoder > of_decoder / 1000


@pytest.mark.parametrize("name", SAVED)
def test_a_folder_gives_back_arguments_weights_and_results_exactly(name: str, tmp_path: Path) -> None:
    case, folder, model = MODELS[name], tmp_path / "runs" / "model", made(name)
    made(name, **case.other).save_pretrained(folder)
    model.save_pretrained(folder)  # replaces
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    facts = {"num_codes": model.num_codes} if hasattr(model, "num_codes") else {}
    assert config == {"model": case.kind.__name__, **facts, **model.config} and config == {**config, **case.sizes}
    assert load_file(folder / "model.safetensors").keys() == without_unmeasured_statistics(model.state_dict()).keys()
    loaded = case.kind.from_pretrained(folder)
    assert loaded.config == model.config == case.kind.from_dict(model.config).config and not loaded.training
    assert_same_bits(loaded, model)
    assert_same_bits(of(name, loaded), of(name, model))
    lazy = load_model(folder, is_lazy=True)
    assert_same_bits(lazy, model)
    assert lazy.description() == model.description()


def test_loading_a_model_imports_no_compiler(tmp_path: Path) -> None:
    """PyTorch imports it, for 1.5 seconds, or sympy alone, to fill a tensor of the meta device with random values. The
    package of pretrained towers imports both in any case."""
    folders = {name: tmp_path / name for name in SAVED if name not in TOWERS}
    for name, folder in folders.items():
        made(name).save_pretrained(folder)
    code = (
        "import sys; from tandem.weights.load import load_model; [load_model(path) for path in sys.argv[1:]]; "
        "sys.exit('sympy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, folders.values())], check=True)


@pytest.mark.parametrize("name", SAVED)
def test_weights_are_taken_by_a_model_that_differs_in_its_training_only(name: str, tmp_path: Path) -> None:
    case, trained = MODELS[name], made(name)
    model, other = case.kind.from_dict({**case.sizes, **case.free}), made(name, **case.other)
    trained.save_pretrained(tmp_path)
    model.load_weights_from(tmp_path)
    assert_same_bits(model, trained)
    (argument,) = case.other
    assert one_line_of(other.load_weights_from, tmp_path).endswith(f" {argument} {trained.config[argument]}")


FORMATS: dict[str, dict[str, list[int]]] = json.loads((Path(__file__).parent / "formats.json").read_text())


@pytest.mark.parametrize("name", FORMATS)
def test_names_and_shapes_of_the_weights_stay_what_they_are(name: str) -> None:
    """A change here is a change of format: files that were written before could not be read. Those of the vae are
    DALLE-pytorch's."""
    known = name.removesuffix(" without blocks")
    weights = made(known, **({"num_resnet_blocks": 0} if name != known else {})).state_dict()
    assert {weight: list(tensor.shape) for weight, tensor in weights.items()} == FORMATS[name]


vae, vqgan_of = partial(built, DiscreteVAE, **helpers.VAE), partial(built, VQGAN, **helpers.VQGAN)
taming_of = partial(built, VQGAN, **helpers.TAMING, quantizer="kl", latent_dim=3, z_channels=5)
tokenizer_of = partial(built, VideoTokenizer, **helpers.TOKENIZER)
discriminator = partial(built, models.VideoDiscriminator, dim=4)
mulan_of, musiclm = partial(built, MuLaN, **helpers.MULAN), partial(built, MuLaN, **helpers.MUSICLM)
unet_of = partial(built, Unet, **helpers.UNET)


def build_in_memory(kind: Callable[..., Any], **arguments: Any) -> Any:
    return models.build_in_memory(kind, **arguments)


LARGE = {"clip_seconds": 100, "heads": 8, "patch_dropout": 0.0, "attn_dropout": 0.2}
# Each of the values is refused, and the message names its argument, and the value if it is a number.
WRONG: dict[Callable[..., Any], dict[str, tuple[Any, ...]]] = {
    vae: {"num_layers": (0, 41), "num_resnet_blocks": (-1,)},
    vqgan_of: {"num_layers": (0, 41), "num_resnet_blocks": ([1, 2, 3], [-1]), "codebook_size": (100,),
               "scaling_factor": ("1", [1.0], -1.0, 0, math.nan), "shift_factor": (math.inf, True)},
    taming_of: {
        "ch_mult": ([1], [1, 0], [1] * 13), "attention_levels": ([3],), "norm_groups": (0, -4, 3), "dim": (6,),
        "num_resnet_blocks": ([1, 2], [0]), "normalize_input": (False,), "quant_conv": (False,), "latent_dim": (0,),
        "latent_patch": (0, -1, 1.5), "image_size": (18,), "body": ("unet",),
    },
    tokenizer_of: {
        "pad_mode": ("zeros",), "norm": ("group",), "patch": ("dct",), "quantizer": ("pq",), "patch_size": (0, 3),
        "input_kernel": (4, -1), "time_window": (-1,), "init_dim": (0,),
    },
    partial(built, Discriminator, dim=4): {"channels": (0,)}, partial(built, Discriminator): {"dim": (0,)},
    discriminator: {"layers": (0, 4_000_000), "frame_head": ("patch",)},
    unet_of: {
        "dim": (7, 2), "dim_mults": ([], [1, 0], 4), "self_attn": ([1] * 3, [2, 0]), "num_resnet_blocks": ([1, 2, 3],),
        "resnet_groups": (3,), "attn_heads": (0,), "lowres_noise_cond": (True,), "image_embed_scale": (0, math.nan),
    },
    mulan_of: {  # towers of two layers, and 64 bands
        "sample_rate": (0, "16000"), "clip_seconds": (0, math.nan, 1e308), "n_fft": (0, 10**9), "hop_length": (5000,),
        "n_mels": (0, 600, True), "fmin": (-1.0, 8000.0), "fmax": (9000.0,), "spectrogram": ("mfcc",),
        "patch_size": (0, 65), "patch_dropout": (-0.1, 1.0, 0.7), "time_mask_fraction": (1.0,),
        "frequency_mask_fraction": (math.nan,), "audio_dim": (18,), "audio_depth": (0,), "text_dim": (1.5,),
        "text_heads": (0,), "vocab_size": (0,), "max_text_tokens": (0,), "attn_dropout": (1.0,),
        "hierarchical_layers": (-1, 2), "hierarchical_spacing": ("odd",), "win_length": (1025, 100),
        "spectrogram_padding": ("zeros",), "init_logit_scale": (4.61, -math.inf, math.nan), "init_bias": (math.inf,),
        "text_tower": ("path",),
    },
    musiclm: {"audio_dim": (4, 18), "hierarchical_layers": (2,), "patch_size": (66,), "win_length": (129,),
              "clip_seconds": (1e12,), "heads": (0,), "spectrogram": ("log_mel",), "text_tower": (TEXT_TOWER,)},
}  # fmt: skip
# Other mistakes, and the flags and numbers that the message has to say.
SAID: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (vae, {"image_size": 100}, "use 64 or 128"), (vae, {"image_size": 0}, "use 4"),
    (vae, {"reinmax": True}, "straight_through"), (vqgan_of, {"image_size": 18}, "use 16 or 20"),
    (taming_of, {"image_size": 20, "latent_patch": 2}, "2^num_layers x latent_patch = 8; use 16 or 24"),
    (vqgan_of, {"quantizer": "pq"}, "lfq, vq, fsq, bsq, ibq"), (tokenizer_of, {"image_size": 9}, "use 8 or 10"),
    *((tokenizer_of, {"layers": layers}, said) for layers, said in {
        "residual,resid": "'resid'", "": "''", "consecutive_residual": "consecutive_residual:N",
        "residual:2": "'residual:2'", "residual," * 2000 + "residual": "1000",
    }.items()),
    (tokenizer_of, {"pad_mode": "reflect", "input_kernel": 63}, "63"),
    (discriminator, {"layers": 4_000_000}, "40"),
    (build_in_memory, {"kind": DiscreteVAE, "num_tokens": 10**12}, "num_tokens 1000000000000"),
    (build_in_memory, {"kind": DiscreteVAE, "hidden_dim": 4_000_000}, "GB of memory"),
    (build_in_memory, {"kind": Discriminator, "dim": 4_000_000, "layers": 40}, "a smaller one"),
    (unet_of, {"resnet_groups": 16}, "resnet_groups 16 must divide the 8"),
    (mulan_of, {"n_fft": 512, "n_mels": 256}, "band 0 (0 to 23 Hz)"), (mulan_of, LARGE, "clip_seconds 100"),
    (mulan_of, {"max_text_tokens": 4000, "heads": 4, "attn_dropout": 0.2}, "max_text_tokens 4000"),
    (mulan_of, {"text_tower": TEXT_TOWER, "max_text_tokens": 13}, "12 tokens"),
    (mulan_of, {"text_tower": AUDIO_TOWER}, "clip_text_model or bert"),
    (mulan_of, {"audio_tower": AUDIO_TOWER, "sample_rate": 8000}, "16000 Hz"),
    (mulan_of, {"audio_tower": AUDIO_TOWER, "clip_seconds": 1}, "60 frames"),
    (mulan_of, {"text_tower": TEXT_TOWER, "audio_depth": 5, "hierarchical_layers": 3}, "3 layers"),
    (mulan_of, {"text_tower": {**TEXT_TOWER, "num_attention_heads": 3}}, "3 heads"),
    (mulan_of, {"audio_tower": {**AUDIO_TOWER, "std": 0}}, "std 0"),
    *((helpers.quantizer_of, {"name": name, **options}, said) for name, options, said in (
        ("lqf", {}, "lfq, vq, fsq, bsq, ibq"), ("lfq", {"codebook_size": 1000}, "use 512 or 1024"),
        ("lfq", {"inv_temperature": 0}, "greater than 0"), ("fsq", {"fsq_levels": [8, 2]}, "3 or more"),
        ("vq", {"codebook_dim": 0}, "codebook_dim 0"), ("vq", {"vq_decay": 1.0}, "vq_decay 1.0"),
        ("ibq", {"codebook_size": 1}, "codebook_size 1"), ("fsq", {"codebook_size": 512}, "256, 1024"))),
    (tandem.models.features.lpips.load_perceptual, {"kind": "alex"}, "none, vgg, lpips, resnet50"),
]  # fmt: skip
ALONE = [(build, {argument: value}) for build, of_build in WRONG.items() for argument, values in of_build.items()
         for value in values]  # fmt: skip


@pytest.mark.parametrize(("build", "wrong"), ALONE)
def test_a_wrong_argument_is_named(build: Callable[..., Any], wrong: dict[str, Any]) -> None:
    said = refused(build, **wrong)
    ((argument, value),) = wrong.items()
    assert argument in said
    assert type(value) is not int or str(value) in said


@pytest.mark.parametrize(("build", "wrong", "said"), SAID)
def test_arguments_that_do_not_fit_are_refused_by_flag_or_number(
    build: Callable[..., Any], wrong: dict[str, Any], said: str
) -> None:
    assert said in refused(build, **wrong)
    with pytest.raises(TypeError, match="colour"):
        unet_of(colour=3)


LOWRES = {"lowres_cond": True}
# Of a Unet: its changes, what is given to it, and what the message has to say.
WRONG_OF_UNET: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"x": some(4, 3, 8, 7)}, "use 6 or 8"), ({}, {"x": some(4, 1, 8, 8)}, "(4, 1, 8, 8)"),
    ({}, {"x": torch.zeros(4, 3, 8, 8, dtype=torch.uint8)}, "torch.uint8"),
    ({}, {"text_encodings": some(4, 7)}, "(4, 7)"), ({}, {"keep_image": torch.tensor([True])}, "(1,)"),
    ({}, {"image_embed": some(4, 6)}, "(4, 6)"), ({}, {"image_embed": some(3, 5)}, "(4, 5)"),
    (LOWRES, {}, "lowres_image"), ({"image_embed_dim": None}, {}, "does not take it: leave image_embed out"),
    ({**LOWRES, "lowres_noise_cond": True}, {"lowres_image": some(4, 3, 4, 4)}, "lowres_time"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "given", "said"), WRONG_OF_UNET)
def test_what_a_unet_cannot_be_given_is_named(changes: dict[str, Any], given: dict[str, Any], said: str) -> None:
    assert said in refused(unet_of(**changes), **{**some_unet_inputs(4), **given})


@pytest.mark.parametrize("kind", [mulan_of, musiclm])
def test_what_a_mulan_cannot_be_given_is_named(kind: Callable[..., Any]) -> None:
    model = kind()
    given = some_pairs(model)
    for wrong, said in (
        ({"noise": given["noise"][:, 1:]}, "(3, 15)"), ({"noise": given["noise"][:, :0]}, "(3, 0)"),
        ({"waveforms": given["waveforms"][:, None]}, "mono"), ({"waveforms": given["waveforms"].int()}, "torch.int32"),
        ({"lengths": given["lengths"][1:]}, "(2,)"), ({"dropout_keys": torch.ones(2, 2).long()}, "(2, 2)"),
        ({"tokens": given["tokens"].repeat(1, 2)[:, :11]}, "11"),
        *(({"tokens": torch.full((3, 8), token)}, f"token {token}") for token in (-1, 40, 10**6)),
    ):  # fmt: skip
        assert said in refused(model, **{**given, **wrong})


GIVEN: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("encode", lambda images: images * 255, "[0, 1]"),
    ("encode", lambda images: images * 2 - 1, "[0, 1]"),
    ("encode", lambda images: images * math.nan, "nan"),
    ("encode", lambda images: (images * 255).byte(), "uint8"),
    ("encode", lambda images: images[:, :1], "(b, 3, "),
    ("encode", lambda images: images[..., :-1], ""),
    ("decode", lambda codes: codes + 10**6, "from 0 to"),
    ("decode", lambda codes: codes - 10**6, "from 0 to"),
    ("decode", lambda codes: codes.float(), "torch.float32"),
    ("decode", lambda codes: codes.flatten(1)[:, 1:], ""),
]


@pytest.mark.parametrize("name", ["vae", "lfq", "vq", "tokenizer-lfq"])
def test_images_and_codes_that_cannot_be_are_refused(name: str) -> None:
    """Without the checks, they give codes and images of nothing. A stream of a video checks them too."""
    model = made(name)
    pictures = next(iter(MODELS[name].inputs(model).values()))
    codes = model.encode(pictures)
    model.encode(pictures * 1.4 - 0.2)  # as resizing overshoots
    for method, change, said in GIVEN:
        assert said in refused(getattr(model, method), change(pictures if method == "encode" else codes))
    if name == "tokenizer-lfq":
        assert "[0, 1]" in refused(model.encode_next, pictures * 255, models.StreamState())
        assert "from 0 to 15" in refused(model.decode_next, codes + 16, models.StreamState())
    else:
        assert codes.shape == (BATCH, 4, 4)
        assert torch.equal(model.decode(codes), model.decode(codes.flatten(1)))
