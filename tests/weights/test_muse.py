"""VQGanVAE of muse-maskgit-pytorch: the public weights give the public codes and images, what goes out comes back, and
what has no counterpart is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.config.models.autoencoders import VQGANConfig
from tandem.models import VQGAN, Discriminator
from tandem.weights.formats.detection import FORMATS
from tandem.weights.formats.muse import save_public_vqgan
from tests.models.helpers import assert_same_bits, one_line_of, refused, some_images, without
from tests.models.reference import tokenizers

STATE = tokenizers.state_of("vqgan")
IMAGES = tokenizers.images("vqgan")
MUSE = FORMATS["muse"]


@pytest.fixture
def public(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "vae.pt")
    return tmp_path / "vae.pt"


def expected(name: str) -> Tensor:
    return tokenizers.stored_output("vqgan", name)


def test_public_weights_give_the_public_codes_images_and_logits(public: Path) -> None:
    """Of the package itself. Images of 16 x 32 pixels, two levels with one and two residual blocks."""
    model, discriminator = MUSE.load(public), MUSE.load_discriminator(public)
    assert discriminator is not None and not model.training
    assert torch.equal(model.encode(IMAGES), expected("codes"))
    with torch.no_grad():
        # It projects by matrices, and we by convolutions.
        torch.testing.assert_close(model.decode(expected("codes")), expected("reconstruction"), rtol=0, atol=1e-5)
        torch.testing.assert_close(model(IMAGES).reconstruction, expected("reconstruction"), rtol=0, atol=1e-5)
        torch.testing.assert_close(discriminator(IMAGES), expected("logits"), rtol=0, atol=1e-5)


def test_what_is_written_is_the_public_state_dict_bit_by_bit_with_the_arguments_that_load_it(
    public: Path, tmp_path: Path
) -> None:
    said = save_public_vqgan(MUSE.load(public), tmp_path / "back.pt", MUSE.load_discriminator(public))
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert_same_bits(back, STATE)
    assert all(tensor.is_contiguous() for tensor in back.values())
    call = said.partition("VQGanVAE")[2]
    assert eval(f"dict{call}") == {**tokenizers.VQGAN, "channels": 3}


def test_without_its_discriminator_a_model_is_loaded_without_one(public: Path, tmp_path: Path) -> None:
    said = save_public_vqgan(MUSE.load(public), tmp_path / "back.pt")
    assert said.endswith("encdec_num_resnet_blocks=(1, 2), use_vgg_and_gan=False)")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert_same_bits(back, without(STATE, "discr."))
    assert MUSE.load_discriminator(tmp_path / "back.pt") is None
    other = Discriminator.from_dict({"dim": 32, "layers": 2})
    said = save_public_vqgan(MUSE.load(public), tmp_path / "back.pt", other)
    assert "32" in said and "16" in said
    assert MUSE.load_discriminator(tmp_path / "back.pt") is None


def test_of_the_trainers_moving_average_either_weights_are_read(public: Path, tmp_path: Path) -> None:
    average = {"initted": torch.tensor(True), "step": torch.tensor(7)}
    for name, tensor in STATE.items():
        average |= {f"ema_model.{name}": tensor, f"online_model.{name}": tensor + 1}
    torch.save(average, tmp_path / "vae.0.ema.pt")
    plain = MUSE.load(public).state_dict()
    assert MUSE.is_format(tmp_path / "vae.0.ema.pt")
    assert_same_bits(MUSE.load(tmp_path / "vae.0.ema.pt").state_dict(), plain)
    trained = MUSE.load(tmp_path / "vae.0.ema.pt", weights="online").state_dict()
    assert_same_bits(trained, {name: tensor + 1 for name, tensor in plain.items()})
    assert "--weights ema" in one_line_of(lambda path: MUSE.load(path, weights="ema"), public)


def test_a_file_without_projections_has_the_signs_of_the_last_level_as_codes(tmp_path: Path) -> None:
    """The public package projects nothing where the last level has as many channels as a code has bits."""
    torch.manual_seed(0)
    source = VQGAN(VQGANConfig(image_size=16, dim=16, num_layers=1, codebook_size=256, normalize_input=False))
    save_public_vqgan(source, tmp_path / "vae.pt")
    state = torch.load(tmp_path / "vae.pt", weights_only=True)
    state = {name: tensor for name, tensor in state.items() if "project" not in name}
    state["quantizer.mask"] = 2 ** torch.arange(15, -1, -1)
    torch.save(state, tmp_path / "vae.pt")
    model, images = MUSE.load(tmp_path / "vae.pt"), some_images(size=16)
    with torch.no_grad():
        features = source.encoder[:-1](images)
    bits = (features > 0).long() * 2 ** torch.arange(15, -1, -1)[:, None, None]
    assert torch.equal(model.encode(images), bits.sum(dim=1))
    assert "16" in refused(save_public_vqgan, model, tmp_path / "back.pt")


# The file's weights with others, and what the message has to say.
MISTAKES: list[tuple[Any, str]] = [
    ({**STATE, "quantizer._codebook.embed": torch.zeros(1, 4, 8)}, "LFQ"),
    ({**STATE, "quantizer.mask": torch.ones(4)}, "several codebooks"),
    ({**STATE, "enc_dec.encoders.0.weight": torch.zeros(16, 3, 7, 7)}, "7 x 7"),
    ({**STATE, "enc_dec.encoders.3.0.weight": torch.zeros(48, 16, 4, 4)}, "double"),
    (without(STATE, "enc_dec.encoders"), "it lacks enc_dec.encoders.0.weight"),
    (without(STATE, *(f"enc_dec.encoders.{i}." for i in range(1, 6))), "have [] channels"),
    ({**STATE, "transformer.weight": torch.zeros(1)}, "transformer.weight"),
    (without(STATE, "enc_dec.decoders.2.0.bias"), "decoder.3.0.bias should have"),
    (without(STATE, "quantizer.project_out.weight"), "should have shape (32, 8, 1, 1)"),
    ({**without(STATE, "quantizer.mask"), "quantizer.project_in.weight": torch.zeros(64, 32)}, "64 bits"),
    ({**STATE, "enc_dec.decoders.5.bias": torch.ones(3).long()}, "of the kind"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "complaint"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_another_file_is_refused_in_one_line(content: Any, complaint: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "vae.pt")
    assert complaint in one_line_of(MUSE.load, tmp_path / "vae.pt")


@pytest.mark.parametrize(("name", "complaint"), [
    ("layers.0.0.weight", "discr.layers.0.0.weight"), ("layers.2.0.weight", "to_logits.0.weight should have"),
    ("to_logits.2.bias", "to_logits.2.bias should have shape (1,)"),
])  # fmt: skip
def test_half_a_discriminator_is_refused(name: str, complaint: str, tmp_path: Path) -> None:
    torch.save(without(STATE, f"discr.{name}"), tmp_path / "vae.pt")
    assert complaint in one_line_of(MUSE.load_discriminator, tmp_path / "vae.pt")
