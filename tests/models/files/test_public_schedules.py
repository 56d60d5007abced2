"""The noise of a decoder outlives its way to DALLE2-pytorch and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import Decoder
from models.decoder_config import DecoderConfig
from models.files.public_decoder import load_public_decoder, save_public_decoder
from models.files.public_schedules import noise_arguments
from models.unets.config import UnetConfig
from tests.models.reference.unets import LONG_STRIDE, TIMESTEPS, stored_decoder

UNET: dict[str, Any] = {
    "dim": 8, "dim_mults": [1, 2], "num_resnet_blocks": 1, "attn_heads": 2, "attn_dim_head": 8, "resnet_groups": 4,
}  # fmt: skip
FIRST = {**UNET, "image_embed_dim": 5, "cond_on_image_embeds": True}


def decoder(schedules: tuple[str, ...] = ("cosine", "linear"), **noise: Any) -> Decoder:
    unets = [UnetConfig(**({**UNET, "lowres_cond": True} if index else FIRST)) for index in range(len(schedules))]
    sizes = [8 * 2**index for index in range(len(schedules))]
    noise |= {"noise_schedule": list(schedules), "lowres_condition": "none"}
    return Decoder(DecoderConfig.around(unets, image_sizes=sizes, **noise))


@pytest.mark.parametrize("noise", [
    {"zero_terminal_snr": False, "noise_shift": 8}, {"zero_terminal_snr": True},
    {"zero_terminal_snr": True, "noise_shift": 64, "timesteps": 37},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("schedules", [("cosine", "linear"), ("jsd", "sigmoid"), ("quadratic",)], ids=str)
def test_levels_are_the_same_after_export_and_import(
    noise: dict[str, Any], schedules: tuple[str, ...], tmp_path: Path
) -> None:
    ours = decoder(schedules, **noise)
    save_public_decoder(ours, tmp_path / "decoder.pth")
    back = load_public_decoder([tmp_path / "decoder.pth"])
    for index in range(len(schedules)):
        for name in ("alpha", "sigma"):
            there, here = (getattr(model.schedule(index), name) for model in (ours, back))
            torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-15)
    if len(schedules) > 1:
        assert back.config["noise_shift"] == noise.get("noise_shift")


def settings(**said: Any) -> dict[str, Any]:
    return {"beta_schedule": ["cosine", "linear"], "image_sizes": [8, 16], "timesteps": TIMESTEPS, **said}


def test_the_tables_of_the_public_package_are_those_of_their_names() -> None:
    others = stored_decoder()[1]
    tables = [others[f"noise_schedulers.{index}.alphas_cumprod"] for index in (0, 1)]
    assert TIMESTEPS < LONG_STRIDE, "they are stored whole"
    plain = {"zero_terminal_snr": False, "noise_shift": None}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert noise_arguments(settings(), [table.to(dtype) for table in tables]) == plain
    assert noise_arguments(settings(), [None, tables[1]]) == noise_arguments(settings(), [None, None]) == plain


def changed(table: Tensor, level: int, factor: float) -> Tensor:
    table = table.clone()
    table[level] *= factor
    return table


def test_levels_that_no_arguments_give_are_refused_in_one_line(tmp_path: Path) -> None:
    save_public_decoder(decoder(noise_shift=32, timesteps=50), tmp_path / "decoder.pth")
    content = torch.load(tmp_path / "decoder.pth", weights_only=True)
    name = "noise_schedulers.1.alphas_cumprod"
    table = content["model"][name]
    for bad, text in (
        (changed(table, 40, 1.01), "none that cosine, linear can have"), (table[1:], "unet 2 has 49 noise levels"),
        (table * torch.nan, "none that cosine, linear can have"), (table.long(), "no table of numbers"),
        (table[None], "no table of numbers"),
    ):  # fmt: skip
        content["model"][name] = bad
        torch.save(content, tmp_path / "bad.pth")
        with pytest.raises(ValueError, match=text) as raised:
            load_public_decoder([tmp_path / "bad.pth"])
        assert "bad.pth" in str(raised.value) and "\n" not in str(raised.value)
    # The shifts of two unets are of one reference size.
    other = decoder(noise_shift=16, timesteps=50).schedule(1).alpha ** 2
    content["model"][name] = other.float()
    torch.save(content, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match="none that"):
        load_public_decoder([tmp_path / "bad.pth"])
