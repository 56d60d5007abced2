"""MuLan: what its outputs depend on, and what they must not depend on."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from models import MuLaN, MulanOutput
from models.audio_transformer import AudioTransformer, RelativePositionBias, sincos_positions
from models.log_mel import spec_augment
from tests.models.helpers import MULAN


def small(seed: int = 0, **overrides: Any) -> MuLaN:
    torch.manual_seed(seed)
    return MuLaN(**{**MULAN, **overrides})


def batch(model: MuLaN, size: int = 3, columns: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Waveforms, tokens, lengths and noise, of lengths from 0 up."""
    draws = torch.Generator().manual_seed(1)
    waveforms = torch.randn(size, model.clip_samples, generator=draws) * torch.logspace(-3, -1, size)[:, None]
    tokens = torch.randint(0, model.text.vocab_size, (size, columns), generator=draws)
    noise = torch.rand(size, model.noise_size, generator=draws)
    return waveforms, tokens, torch.arange(size) * 2 % (columns + 1), noise


def assert_close(one: MulanOutput, other: MulanOutput, atol: float = 2e-6) -> None:
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("hierarchical_layers", [0, 1])
@pytest.mark.parametrize("spectrogram", ["log_mel", "power"])
def test_outputs_are_unit_vectors_with_a_scale_and_a_bias_each(spectrogram: str, hierarchical_layers: int) -> None:
    model = small(spectrogram=spectrogram, hierarchical_layers=hierarchical_layers, init_temperature=20.0)
    waveforms, tokens, lengths, noise = batch(model)
    outputs = 1 + hierarchical_layers
    for out in (model(waveforms, tokens, lengths, noise), model(waveforms, tokens, lengths)):
        assert out.audio.shape == out.text.shape == (3, outputs, 6)
        torch.testing.assert_close(out.audio.norm(dim=-1), torch.ones(3, outputs))
        torch.testing.assert_close(out.text.norm(dim=-1), torch.ones(3, outputs))
        torch.testing.assert_close(out.scale, torch.full((outputs,), 20.0))
        assert torch.equal(out.bias, torch.full((outputs,), -10.0))
    assert torch.equal(model.encode_audio(waveforms), out.audio[:, 0])
    assert torch.equal(model.encode_text(tokens, lengths), out.text[:, 0])
    bands, patches = (64, 4 * 3) if spectrogram == "log_mel" else (513, 32 * 3)
    assert model.spectrogram(waveforms).shape == (3, bands, 51) and model.noise_size == 4 + patches


def test_outputs_depend_neither_on_the_batch_around_them_nor_on_the_graph_nor_on_the_global_generator() -> None:
    model = small(hierarchical_layers=1)
    inputs = batch(model)
    together = model(*inputs)
    for row in range(3):
        alone = model(*(part[row : row + 1] for part in inputs))
        assert_close(alone, together._replace(audio=together.audio[row, None], text=together.text[row, None]))
    with torch.no_grad():
        assert all(torch.equal(one, other) for one, other in zip(model(*inputs), together, strict=True))


def test_text_does_not_depend_on_its_padding() -> None:
    model = small()
    _, tokens, lengths, _ = batch(model)
    expected = model.encode_text(tokens, lengths)
    garbage = tokens.clone()
    for row, length in enumerate(lengths):
        garbage[row, length:] = torch.tensor([-1, 10**6, 3])[torch.arange(8 - length) % 3]
    assert torch.equal(model.encode_text(garbage, lengths), expected)
    for columns in (6, 10):  # fewer, but all that count; more
        other = torch.nn.functional.pad(tokens, (0, max(0, columns - 8)), value=5)[:, :columns]
        keep = lengths <= columns
        torch.testing.assert_close(model.encode_text(other, lengths)[keep], expected[keep], atol=1e-6, rtol=0)
    # ... and on each token that counts.
    for place in range(4):
        changed = tokens.clone()
        changed[2, place] = (changed[2, place] + 1) % 40
        assert (model.encode_text(changed, lengths)[2] - expected[2]).abs().max() > 1e-4


def test_text_is_read_at_a_class_token_that_looks_at_itself_and_at_every_token() -> None:
    model = small()
    tower, tokens = model.text, batch(model)[1]
    x = tower.tokens.weight[tokens] + tower.positions.weight[:8]
    x = torch.cat([tower.cls.expand(3, 1, -1), x], dim=1)
    for length in (8, 0):
        expected = tower.norms[0](tower.transformer(x[:, : 1 + length])[-1][:, 0])
        read = tower(tokens, torch.full((3,), length))
        torch.testing.assert_close(read[:, 0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("samples", [0, 100, 2400, 8000, 20011])
def test_a_clip_of_any_length_is_encoded(samples: int) -> None:
    model = small()
    latents = model.encode_audio(torch.stack([torch.zeros(samples), torch.rand(samples)]))
    assert latents.shape == (2, 6) and latents.isfinite().all()


def test_a_compiled_model_is_traced_once() -> None:
    torch._dynamo.reset()
    model = small()
    model.compile(backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert_close(model(*batch(model)), small()(*batch(model)))


@pytest.mark.parametrize("depths", [(2, 2), (3, 2), (2, 3)])
def test_hierarchical_layers_of_the_whole_depth_are_a_value_error_and_one_less_works(depths: tuple[int, int]) -> None:
    sizes = dict(zip(("audio_depth", "text_depth"), depths, strict=True))
    for layers in (2, 3, 10**9):
        with pytest.raises(ValueError, match=f"hierarchical_layers {layers}: a tower of 2 layers has 1 below"):
            small(**sizes, hierarchical_layers=layers)
    model = small(**sizes, hierarchical_layers=1)
    assert model(*batch(model)).audio.shape == (3, 2, 6)


def test_an_output_below_the_last_is_that_of_a_shallower_model() -> None:
    deep = small(audio_depth=3, text_depth=3, hierarchical_layers=2)
    inputs = batch(deep)
    out = deep(*inputs)
    for below in (1, 2):
        shallow = small(seed=1, audio_depth=3 - below, text_depth=3 - below)
        weights = deep.state_dict()
        for tower in ("audio", "text"):
            for name in (".norms.{}.weight", "_latents.projections.{}.weight", "_latents.projections.{}.bias"):
                weights[tower + name.format(0)] = weights[tower + name.format(below)]
        weights["tau"], weights["bias"] = weights["tau"][:1], weights["bias"][:1]
        shallow.load_state_dict({name: weights[name] for name in shallow.state_dict()})
        expected = shallow(*inputs)
        torch.testing.assert_close(out.audio[:, below], expected.audio[:, 0])
        torch.testing.assert_close(out.text[:, below], expected.text[:, 0])


def test_even_layers_are_read_from_the_first_on() -> None:
    """Of 3 layers, 1 below the last: the first, not the second."""
    even = small(audio_depth=3, text_depth=3, hierarchical_layers=1, hierarchical_spacing="even")
    inputs = batch(even)
    shallow = small(seed=1, audio_depth=1, text_depth=1)
    weights = even.state_dict()
    for tower in ("audio", "text"):
        for name in (".norms.{}.weight", "_latents.projections.{}.weight", "_latents.projections.{}.bias"):
            weights[tower + name.format(0)] = weights[tower + name.format(1)]
    weights["tau"], weights["bias"] = weights["tau"][:1], weights["bias"][:1]
    shallow.load_state_dict({name: weights[name] for name in shallow.state_dict()})
    expected = shallow(*inputs)
    torch.testing.assert_close(even(*inputs).audio[:, 1], expected.audio[:, 0])
    torch.testing.assert_close(even(*inputs).text[:, 1], expected.text[:, 0])
    with pytest.raises(ValueError, match="hierarchical_spacing 'odd' is unknown; use last or even"):
        small(hierarchical_spacing="odd")


def test_each_tower_has_its_own_heads_and_both_the_same_width_of_feed_forwards() -> None:
    model = small(audio_heads=4, text_dim_head=8, ff_mult=2)
    towers: tuple[tuple[Any, int, int, int], ...] = ((model.audio, 4, 4, 16), (model.text, 2, 8, 12))
    for tower, heads, dim_head, dim in towers:
        attention, feed_forward = tower.transformer.attention[0], tower.transformer.feed_forward[0]
        assert attention.heads == heads and attention.to_out.in_features == heads * dim_head
        assert attention.q_scale.shape == (dim_head,)
        assert feed_forward.contract.in_features == int(dim * 2 * 2 / 3)
    assert towers[0][0].relative_bias.mlp[-1].out_features == 4
    assert (model(*batch(model)).audio.norm(dim=-1) - 1).abs().max() < 1e-5
    sizes = {name: model.config[name] for name in ("audio_heads", "text_heads", "audio_dim_head", "text_dim_head")}
    assert sizes == {"audio_heads": 4, "text_heads": 2, "audio_dim_head": 4, "text_dim_head": 8}
    with pytest.raises(ValueError, match="text_heads 0 is not a whole number of at least 1"):
        small(text_heads=0)


def test_a_model_folder_from_before_the_later_arguments_still_loads(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    later = {"audio_heads", "text_heads", "audio_dim_head", "text_dim_head", "ff_mult", "attn_dropout", "ff_dropout",
             "win_length", "spectrogram_padding", "hierarchical_spacing", "text_tower", "audio_tower",
             "freeze_text_tower", "freeze_audio_tower"}  # fmt: skip
    assert later <= config.keys()
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in later}))
    loaded = MuLaN.from_pretrained(tmp_path)
    assert loaded.config == model.config and not loaded.drops
    assert_close(loaded(*batch(model)), model.eval()(*batch(model)), atol=0)
    other = small(seed=1)
    other.load_weights_from(tmp_path)
    assert torch.equal(other.audio.relative_bias.mlp[0].weight, model.audio.relative_bias.mlp[0].weight)


def seen_patches(tower: AudioTransformer, spectrograms: Tensor, noise: Tensor | None) -> Tensor:
    """(b, n, p x p), as they enter the embedding."""
    seen: list[Tensor] = []
    hook = tower.embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    tower(spectrograms, noise)
    hook.remove()
    return seen[0]


def test_patches_are_squares_of_the_spectrogram_row_by_row_and_the_rest_is_cropped() -> None:
    tower = AudioTransformer(8, 1, 2, 4, patch_size=4)
    spectrograms = torch.randn(2, 11, 15)
    patches = seen_patches(tower, spectrograms, None)
    assert patches.shape == (2, 2 * 3, 16)
    for y in range(2):
        for x in range(3):
            square = spectrograms[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4]
            assert torch.equal(patches[:, 3 * y + x], square.flatten(1))


@pytest.mark.parametrize(("dropout", "kept"), [(0.0, 12), (0.25, 9), (0.3, 9), (0.99, 1)])
def test_each_sample_keeps_the_patches_of_its_own_smallest_noise(dropout: float, kept: int) -> None:
    tower = AudioTransformer(8, 1, 2, 4, patch_size=4, patch_dropout=dropout)
    spectrograms, noise = torch.randn(50, 12, 16), torch.rand(50, 12)
    every, seen = seen_patches(tower, spectrograms, None), seen_patches(tower, spectrograms, noise)
    assert seen.shape == (50, kept, 16) and tower.kept(12) == kept
    chosen = (seen[:, :, None] == every[:, None]).all(dim=-1).any(dim=1)  # bool (b, 12)
    assert torch.equal(chosen, noise <= noise.sort(dim=1).values[:, kept - 1, None])
    assert dropout == 0 or len(chosen.unique(dim=0)) > 5, "all samples dropped the same"


def test_a_dropped_patch_is_like_a_grid_without_it() -> None:
    """Positions and relative biases are those of the patches that are kept: no other content reaches the output."""
    tower = AudioTransformer(8, 2, 2, 4, patch_size=4)
    spectrograms, noise = torch.randn(2, 8, 16), torch.rand(2, 8)
    expected = tower(spectrograms, noise)
    order = noise.argsort(dim=1)
    changed, kept_changed = spectrograms.clone(), spectrograms.clone()
    for row in range(2):
        for target, index in ((changed, order[row, -1]), (kept_changed, order[row, 0])):
            y, x = divmod(int(index), 4)
            target[row, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4] = torch.randn(4, 4)
    assert torch.equal(tower(changed, noise), expected)
    assert ((tower(kept_changed, noise) - expected).abs().amax(dim=(1, 2)) > 1e-3).all()
    # The same patches in another order are the same set.
    shuffled = torch.where(noise <= noise.sort(dim=1).values[:, 5, None], noise.max() - noise, 2.0)
    torch.testing.assert_close(tower(spectrograms, shuffled), expected, atol=1e-5, rtol=0)


def test_masks_and_dropout_together_never_leave_a_whole_input_erased() -> None:
    """The largest masks that the constructor lets pass, over thousands of draws and the extremes."""
    settings: dict[str, Any] = {"time_mask_fraction": 0.5, "frequency_mask_fraction": 0.45, "patch_dropout": 0.25}
    model = small(**settings, audio_dim=4, audio_depth=1, dim_head=1)
    noise = torch.rand(4000, model.noise_size, generator=torch.Generator().manual_seed(0))
    noise[:2000, 0:4:2] = 1 - 2**-24  # the longest masks
    spectrograms = spec_augment(torch.ones(4000, 64, 48), noise[:, :4], 0.5, 0.45)
    # The worst of all draws: what is hidden entirely is kept first.
    hidden = spectrograms.view(-1, 4, 16, 3, 16).amax(dim=(2, 4)).flatten(1)
    adverse = torch.where(torch.arange(4000)[:, None] % 2 == 0, hidden, noise[:, 4:])
    with torch.no_grad():
        seen = seen_patches(model.audio, spectrograms, adverse)
    assert (seen.amax(dim=(1, 2)) == 1).all()
    with pytest.raises(ValueError, match=r"patch_dropout 0\.28"):
        small(**{**settings, "patch_dropout": 0.28})


def test_noise_none_neither_masks_nor_drops_even_in_training() -> None:
    model = small().train()
    inputs = batch(model)[:3]
    trained = model(*inputs)
    assert_close(trained, model.eval()(*inputs), atol=0)
    assert (trained.audio - model(*batch(model)).audio).abs().max() > 1e-4


def test_positions_are_sines_and_cosines_of_row_and_column() -> None:
    positions = sincos_positions(3, 4, 8, torch.device("cpu"))
    for row in range(3):
        for column in range(4):
            waves = [(place, wave) for place in (row, column) for wave in (math.sin, math.cos)]
            expected = torch.tensor([wave(place / 10000 ** (i / 2)) for place, wave in waves for i in (0, 1)])
            torch.testing.assert_close(positions[4 * row + column], expected)
    # They matter without the relative bias, too.
    tower, spectrograms = AudioTransformer(8, 2, 2, 4, patch_size=4), torch.randn(2, 8, 16)
    torch.nn.init.zeros_(tower.relative_bias.mlp[-1].weight)  # type: ignore[arg-type]
    for dim in (1, 2):
        assert (tower(spectrograms.roll(4, dims=dim)) - tower(spectrograms)).abs().max() > 1e-3


def test_relative_bias_is_that_of_each_pair_of_kept_patches() -> None:
    bias = RelativePositionBias(heads=3, hidden_dim=5).double()
    patches = torch.tensor([[0, 7, 11, 3], [5, 4, 1, 10]])  # of 3 x 4
    out = bias(patches, 3, 4)
    assert out.shape == (2, 3, 4, 4)

    def logarithm(distance: int) -> float:
        return math.copysign(math.log1p(abs(distance)), distance)

    for sample in range(2):
        for i, one in enumerate(patches[sample].tolist()):
            for j, other in enumerate(patches[sample].tolist()):
                dy, dx = one // 4 - other // 4, one % 4 - other % 4
                displacement = torch.tensor([logarithm(dy), logarithm(dx)], dtype=torch.float64)
                torch.testing.assert_close(out[sample, :, i, j], bias.mlp(displacement))


@pytest.mark.parametrize("tau", [4.7, 100.0, 1e4, math.inf])
def test_temperature_cannot_overflow(tau: float) -> None:
    model = small()
    model.tau.data.fill_(tau)
    out = model(*batch(model))
    torch.testing.assert_close(out.scale, torch.tensor([100.0]))
    logits = out.scale * (out.audio[:, 0] @ out.text[:, 0].T)
    torch.nn.functional.cross_entropy(logits, torch.arange(3)).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("tau", "upstream", "expected"), [
    (2.0, 1.0, math.exp(2)), (2.0, -1.0, -math.exp(2)), (4.7, 1.0, 100.0), (4.7, -1.0, 0.0),
    (4.6, -1.0, -math.exp(4.6)),
])  # fmt: skip
def test_a_clamped_temperature_has_no_gradient_on_its_way_up(tau: float, upstream: float, expected: float) -> None:
    model = small()
    model.tau.data.fill_(tau)
    (model(*batch(model)).scale * upstream).sum().backward()
    torch.testing.assert_close(model.tau.grad, torch.tensor([expected]))


def test_every_weight_has_a_finite_gradient_silence_and_an_empty_caption_included() -> None:
    model = small(hierarchical_layers=1)
    waveforms, tokens, lengths, noise = batch(model, size=4)
    waveforms[1] = 0
    assert lengths[0] == 0
    out = model(waveforms, tokens, lengths, noise)
    logits = out.scale[:, None, None] * torch.einsum("ihd,jhd->hij", out.audio, out.text) + out.bias[:, None, None]
    torch.nn.functional.softplus(logits).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_the_gradient_is_the_slope_in_fp64() -> None:
    """A central difference along a random direction of all the weights."""
    model = small(hierarchical_layers=1).double()
    waveforms, *rest = batch(model)
    weights = torch.randn(3, 2, 6, dtype=torch.float64), torch.randn(3, 2, 6, dtype=torch.float64)

    def loss() -> Tensor:
        out = model(waveforms.double(), *rest)
        assert {part.dtype for part in out} == {torch.float64}
        return (out.audio * weights[0] + out.text * weights[1]).sum() + (out.scale * out.bias).sum()

    loss().backward()
    directions = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    products = [(directions[name] * parameter.grad).sum() for name, parameter in model.named_parameters()]
    slope = torch.stack(products).sum()
    original, values = copy.deepcopy(model.state_dict()), []
    for step in (1e-6, -1e-6):
        model.load_state_dict({name: original[name] + step * directions[name] for name in original})
        values.append(loss().detach())
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spectrogram", ["log_mel", "power"])
def test_in_half_precision_the_spectrogram_and_the_outputs_stay_in_fp32(
    dtype: torch.dtype, spectrogram: str, autocast: bool
) -> None:
    """The model is cast, with its buffers: a filter bank among them would be; or its operations are."""
    model = small(spectrogram=spectrogram)
    waveforms, tokens, lengths, noise = batch(model)
    waveforms[2] = 0.99  # powers beyond fp16's range
    assert spectrogram == "log_mel" or model.spectrogram(waveforms).max() > 65504
    seen, expected = model.spectrogram(waveforms), model(waveforms, tokens, lengths, noise)
    assert not list(model.buffers())
    features = torch.randn(3, 1, 16)
    latents = model.audio_latents(features)
    if not autocast:
        model.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        assert torch.equal(model.spectrogram(waveforms), seen)
        out = model(waveforms, tokens, lengths, noise)
        assert not autocast or torch.equal(model.audio_latents(features), latents), "the map to latents is rounded"
    assert {part.dtype for part in out} == {torch.float32}
    torch.testing.assert_close(out.audio.norm(dim=-1), torch.ones(3, 1))
    assert_close(out, expected, atol=0.1)
    assert (out.audio - expected.audio).abs().max() > 0, "nothing was computed in half precision"
    (out.audio.sum() + out.text.sum()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_forward_never_waits_for_the_device_and_has_shapes_of_its_inputs_alone() -> None:
    """With tensors that have no values, as on a GPU: whatever asks for one raises."""
    with FakeTensorMode(), torch.device("cuda"):
        model = MuLaN(**MULAN, hierarchical_layers=1)
        out = model(torch.empty(3, 8000), torch.ones(3, 8).long(), torch.ones(3).long(), torch.empty(3, 16))
    assert out.audio.shape == out.text.shape == (3, 2, 6)


def test_shapes_that_do_not_fit_and_tokens_outside_of_the_vocabulary_are_refused() -> None:
    model = small()
    waveforms, tokens, lengths, noise = batch(model)
    for inputs, complaint in (
        ((waveforms, tokens, lengths, noise[:, 1:]), r"noise of shape \(3, 15\).*\(3, 16\)"),
        ((waveforms.repeat(1, 2), tokens, lengths, noise), r"clips of 16000 samples take \(3, 28\)"),
        ((waveforms[:, None], tokens, lengths, noise), "mixed to mono"),
        ((waveforms, tokens, lengths[1:], noise), r"lengths of shape \(2,\)"),
        ((waveforms, tokens.repeat(1, 2)[:, :11], lengths), "11 columns of tokens; this model takes up to 10"),
        *(((waveforms, torch.full((3, 8), token), lengths), f"token {token} is not in the vocabulary of 40")
          for token in (-1, 40, 10**6)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=complaint):
            model(*inputs)


def test_the_model_hears_how_loud_a_patch_is() -> None:
    """A steady tone, fading and swelling: the norm of each patch alone would leave little between them."""
    embed, patch = small().audio.embed, torch.randn(1, 1, 16**2)
    quiet, loud = embed(0.5 * patch - 1), embed(0.5 * patch + 1)
    assert (quiet - loud).norm() > 0.3 * loud.norm()
    torch.testing.assert_close(embed.norm_before(0.5 * patch - 1), embed.norm_before(0.5 * patch + 1))
