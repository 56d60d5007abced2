"""Arguments that make no model: each is refused in one line that names it and says what would do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import models
from models import VQGAN, DiscreteVAE, Discriminator, MuLaN, ResidualQuantizer, VideoTokenizer
from models.attention import Transformer
from models.files import building
from models.log_mel import Spectrogram
from models.perceptual import load_perceptual
from models.quantizers import make_quantizer
from tests.models import helpers


def vqgan(**changes: Any) -> VQGAN:
    return VQGAN(**{**helpers.VQGAN, **changes})


def tokenizer(**changes: Any) -> VideoTokenizer:
    return VideoTokenizer(**{**helpers.TOKENIZER, **changes})


def spectrogram(**changes: Any) -> Spectrogram:
    return Spectrogram(**{"n_fft": 512, **changes})


def build_in_memory(kind: Callable[..., Any], **arguments: Any) -> Any:
    return models.build_in_memory(kind, **arguments)


def require_room(what: str, side: int) -> None:
    building.require_room(what, 3, side, side)


MISTAKES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (DiscreteVAE, {"image_size": 100}, "^image_size 100 must .* use 64 or 128$"),
    (DiscreteVAE, {"image_size": 4}, "^image_size 4 must .* use 8$"),
    (DiscreteVAE, {"image_size": 7}, "^image_size 7 must .* use 8$"),
    (DiscreteVAE, {"image_size": 0}, "^image_size 0 must .* use 8$"),
    (DiscreteVAE, {"image_size": 300, "num_layers": 8}, "^image_size 300 must .* use 256 or 512$"),
    (DiscreteVAE, {"reinmax": True}, "straight_through"),
    (DiscreteVAE, {"num_layers": 0}, "at least 1 layer and 0 blocks"),
    (DiscreteVAE, {"num_resnet_blocks": -1}, "at least 1 layer and 0 blocks"),
    (vqgan, {"image_size": 18}, "image_size 18 must be a multiple of 2\\^num_layers = 4; use 16 or 20"),
    (vqgan, {"image_size": 2}, "use 4 or 8"),
    (vqgan, {"num_layers": 0}, "num_layers 0"),
    (vqgan, {"num_resnet_blocks": [1, 2, 3]}, "must be one number, 0 or more, or 2 of them"),
    (vqgan, {"num_resnet_blocks": -1}, "0 or more"),
    (vqgan, {"quantizer": "pq"}, "lfq, vq, fsq, bsq, ibq"),
    (vqgan, {"codebook_size": 100}, "100"),
    (tokenizer, {"image_size": 9}, "image_size 9 must be a multiple of 2, .*; use 8 or 10"),
    (tokenizer, {"layers": "residual,resid"}, "layer 'resid' is unknown; use some of residual, .*, adaptive$"),
    (tokenizer, {"layers": ""}, "layer '' is unknown"),
    (tokenizer, {"layers": "consecutive_residual"}, "give consecutive_residual:N with a whole .* \\(how many\\)"),
    (tokenizer, {"layers": "compress_space:0"}, "give compress_space:N .* \\(channels\\)"),
    (tokenizer, {"layers": "compress_time:"}, "give compress_time:N"),
    (tokenizer, {"layers": "compress_time:-4"}, "give compress_time:N"),
    (tokenizer, {"layers": "residual:2"}, "'residual:2': residual takes no number"),
    (tokenizer, {"layers": "residual," * 2000 + "residual"}, "at most 1000"),
    (tokenizer, {"layers": ",".join(["compress_time:4"] * 41)}, "41 layers: .* 40 that compress"),
    (tokenizer, {"layers": "cond_residual"}, "'cond_residual' needs a condition, and there is none"),
    (tokenizer, {"pad_mode": "reflect", "input_kernel": 63}, "63 is too large for pad_mode 'reflect'"),
    (tokenizer, {"dim_cond": 4}, "dim_cond 4 has no effect"),
    (tokenizer, {"pad_mode": "zeros"}, "pad_mode 'zeros' is unknown; use constant, reflect, replicate"),
    (tokenizer, {"norm": "group"}, "norm 'group' is unknown; use none, rms"),
    (tokenizer, {"patch": "dct"}, "patch 'dct' is unknown; use haar, pixels"),
    (tokenizer, {"quantizer": "pq"}, "lfq, vq, fsq, bsq, ibq"),
    (tokenizer, {"patch_size": 3}, "patch_size 3 must be a power of two"),
    *((tokenizer, {name: 4}, f"{name} 4 must be odd") for name in ("input_kernel", "output_kernel", "residual_kernel")),
    *((tokenizer, {name: 0}, f"{name} 0") for name in ("patch_size", "channels", "init_dim", "heads", "dim_head")),
    *((Discriminator, {"dim": 4, **wrong}, "give numbers of at least 1")
      for wrong in ({"dim": 0}, {"layers": 0}, {"groups": -1}, {"channels": 0})),
    (Discriminator, {"dim": 4, "layers": 4_000_000}, "4000000 layers .* give at most 40"),
    (build_in_memory, {"kind": DiscreteVAE, "num_tokens": 10**12}, "num_tokens 1000000000000 is too large: 4194304"),
    (build_in_memory, {"kind": DiscreteVAE, "hidden_dim": 4_000_000}, "GB of memory that this machine has"),
    (build_in_memory, {"kind": DiscreteVAE, "num_resnet_blocks": 4_000_000}, "more than 16384 tensors"),
    (build_in_memory, {"kind": Discriminator, "dim": 4_000_000, "layers": 40}, "choose a smaller one"),
    (require_room, {"what": "a picture", "side": 2**40}, "a picture: .* GB are more than the .* GB that this machine"),
    *((Transformer, {"dim": 8, "depth": 1, "heads": 1, "dim_head": 1, **wrong}, "at least 1")
      for wrong in ({"dim": 0}, {"depth": 0}, {"heads": 0}, {"dim_head": -1})),
    (spectrogram, {"kind": "mfcc"}, "spectrogram 'mfcc'"),
    (spectrogram, {"n_fft": 1}, "n_fft 1 "),
    (spectrogram, {"n_fft": 10**9}, "n_fft 1000000000 "),
    (spectrogram, {"hop_length": 0}, "hop_length 0"),
    (spectrogram, {"hop_length": 2000}, "hop_length 2000"),
    (spectrogram, {"fmin": -1.0}, "fmin -1.0"),
    (spectrogram, {"fmin": 8000.0}, "fmin 8000.0"),
    (spectrogram, {"fmax": 9000.0}, "fmax 9000.0"),
    (spectrogram, {"fmin": float("nan")}, "fmin nan"),
    (spectrogram, {"n_mels": 0}, "n_mels 0"),
    (spectrogram, {"n_mels": 600}, "n_mels 600"),
    (spectrogram, {"n_mels": 256}, r"n_mels 256: band 0 \(0 to 23 Hz\) has no frequency of n_fft 512 \(every 31 Hz\)"),
    (make_quantizer, {"name": "lqf", "codebook_size": 8}, "use one of lfq, vq, fsq, bsq, ibq"),
    (make_quantizer, {"name": "lfq", "codebook_size": 1000}, "use 512 or 1024"),
    (make_quantizer, {"name": "lfq"}, "needs codebook_size"),
    (make_quantizer, {"name": "bsq", "codebook_size": 0}, "use 2 or 4"),
    (make_quantizer, {"name": "lfq", "codebook_size": 8, "decay": 0.5}, "no option decay; it has codebook_size"),
    (make_quantizer, {"name": "lfq", "codebook_size": 8, "inv_temperature": 0}, "greater than 0"),
    (make_quantizer, {"name": "bsq", "codebook_size": 8, "bits_per_group": 0}, "not in 1 to 24"),
    (make_quantizer, {"name": "vq", "codebook_size": 8}, "needs dim"),
    (make_quantizer, {"name": "vq", "codebook_size": 8, "dim": 2, "decay": 1.0}, r"decay is in \[0, 1\)"),
    (make_quantizer, {"name": "vq", "codebook_size": 1, "dim": 2}, "at least 2 entries"),
    (make_quantizer, {"name": "ibq", "codebook_size": 8, "dim": 2, "temperature": 0}, "greater than 0"),
    (make_quantizer, {"name": "fsq", "codebook_size": 512}, "256, 1024, 4096, 16384, 65536"),
    (make_quantizer, {"name": "fsq", "levels": [8, 2]}, "3 or more"),
    (make_quantizer, {"name": "fsq"}, "needs levels"),
    (load_perceptual, {"kind": "alex"}, "'alex' is none of none, vgg, lpips"),
    (ResidualQuantizer, {"dim": 6, "num_quantizers": 0}, "at least 1 level"),
    (ResidualQuantizer, {"dim": 6, "decay": 1.0}, "decay is in"),
    (ResidualQuantizer, {"dim": 6, "codebook_size": 1}, "at least 2 entries"),
]  # fmt: skip

# Towers of two layers, and 64 bands: each of the values is refused, and the message names its argument.
MULAN: dict[str, tuple[Any, ...]] = {
    "sample_rate": (0, 16000.0, "16000"), "clip_seconds": (0, -1.0, math.nan, math.inf, 1e6, 1e308),
    "n_fft": (0, 1, None),
    "hop_length": (0, 5000), "n_mels": (0, 600, True), "fmin": (-1.0, 8000.0), "fmax": (0.0, 9000.0),
    "spectrogram": ("mfcc", None), "patch_size": (0, 65), "patch_dropout": (-0.1, 1.0, 0.7),
    "time_mask_fraction": (-0.1, 1.0), "frequency_mask_fraction": (-0.1, 1.0, math.nan), "audio_dim": (0, 18),
    "audio_depth": (0, -1), "text_dim": (0, 1.5), "text_depth": (0, None), "heads": (0,), "dim_head": (0,),
    "vocab_size": (0,), "max_text_tokens": (0,), "dim_latent": (0,), "hierarchical_layers": (-1, 2, 0.0),
    "init_temperature": (0.0, 101.0, math.nan), "init_bias": (math.inf, math.nan),
}  # fmt: skip


def mulan_mistakes() -> Iterator[tuple[Callable[..., Any], dict[str, Any], str]]:
    for name, values in MULAN.items():
        for value in values:
            yield MuLaN, {**helpers.MULAN, name: value}, name


@pytest.mark.parametrize(("build", "arguments", "text"), [*MISTAKES, *mulan_mistakes()])
def test_an_argument_that_cannot_be_is_named_in_one_line(
    build: Callable[..., Any], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        build(**arguments)
    assert "\n" not in str(caught.value)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "vae": lambda: DiscreteVAE(**helpers.VAE).eval(),
    **{name: lambda name=name: vqgan(quantizer=name).eval() for name in ("lfq", "vq", "fsq", "bsq", "ibq")},
    "video": lambda: tokenizer().eval(),
}  # fmt: skip
GIVEN: list[tuple[str, Callable[[Tensor], Tensor], str]] = [
    ("encode", lambda images: images * 255, "images with values from .*: scale them to \\[0, 1\\]"),
    ("encode", lambda images: images * 2 - 1, "images with values from -.* to .*: scale them to \\[0, 1\\]"),
    ("encode", lambda images: images * math.nan, "from nan"),
    ("encode", lambda images: (images * 255).to(torch.uint8), "uint8.*: give floating-point numbers"),
    ("encode", lambda images: images[:, :1], "give .*\\(b, 3, "),
    ("encode", lambda images: images[..., :-1], "15|7"),
    ("decode", lambda codes: codes + 10**6, "the codebook has those from 0 to"),
    ("decode", lambda codes: codes - 10**6, "the codebook has those from 0 to"),
    ("decode", lambda codes: codes.float(), "codes of torch.float32: give whole numbers"),
]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("method", "change", "text"), GIVEN)
def test_images_and_codes_that_cannot_be_are_refused_in_one_line(
    name: str, method: str, change: Callable[[Tensor], Tensor], text: str
) -> None:
    """Without the checks, they give codes and images of nothing."""
    model = TOKENIZERS[name]()
    images = helpers.some_videos() if name == "video" else helpers.some_images()
    codes = model.encode(images)
    assert model.decode(codes).shape == images.shape
    with pytest.raises(ValueError, match=text) as caught:
        getattr(model, method)(change(images if method == "encode" else codes))
    assert "\n" not in str(caught.value)


def test_frames_and_codes_of_a_stream_are_checked_alike() -> None:
    model = tokenizer().eval()
    with pytest.raises(ValueError, match="scale them"):
        model.encode_next(helpers.some_videos() * 255, model.start_encoding())
    codes = model.encode(helpers.some_videos())
    with pytest.raises(ValueError, match="the codebook has those from 0 to 15"):
        model.decode_next(codes + 16, model.start_decoding())


def test_every_tokenizer_of_images_gives_a_grid_of_codes_and_takes_rows_of_them_too() -> None:
    for name in TOKENIZERS.keys() - {"video"}:
        model = TOKENIZERS[name]()
        codes = model.encode(helpers.some_images())
        assert codes.shape == (2, 4, 4)
        assert torch.equal(model.decode(codes), model.decode(codes.flatten(1)))
        model.encode(helpers.some_images() * 1.4 - 0.2)  # as resizing overshoots
