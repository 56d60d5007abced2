"""The conditional Unet: the public package's numbers, conditions that are dropped, what exists, what it refuses."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models import Unet
from models.files.dalle2 import build_unets, read_public, to_public
from models.files.dalle2_config import unet_arguments
from models.unets.attention import Attention, CrossAttention
from models.unets.resampling import enlarged
from tests.models.helpers import UNET, some, some_unet_inputs
from tests.models.reference.unets import CASES, STRIDE, inputs_of, public_config, stored, weights_of

CONDITIONS = ("image_embed", "text_encodings")
cases = pytest.mark.parametrize("case", CASES)


def unet(**changes: Any) -> Unet:
    """In eval mode, with an output that is not 0."""
    torch.manual_seed(0)
    model = Unet(**{**UNET, **changes}).eval()
    nn.init.normal_(model.to_out.weight, std=0.3)
    return model


def unet_of(case: str) -> Unet:
    torch.manual_seed(0)
    config = public_config(case)
    model = Unet(**unet_arguments(config, len(config["unets"]) - 1)).eval()
    nn.init.normal_(model.to_out.weight, std=0.3)
    return model


@cases
def test_public_weights_give_the_public_numbers(case: str, tmp_path: Path) -> None:
    """Through a file in the public layout. Sums in another order, as other instructions of a CPU add them, move the
    outputs, which reach 4 to 13, by up to 1.1e-5 as measured; 5e-5 leaves room for further CPUs."""
    reference, config = stored(case), public_config(case)
    public = {f"unets.0.{name}": weight for name, weight in weights_of(case, reference.shapes).items()}
    if CASES[case].is_second:
        public = {name.replace("unets.0.", "unets.1."): weight for name, weight in public.items()}
        public |= to_public([Unet(**unet_arguments(config, 0))])
    torch.save({"version": "1.15.6", "config": {"decoder": config}, "model": public}, tmp_path / "latest.pth")
    *_, model = build_unets(read_public([tmp_path / "latest.pth"]))
    inputs, none = inputs_of(case), torch.zeros(2, dtype=torch.bool)
    with torch.no_grad():
        kept = model(**inputs)
        null = model(**inputs, keep_image=none, keep_text=none)[:, :, ::STRIDE, ::STRIDE]
    assert (kept - reference.kept).abs().max() < 5e-5 and (null - reference.null).abs().max() < 5e-5


@cases
def test_every_parameter_is_used(case: str) -> None:
    model = unet_of(case).train()
    half = torch.tensor([True, False])
    model(**inputs_of(case), keep_image=half, keep_text=half).square().mean().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


def test_the_output_is_0_at_the_start_and_fp32_in_every_precision() -> None:
    inputs = some_unet_inputs()
    assert not Unet(**UNET)(**inputs).any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = unet()(**inputs)
    outputs = unet()(**inputs), under_autocast, unet().bfloat16()(**inputs)
    assert {out.dtype for out in outputs} == {torch.float32}
    # bf16 has 8 bits, and about 20 layers follow one another.
    assert all((out - outputs[0]).square().mean() < 1e-3 * outputs[0].square().mean() for out in outputs[1:])


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_sample_without_its_condition_is_one_with_the_null_condition(name: str) -> None:
    """Bit by bit, whatever the other samples have."""
    model, inputs = unet(), some_unet_inputs()
    mask = {"image_embed": "keep_image", "text_encodings": "keep_text"}[name]
    rows = torch.tensor([True, False, False, True])
    with torch.no_grad():
        every = model(**inputs)
        mixed = model(**inputs, **{mask: rows})
        null = model(**{key: tensor for key, tensor in inputs.items() if key != name}, **{mask: torch.zeros_like(rows)})
    assert torch.equal(mixed[rows], every[rows]) and torch.equal(mixed[~rows], null[~rows])
    assert (every - null).abs().amax(dim=(1, 2, 3)).min() > 0.01
    with torch.no_grad():
        assert torch.equal(model(**inputs, **{mask: torch.ones_like(rows)}), every)


def test_a_token_of_zeros_is_a_missing_token_wherever_it_stands() -> None:
    """A gap has the learned token of its place, as the end has, so that a longer text of zeros is the same text: equal
    but for the rounding of sums over more rows, which some CPUs add in another order."""
    model, inputs = unet(), some_unet_inputs(2)
    text = inputs.pop("text_encodings")
    text[:, 1] = 0
    with torch.no_grad():
        gap = model(**inputs, text_encodings=text)
        longer = model(**inputs, text_encodings=F.pad(text, (0, 0, 0, 5)))
        torch.testing.assert_close(longer, gap, rtol=1e-5, atol=1e-5)
        model.null_text_embed[:, 1] += 1
        assert not torch.equal(model(**inputs, text_encodings=text), gap)
        model.null_text_embed[:, 0] += 1  # not in its place: there is a token
        moved = model(**inputs, text_encodings=text)
        model.null_text_embed[:, 0] -= 1
        assert torch.equal(model(**inputs, text_encodings=text), moved)


@pytest.mark.parametrize("case", ["text", "lowres with text", "default", "unconditional", "one level", "lowres"])
def test_what_does_not_depend_on_the_noise_level_is_computed_once(case: str) -> None:
    model, inputs = unet_of(case), inputs_of(case)
    given = {name: inputs.pop(name) for name in CONDITIONS if name in inputs}
    widths: list[int] = []
    with torch.no_grad():
        expected = model(**inputs, **given)
        conditions = model.condition(**given)
        for module in model.modules():
            if isinstance(module, CrossAttention):
                module.to_kv.register_forward_pre_hook(lambda _, tokens: widths.append(tokens[0].shape[1]))
        result = model(**inputs, conditions=conditions)
    assert (result - expected).abs().max() < 1e-5  # other products of matrices, rounded otherwise
    assert set(widths) == {model.config["num_time_tokens"]}


def test_noise_levels_are_told_apart_in_bf16() -> None:
    """In bf16, 768, 769 and 770 are one number."""
    model = unet().bfloat16()
    inputs = {name: tensor[:1] for name, tensor in some_unet_inputs().items()}
    for kind in (torch.int64, torch.float32):
        outputs = [model(**{**inputs, "time": torch.tensor([level], dtype=kind)}) for level in (768, 769, 770)]
        assert all(not torch.equal(*pair) for pair in pairwise(outputs))


def test_a_small_low_resolution_image_is_enlarged_by_repeating_its_pixels() -> None:
    model, inputs = unet(lowres_cond=True, lowres_noise_cond=True), some_unet_inputs(2)
    small, level = some(2, 3, 4, 4, seed=5), torch.tensor([7, 200])
    with torch.no_grad():
        expected = model(
            **inputs, lowres_image=small.repeat_interleave(2, -1).repeat_interleave(2, -2), lowres_time=level
        )
        assert torch.equal(model(**inputs, lowres_image=small, lowres_time=level), expected)
        assert not torch.equal(model(**inputs, lowres_image=small, lowres_time=level + 1), expected)


def test_an_earlier_prediction_that_is_missing_is_zeros_and_the_embedding_is_scaled() -> None:
    inputs = some_unet_inputs(2)
    model = unet(self_cond=True, image_embed_scale=4.0)
    plain = unet(self_cond=True)
    with torch.no_grad():
        out = model(**inputs)
        assert torch.equal(model(**inputs, self_cond=torch.zeros(2, 3, 8, 8)), out)
        assert not torch.equal(model(**inputs, self_cond=torch.ones(2, 3, 8, 8)), out)
        assert torch.equal(plain(**{**inputs, "image_embed": 4 * inputs["image_embed"]}), out)


def test_any_sides_that_the_levels_can_halve_are_taken() -> None:
    for early, multiple in ((False, 4), (True, 8)):
        model = unet(dim_mults=[1, 2, 2], num_resnet_blocks=1, memory_efficient=early, combine_upsample_fmaps=True)
        inputs = some_unet_inputs(1)
        assert model.smallest_multiple == multiple
        assert model(**{**inputs, "x": some(1, 3, multiple, 3 * multiple)}).shape == (1, 3, multiple, 3 * multiple)


def test_channels_last_gives_the_same_numbers() -> None:
    model, inputs = unet(self_attn=[False, True], sparse_attn=True), some_unet_inputs()
    with torch.no_grad():
        expected = model(**inputs)
        model.to(memory_format=torch.channels_last)
        out = model(**{**inputs, "x": inputs["x"].to(memory_format=torch.channels_last)})
    assert (out - expected).abs().max() < 1e-5  # sums in another order


class Border(torch.autograd.Function):
    """What comes into or out of a module, as a step of its own in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def across_a_border(value: Any) -> Any:
    """As ZeRO 3 does it: tensors through a function, lists and tuples as copies."""
    if isinstance(value, (list, tuple)):
        parts = [across_a_border(part) for part in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return Border.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


@pytest.mark.parametrize("case", ["combine_upsample_fmaps", "combined memory_efficient", "sparse_attn", "text"])
def test_hooks_at_the_borders_of_modules_change_no_bit(case: str) -> None:
    plain, parted = unet_of(case), unet_of(case)
    for module in parted.modules():
        module.register_forward_pre_hook(lambda _, inputs: across_a_border(inputs))
        module.register_forward_hook(lambda _, inputs, output: across_a_border(output))
    outputs = [model(**inputs_of(case)) for model in (plain, parted)]
    for out in outputs:
        out.square().mean().backward()
    assert torch.equal(*outputs)
    ours, theirs = (dict(model.named_parameters()) for model in (plain, parted))
    assert [name for name in ours if not torch.equal(ours[name].grad, theirs[name].grad)] == []


def test_it_is_one_graph_for_the_compiler() -> None:
    model, inputs = unet(gradient_checkpointing=True).train(), some_unet_inputs()
    keep = torch.tensor([True, False, True, True])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(**inputs, keep_image=keep), model(**inputs, keep_image=keep))
    conditions = model.condition(inputs.pop("image_embed"), inputs.pop("text_encodings"))
    assert torch.equal(compiled(**inputs, conditions=conditions), model(**inputs, conditions=conditions))


def test_coordinates_are_two_more_channels_of_the_input_that_tell_places_apart() -> None:
    plain, told = unet(init_cross_embed=False), unet(init_cross_embed=False, coordinates=True)
    weights = plain.state_dict()
    first, image, extra = (
        weights["init_conv.weight"],
        3,
        told.init_conv.weight.shape[1] - plain.init_conv.weight.shape[1],
    )
    assert extra == 2
    # With weights of 0 for the two channels, which follow the images and an earlier prediction, it is the plain Unet.
    before = image * (1 + plain.config["self_cond"])
    zeros = torch.zeros_like(first[:, :2])
    told.load_state_dict(
        weights | {"init_conv.weight": torch.cat([first[:, :before], zeros, first[:, before:]], dim=1)}
    )
    inputs = some_unet_inputs()
    torch.testing.assert_close(told(**inputs), plain(**inputs), rtol=0, atol=1e-5)  # sums of more terms round otherwise
    seen: list[Tensor] = []
    told.init_conv.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    told(**inputs)
    across, down = seen[0][0, before : before + 2]
    assert across[0].tolist() == down[:, 0].tolist() == pytest.approx(torch.linspace(-1, 1, 8).tolist())
    assert torch.equal(across, across[:1].expand(8, 8)) and torch.equal(down, across.T)
    with pytest.raises(ValueError, match="built without coordinates"):
        plain(**inputs, coordinates=seen[0][:, before : before + 2])
    with pytest.raises(ValueError, match="coordinates has the shape"):
        told(**inputs, coordinates=torch.zeros(4, 2, 4, 4))
    with pytest.raises(ValueError, match="do not know coordinates"):
        to_public([unet(coordinates=True, cross_attn_heads=8, cross_attn_dim_head=64)])


@pytest.mark.parametrize("cosine", [False, True])
def test_self_attention_is_the_softmax_of_q_k_over_the_root_of_their_size(cosine: bool) -> None:
    """Written out with loops over heads, in fp64."""
    torch.manual_seed(0)
    attention, x = Attention(6, heads=3, dim_head=4, cosine=cosine).double(), some(2, 5, 6).double()
    normed = F.layer_norm(x, (6,)) * attention.norm.g
    k, v = (torch.cat([null.expand(2, 1, 4), part], dim=1) for null, part in
            zip(attention.null_kv, attention.to_kv(normed).split(4, dim=-1), strict=True))  # fmt: skip
    heads = []
    for q in attention.to_q(normed).split(4, dim=-1):
        logits = 16 * F.cosine_similarity(q[:, :, None], k[:, None], dim=-1) if cosine else q @ k.mT / 2
        heads.append(logits.softmax(dim=-1) @ v)
    expected = F.layer_norm(torch.cat(heads, dim=-1) @ attention.to_out[0].weight.T, (6,))
    assert torch.allclose(attention(x), expected, rtol=1e-10)


def test_maps_are_enlarged_by_a_cubic_that_is_exact_for_parabolas() -> None:
    """Keys 1981: a = -1/2 reproduces polynomials of degree 2 away from the border, where there are zeros beyond."""
    at = torch.arange(8, dtype=torch.float64)
    x = (at**2)[:, None] + 3 * at[None]
    fine = (torch.arange(32, dtype=torch.float64) + 0.5) / 4 - 0.5
    expected = (fine**2)[:, None] + 3 * fine[None]
    result = enlarged(x[None, None].float(), 4)[0, 0]
    assert torch.allclose(result[6:-6, 6:-6], expected[6:-6, 6:-6].float(), atol=1e-4)  # numbers up to 70 in fp32
    assert enlarged(x[None, None], 1) is not None and result[0, 0] != expected[0, 0]


def test_pixel_shuffle_starts_as_the_nearest_pixel() -> None:
    """Equal but for rounding: some CPUs add the four equal sums, in other lanes of a register, in other orders."""
    model = unet(dim_mults=[1, 2, 2], num_resnet_blocks=1, memory_efficient=True)
    for up in model.ups:
        out = up[3](some(1, up[3].net[0].in_channels, 4, 4))
        nearest = out[:, :, ::2, ::2].repeat_interleave(2, -1).repeat_interleave(2, -2)
        torch.testing.assert_close(nearest, out, rtol=1e-5, atol=1e-6)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "dim": ({"dim": 7}, "dim 7: give an even number"),
    "tiny": ({"dim": 2}, "dim 2: give an even number of channels of at least 4"),
    "mults": ({"dim_mults": []}, r"dim_mults \[\]: give a whole number"),
    "mult": ({"dim_mults": [1, 0]}, r"dim_mults \[1, 0\]"),
    "mult that is one number": ({"dim_mults": 4}, "dim_mults 4: .* for each level"),
    "self_attn": ({"self_attn": [True]}, r"self_attn \[True\] has 1 values, dim_mults 2: .* finest first"),
    "self_attn as a number": ({"self_attn": [1, 0]}, "give True or False for all levels, or one for each"),
    "blocks": ({"num_resnet_blocks": [1, 2, 3]}, "has 3 values, dim_mults 2"),
    "negative blocks": ({"num_resnet_blocks": -1}, "a number of at least 0"),
    "groups": ({"resnet_groups": [8, 0]}, "resnet_groups .* a number of at least 1"),
    "groups that do not fit": ({"resnet_groups": [8, 3]}, "resnet_groups 3 must divide the 16 channels"),
    "groups of the end": ({"resnet_groups": [16, 8], "dim_mults": [2, 2]}, "resnet_groups 16 must divide the 8"),
    "combiner": ({"combine_upsample_fmaps": True, "dim": 12, "resnet_groups": 4}, "needs a dim that 8 divides, not 12"),
    "text": ({"text_embed_dim": None}, "cond_on_text_encodings needs text_embed_dim"),
    "image": ({"image_embed_dim": None}, "cond_on_image_embeds needs image_embed_dim"),
    "noise": ({"lowres_noise_cond": True}, "set lowres_cond too"),
    "heads": ({"attn_heads": 0}, "attn_heads 0: give a whole number of at least 1"),
    "tokens": ({"num_image_tokens": True}, "num_image_tokens True"),
    "channels": ({"channels_out": 0}, "channels_out 0"),
    "switch": ({"memory_efficient": 1}, "memory_efficient 1: give True or False"),
    "scale": ({"image_embed_scale": 0}, "image_embed_scale 0: give a number greater than 0"),
    "scale that is none": ({"image_embed_scale": math.nan}, "image_embed_scale nan"),
    "first kernel": ({"init_conv_kernel_size": 4}, "init_conv_kernel_size 4: give an odd number"),
    "last kernel": ({"final_conv_kernel_size": 0}, "final_conv_kernel_size 0: give an odd number"),
    "kernels": ({"init_cross_embed_kernel_sizes": [3, 4]}, r"\[3, 4\]: give odd numbers, as 3,7,15"),
    "even kernels": ({"cross_embed_downsample_kernel_sizes": [3]}, r"\[3\]: give even numbers, as 2,4"),
    "many kernels": ({"init_cross_embed_kernel_sizes": [3] * 5}, "8 channels are too few for 5 kernels"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_arguments_that_make_no_unet_are_refused_in_one_line(name: str) -> None:
    changes, complaint = MISTAKES[name]
    with pytest.raises(ValueError, match=complaint) as caught:
        Unet(**{**UNET, **changes})
    assert "\n" not in str(caught.value)


def test_an_argument_that_is_unknown_is_refused() -> None:
    with pytest.raises(TypeError, match="sparse_attn_window"):
        Unet(**UNET, sparse_attn_window=3)


WRONG_INPUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "sides": ({}, {"x": some(4, 3, 8, 7)}, "width 7 must be a multiple of 2, .*; use 6 or 8"),
    "channels": ({}, {"x": some(4, 1, 8, 8)}, r"x has the shape \(4, 1, 8, 8\) .* \(b, 3, height, width\)"),
    "bytes": ({}, {"x": torch.zeros(4, 3, 8, 8, dtype=torch.uint8)}, "torch.uint8: give floating-point"),
    "time": ({}, {"time": torch.tensor(3)}, r"time has the shape \(\): give \(4,\)"),
    "no image": ({}, {"image_embed": None}, "give image_embed, or keep_image that is all False"),
    "no text": ({}, {"text_encodings": None}, "cond_on_text_encodings: give text_encodings, or keep_text"),
    "a kept text that is not there": (
        {}, {"text_encodings": None, "keep_text": torch.tensor([False, True, False, False])}, "keep_text keeps a"),
    "a mask of another size": ({}, {"keep_image": torch.tensor([True])}, r"keep_image has the shape \(1,\)"),
    "width of the embedding": ({}, {"image_embed": some(4, 6)}, r"\(4, 6\): give \(b, 5\)"),
    "width of the text": ({}, {"text_encodings": some(4, 7)}, r"\(4, 7\): give \(b, tokens, 7\)"),
    "batch": ({}, {"image_embed": some(3, 5)}, "image_embed is for 3 images, and there are 4"),
    "embedding that is not asked for": (
        {"cond_on_image_embeds": False}, {}, "image_embed was given, but .* without cond_on_image_embeds"),
    "low resolution": ({"lowres_cond": True}, {}, "give lowres_image"),
    "its noise": ({"lowres_cond": True, "lowres_noise_cond": True}, {"lowres_image": some(4, 3, 4, 4)}, "lowres_time"),
    "low resolution that is not asked for": ({}, {"lowres_image": some(4, 3, 4, 4)}, "without lowres_cond: leave"),
    "prediction that is not asked for": ({}, {"self_cond": some(4, 3, 8, 8)}, "built without self_cond"),
    "prediction of another size": ({"self_cond": True}, {"self_cond": some(4, 3, 4, 4)}, r"give \(4, 3, 8, 8\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_INPUTS)
def test_inputs_that_do_not_fit_are_refused_in_one_line(name: str) -> None:
    changes, inputs, complaint = WRONG_INPUTS[name]
    with pytest.raises(ValueError, match=complaint) as caught:
        unet(**changes)(**{**some_unet_inputs(), **inputs})
    assert "\n" not in str(caught.value)


def test_conditions_and_what_they_stand_for_exclude_each_other() -> None:
    model, inputs = unet(), some_unet_inputs()
    given = {name: inputs.pop(name) for name in CONDITIONS}
    conditions = model.condition(**given)
    with pytest.raises(ValueError, match="leave these out"):
        model(**inputs, conditions=conditions, keep_image=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="conditions are for 4 images, and there are 2"):
        model(inputs["x"][:2], inputs["time"][:2], conditions=conditions)


def test_its_arguments_are_completed() -> None:
    config = unet(resnet_groups=4, cond_on_text_encodings=False, channels_out=None).config
    assert config["resnet_groups"] == [4, 4] and config["self_attn"] == [False, False]
    assert (config["channels_out"], config["init_dim"], config["text_embed_dim"]) == (3, 8, None)
    assert Unet(**config).config == config
