"""train_mulan.py --layout musiclm: what holds for the script's runs holds for this model's, and its weights go to
musiclm-pytorch and come back."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import convert
import embed
import train_mulan
from tandem.data.tokenizers import open_tokenizer
from tandem.models import MuLaN
from tandem.training.run import Run
from tandem.weights.formats.detection import FORMATS
from tandem.weights.load import load_model
from tests.scripts import MULAN, assert_same_bits, final_weights, refusal

LAYOUT = {
    "layout": "musiclm", "win_length": 96, "hierarchical_layers": 1, "attn_dropout": 0.1, "ff_dropout": 0.1,
    "text_heads": 3, "text_dim_head": 6, "ff_mult": 2,
}  # fmt: skip
without_bands = {name: value for name, value in MULAN.tiny.items() if name != "n_mels"}
SCRIPT = MUSICLM = dataclasses.replace(MULAN, tiny={**without_bands, **LAYOUT})


def converted(*said: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        convert.main([str(word) for word in said])
    return out.getvalue()


def test_a_run_becomes_the_public_file_and_comes_back(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "mulan.pt"
    said = converted("export", finished, "--to", "musiclm", file)
    assert "wrote" in said and "load it into MuLaN(AudioSpectrogramTransformer(dim=16, depth=2, patch_size=8" in said
    assert_same_bits(FORMATS["musiclm"].load(file).state_dict(), final_weights(finished))
    converted("export", finished, "--to", "musiclm", file, "--weights", "online", "--force")
    assert_same_bits(FORMATS["musiclm"].load(file).state_dict(), load_model(finished, "online").state_dict())
    assert "musiclm-pytorch 0.2.8 file" in converted("inspect", file)
    converted("export", file, "--to", "model", tmp_path / "model")
    assert_same_bits(
        MuLaN.from_pretrained(tmp_path / "model").state_dict(), load_model(finished, "online").state_dict()
    )
    early = finished / "checkpoints" / "step_00000002"
    converted("export", early, "--to", "model", tmp_path / "early")
    assert (tmp_path / "early" / "tokenizer.json").exists()


def test_a_training_starts_from_a_public_file_whatever_it_does_not_say(finished: Path, tmp_path: Path) -> None:
    """The run adopts what the file says, and says what it assumes."""
    file = tmp_path / "mulan.pt"
    converted("export", finished, "--to", "musiclm", file)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run = MUSICLM.start_from(file, tmp_path / "run", "--tokenizer", str(MUSICLM.tiny["tokenizer"]))
    assert "--layout musiclm" in out.getvalue() and "assumed" in out.getvalue()
    assert yaml.safe_load((run / "config.yaml").read_text()).items() >= {"win_length": 96, "n_fft": 128}.items()
    torch.testing.assert_close(final_weights(run), final_weights(finished))
    line = MUSICLM.refused(tmp_path / "other", "--init_from", str(file), "--win_length", "90")
    assert str(file) in line and "--win_length 96" in line


def test_a_tandem_model_is_no_musiclm_model(finished: Path, tmp_path: Path) -> None:
    tandem = MULAN.train(tmp_path / "tandem", "--max_steps", "1")
    line = refusal(convert.main, "export", tandem, "--to", "musiclm", tmp_path / "mulan.pt")
    assert "--layout tandem" in line
    assert "--layout tandem" in MUSICLM.refused(tmp_path / "run", "--init_from", str(tandem))
    assert "--layout was tandem and is now musiclm" in MUSICLM.refused(tandem)
    for flag, value in (("audio_tower", "files/"), ("n_mels", "50")):
        assert flag in MUSICLM.refused(tmp_path / "x", f"--{flag}", value)


def test_texts_have_no_marks_of_start_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in training nor in a search: x-clip, the tokenizer of the public package, makes none."""
    seen: list[Tensor] = []

    def watch(run: Run, event: str, batch: Any) -> None:
        if event == "update":
            seen.append(batch["tokens"])

    with Run.watched(watch):
        run = MUSICLM.train(tmp_path / "run", "--tokenizer", "clip", "--max_steps", "1")
    assert seen and max(int(tokens.max()) for tokens in seen) < 49406
    texts: list[Tensor] = []
    encode = MuLaN.encode_text
    monkeypatch.setattr(MuLaN, "encode_text", lambda model, tokens, n: texts.append(tokens) or encode(model, tokens, n))
    embed.main(["--model", str(run), "--audio", "demo:tones:8", "--output", str(tmp_path / "index")])
    with contextlib.redirect_stdout(io.StringIO()):
        embed.main(["--model", str(run), "--index", str(tmp_path / "index"), "--query", "a photo of a cat"])
    assert [tokens.tolist() for tokens in texts] == [[[320, 1125, 539, 320, 2368]]]


def test_the_configuration_builds_the_public_defaults() -> None:
    """Facts: AudioSpectrogramTransformer.__init__, TextTransformer.__init__, the README's sizes, and MuLaNTrainer."""
    args = MULAN.config("--config", str(MULAN.configs / "musiclm.yaml"))
    with torch.device("meta"):
        model = train_mulan.build_model(args, open_tokenizer("clip", args.max_text_tokens, add_special_tokens=False))
    defaults = {"n_fft": 128, "win_length": 24, "hop_length": 12, "patch_size": 16, "patch_dropout": 0.25,
                "audio_dim": 512, "audio_depth": 6, "text_dim": 512, "text_depth": 6, "heads": 8, "dim_head": 64,
                "vocab_size": 49408, "max_text_tokens": 256, "dim_latent": 128, "hierarchical_layers": 0,
                "layout": "musiclm", "init_logit_scale": math.log(10.0)}  # fmt: skip
    assert model.config.items() >= defaults.items()
    trainer = {"learning_rate": 3e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "max_grad_norm": 0.5,
               "use_lion": False, "lr_schedule": "constant", "lr_warmup_steps": 0,
               "duplicates": "negatives"}  # fmt: skip
    assert vars(args).items() >= trainer.items()


def test_the_layout_has_its_own_windows_unless_one_is_given_and_refuses_what_it_fixes(tmp_path: Path) -> None:
    def windows(*said: str) -> tuple[int, int, int]:
        args = MULAN.parsed("--layout", "musiclm", *said)
        return args.n_fft, args.win_length, args.hop_length

    assert windows() == (128, 24, 12) and windows("--hop_length", "100") == (1024, 1024, 100)
    fixed = {"spectrogram": "log_mel", "spectrogram_padding": "silence", "hierarchical_spacing": "last"}
    for flag, wrong in fixed.items():
        assert f"{flag} {wrong}: layout musiclm" in MUSICLM.refused(tmp_path, f"--{flag}", wrong)
