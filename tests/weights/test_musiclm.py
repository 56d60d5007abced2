"""MuLaN of musiclm-pytorch: the public weights give the public embeddings and losses, what goes out comes back, and
what has no counterpart is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.models import MuLaN
from tandem.training.losses.contrastive import Contrastive
from tandem.weights.formats.detection import FORMATS
from tandem.weights.formats.musiclm import save_public_mulan
from tests.models.helpers import assert_same_bits, one_line_of, without
from tests.models.reference import musiclm
from tests.processes import Process

MUSICLM = FORMATS["musiclm"]

State = dict[str, Tensor]


def state_of(case: str) -> State:
    return {**musiclm.stored_constants(case), **musiclm.state_of(case)}


def loaded(case: str, folder: Path) -> MuLaN:
    """From a file, but for what it does not say."""
    torch.save(state_of(case), folder / "mulan.pt")
    read, audio = MUSICLM.load(folder / "mulan.pt"), musiclm.CASES[case].audio
    said = {"n_fft": "spec_n_fft", "hop_length": "spec_hop_length"}
    model = MuLaN.from_dict({**read.config, **{ours: audio[name] for ours, name in said.items() if name in audio}})
    model.load_state_dict(read.state_dict())
    return model.eval()


@pytest.mark.parametrize("case", musiclm.CASES)
def test_public_weights_give_the_public_embeddings_similarities_and_losses(case: str, tmp_path: Path) -> None:
    """Of the package itself: sounds that are cut to whole patches, padding within a text and a text of padding alone,
    towers of unequal depth, one or two intermediate layers, all three losses."""
    model, options = loaded(case, tmp_path), musiclm.CASES[case].mulan
    sounds, tokens = musiclm.sounds(case), musiclm.tokens(case)
    lengths = torch.full((musiclm.PAIRS,), tokens.shape[1])
    with torch.no_grad():
        out = model(sounds, tokens, lengths)
        audio, text = model.encode_audio(sounds), model.encode_text(tokens, lengths)
    expected = {name: musiclm.stored_output(case, name) for name in ("audio", "text", "similarities", "loss")}
    torch.testing.assert_close(audio, expected["audio"], rtol=0, atol=1e-5)
    torch.testing.assert_close(text, expected["text"], rtol=0, atol=1e-5)
    torch.testing.assert_close(audio @ text.T, expected["similarities"], rtol=0, atol=1e-5)
    if options.get("hierarchical_contrastive_loss"):
        for tower, latents in (("audio", out.audio), ("text", out.text)):
            layers = musiclm.stored_output(case, f"{tower} layers").transpose(0, 1).flip(1)  # ours: the highest first
            torch.testing.assert_close(latents[:, 1:], layers, rtol=0, atol=1e-5)
    else:
        assert out.audio.shape[1] == 1
    is_decoupled = options.get("decoupled_contrastive_learning", True)
    kind = "sigmoid" if "sigmoid_contrastive_loss" in options else "decoupled" if is_decoupled else "softmax"
    loss = Contrastive(kind, Process(), mask_duplicates=False)
    found = loss.value_and_gradients(*out, torch.arange(musiclm.PAIRS)).loss
    torch.testing.assert_close(found, expected["loss"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", musiclm.CASES)
def test_what_is_written_is_the_public_state_dict_with_the_arguments_that_load_it(case: str, tmp_path: Path) -> None:
    """The recipe of the fixture has loaded such files into the public classes, strictly."""
    model, (audio, text, mulan, _) = loaded(case, tmp_path), musiclm.CASES[case]
    said = save_public_mulan(model, tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert_same_bits(back, state_of(case))
    assert all(tensor.is_contiguous() for tensor in back.values())
    call = said.partition("load it into ")[2].partition(";")[0]
    read = eval(call, dict.fromkeys(("AudioSpectrogramTransformer", "TextTransformer"), dict) | {"MuLaN": _arguments})
    defaults = {"spec_n_fft": 128, "spec_win_length": 24, "spec_hop_length": 12, "patch_size": 16}
    layers = {"layers": 2, "sigmoid": 1}
    heads = {"hierarchical_contrastive_loss_layers": layers[case]} if case in layers else {}
    of_loss = {"sigmoid_contrastive_loss": False, **mulan, **heads}
    of_loss.pop("decoupled_contrastive_learning", None)  # it has no weights
    assert read == ({**defaults, **audio}, {"max_seq_len": 256, **text}, of_loss)
    assert said.endswith("; its sounds have 16000 Hz")


def _arguments(audio: dict[str, Any], text: dict[str, Any], **others: Any) -> tuple[dict[str, Any], ...]:
    return audio, text, others


PATCHES, NUMBERS, LAYERS = "audio.to_patch_tokens.2.weight", "audio_layers_indices", state_of("layers")
# The file's weights with others, and what the message has to say.
MISTAKES: list[tuple[Any, str]] = [
    (without(LAYERS, "audio.spec"), "lacks audio.spec.window"),
    ({**LAYERS, "audio.spec.window": torch.zeros(1 << 20)}, "1048576 samples"),
    ({**LAYERS, NUMBERS: torch.tensor([0, 3])}, NUMBERS), (without(LAYERS, NUMBERS), f"lacks {NUMBERS} of (2,)"),
    ({**LAYERS, PATCHES: torch.zeros(20, 32)}, "squares"),
    ({**LAYERS, "multi_layer_contrastive_learning.audio_gamma": torch.zeros(1 << 40, 1, 0)}, "1099511627776 layers"),
    (without(LAYERS, "text.transformer.layers.1.0.to_q"), "lacks text.transformer.layers.1.0.to_q.weight"),
    ({**LAYERS, "text.cls_token": torch.ones(16).long()}, "of the kind"),
    ({**LAYERS, "text.logit": torch.ones(1)}, "holds text.logit"),
    ({**LAYERS, "multi_layer_contrastive_learning.text_gamma": torch.ones(1, 16)}, "out of"),
    ({**LAYERS, "text.transformer.layers.1.0.to_q.weight": torch.ones(24, 1)}, "Sizes of tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "complaint"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_another_file_is_refused_in_one_line(content: Any, complaint: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "mulan.pt")
    assert complaint in one_line_of(MUSICLM.load, tmp_path / "mulan.pt")
