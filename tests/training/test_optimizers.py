"""What decays and what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tandem import models
from tandem.training.optimizers import make_optimizer
from tests.models import helpers


@pytest.mark.parametrize("lion", [False, True])
def test_only_matrices_decay(lion: bool) -> None:
    """Without gradients an update is the decay alone: w <- w - lr x decay x w."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    for number, shape in enumerate([(), (1, 1, 1), (1, 4, 1, 1), (1, 1, 5)]):  # temperatures, a gain, a bias
        model.register_parameter(f"other{number}", nn.Parameter(torch.full(shape, 2.0)))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = make_optimizer(model, lr=0.1, betas=(0.9, 0.99), weight_decay=0.5, lion=lion)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(weight.detach(), before[name] * factor)


# Of the scripts whose weights decay.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mulan": ("MuLaN", helpers.MULAN),
    "musiclm": ("MuLaN", helpers.MUSICLM),
    "tokenizer": ("VideoTokenizer", {**helpers.TOKENIZER, "layers": "attend_space,gateloop_time,attend_time"}),
    "unet": ("Unet", helpers.UNET),
}


@pytest.mark.parametrize(("kind", "arguments"), MODELS.values(), ids=MODELS)
def test_no_scale_no_bias_and_no_missing_condition_decays(kind: str, arguments: dict[str, Any]) -> None:
    with torch.device("meta"):  # shapes alone
        model = getattr(models, kind).from_dict(arguments)
    decaying = {id(weight) for weight in make_optimizer(model, 0.1, (0.9, 0.99), 0.5).param_groups[0]["params"]}
    names = {name for name, weight in model.named_parameters() if id(weight) in decaying}
    not_weights = ("gamma", "bias", "gain", "scale", "null_kv", "null_image_embed", "null_text_embed")
    assert {name for name in names if name.endswith(not_weights)} == set()
    linear = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert linear and linear <= names


def test_lion_steps_with_divided_gradients_and_skips_as_the_engine_says_without_the_host_on_a_device() -> None:
    weights = [nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)) for _ in range(2)]
    ours, plain = (make_optimizer(nn.ParameterList([w]), 0.1, (0.9, 0.99), 0.5, lion=True) for w in weights)
    for update, gradient in enumerate(torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0))):
        is_skipped = update == 2
        weights[0].grad, weights[1].grad = 4 * gradient, gradient
        ours.grad_scale, ours.found_inf = torch.tensor(4.0), torch.tensor(float(is_skipped))  # type: ignore[attr-defined]
        ours.step()
        if not is_skipped:
            plain.step()
    assert torch.equal(*weights)
    assert torch.equal(*(optimizer.state[w]["exp_avg"] for optimizer, w in zip((ours, plain), weights, strict=True)))
    meta = [torch.zeros(2, 3, device="meta") for _ in range(3)]  # a device of which the host can read nothing
    optimizer = make_optimizer(nn.ParameterList([nn.Parameter(meta[0])]), 0.1, (0.9, 0.99), 0.5, lion=True)
    optimizer.param_groups[0]["params"][0].grad = meta[1]
    optimizer.found_inf = torch.zeros((), device="meta")  # type: ignore[attr-defined]
    optimizer.step()
