"""train_mulan.py: its schedule, its losses, its data; tiny models, one process."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tandem.data.sampling.order import split_samples
from tandem.data.sets import open_sounds
from tandem.data.tokenizers import open_tokenizer
from tandem.models import MuLaN
from tandem.training.losses.contrastive import Contrastive, ContrastiveResult
from tandem.weights.formats.towers import read_audio_tower, read_text_tower
from tandem.weights.load import load_model
from tests.models.towers import audio_folder, text_folder
from tests.scripts import (
    MULAN,
    TOKENIZER,
    VOCABULARY,
    VQGAN,
    WORDS,
    Script,
    assert_same_bits,
    checkpoint,
    final_weights,
    metrics,
    write_sounds,
)

SCRIPT = MULAN
LONGER = " with the loud noise of rain and wind and a slow high tone"


@pytest.fixture(scope="session")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """24 sounds with two captions each that no other sound has. Tests only look at them."""
    texts = [f"{word} sound\n{word}{LONGER}" for word in WORDS[:24]]
    return str(write_sounds(tmp_path_factory.mktemp("sounds"), texts))


@pytest.fixture(scope="session")
def bells(tmp_path_factory: pytest.TempPathFactory) -> str:
    """16 sounds of one caption. Tests only look at them."""
    return str(write_sounds(tmp_path_factory.mktemp("bells"), ["a bell"] * 16))


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)]


def without_own_sizes(*names: str) -> Script:
    return replace(MULAN, tiny={name: value for name, value in MULAN.tiny.items() if name not in names})


WITH_TOWERS = without_own_sizes(
    "audio_dim", "audio_depth", "text_dim", "text_depth", "n_fft", "hop_length", "n_mels", "patch_size", "tokenizer"
)
OF_TOWERS = ("--sample_rate", "16000", "--max_text_tokens", "12", "--hierarchical_layers", "1")


# A run and what it leaves.


def test_best_is_the_model_of_the_highest_recall_at_10(finished: Path) -> None:
    measured = {line["step"]: line["valid/ema/r10"] for line in metrics(finished) if "valid/ema/r10" in line}
    facts = json.loads((finished / "best" / "best.json").read_text())
    assert len(set(measured.values())) > 1 and "valid/ema/zero_shot/top1" in metrics(finished)[-1]
    best = max(measured.values())
    assert facts["value"] == pytest.approx(best, rel=1e-11), "the log has 12 digits"
    losses = {line["step"]: line["valid/ema/loss"] for line in metrics(finished) if "valid/ema/loss" in line}
    assert facts["step"] == min((step for step, value in measured.items() if value == best), key=losses.__getitem__)
    assert facts["metric"] == "valid/ema/r10"
    average, kept = checkpoint(finished, facts["step"]), dict(MuLaN.from_pretrained(finished / "best").state_dict())
    assert_same_bits(kept, {name: average[f"ema: weights/{name}"] for name in kept})


def test_where_every_recall_is_1_best_is_the_model_of_the_lowest_loss(tmp_path: Path) -> None:
    """Among 8 sounds with a caption each, every one is among the 10 nearest. The run is ended after its second
    validation, and goes on."""
    sounds = write_sounds(tmp_path / "sounds", [f"{word} sound" for word in WORDS[:20]])
    said = ["--audio_data", str(sounds), "--max_steps", "6", "--validate_every_n_steps", "1", "--learning_rate", "0.01",
            "--save_every_n_steps", "1", "--lr_warmup_steps", "0"]  # fmt: skip
    MULAN.train_stopped(1, tmp_path / "run", *said)
    run = MULAN.train(tmp_path / "run", *said)
    recalls, losses = ([line[f"valid/{name}"] for line in metrics(run)] for name in ("r10", "loss"))
    lowest = min(range(6), key=losses.__getitem__)
    assert recalls == [1.0] * 6 and lowest > 2
    facts = json.loads((run / "best" / "best.json").read_text())
    assert (facts["step"], facts["loss"]) == (lowest + 1, pytest.approx(losses[lowest], rel=1e-11))


def test_recalls_are_those_of_the_model_that_is_left_over_all_captions(sounds: str, tmp_path: Path) -> None:
    """Several captions per clip; computed once more, in one go."""
    more = ["--audio_data", sounds, "--valid_fraction", "0.5", "--max_steps", "3"]
    run = MULAN.train(tmp_path / "run", *more)
    model = MuLaN.from_pretrained(run / "model")
    words = open_tokenizer(str(TOKENIZER), 24)
    recordings = open_sounds(sounds, sample_rate=8000, clip_seconds=0.5, tokenizer=words)
    valid = split_samples(24, 0.5, 0, 42, batch_size=8).valid
    indices = [valid[i] for i in range(len(valid))]
    assert len(indices) == 12
    samples = [recordings.load(index) for index in indices]
    captions = [caption for sample in samples for caption in sample["all_captions"]]
    owners = torch.arange(12).repeat_interleave(2)
    with torch.no_grad():
        audio = model.encode_audio(torch.stack([sample["waveforms"] for sample in samples]))
        tokens, lengths = words.encode(captions)
        text = model.encode_text(tokens, torch.tensor(lengths))
    scores = text @ audio.T
    ranks = 1 + (scores > scores[torch.arange(24), owners][:, None]).sum(1)
    last = metrics(run)[-1]
    for k in (1, 5, 10):
        assert last[f"valid/text_to_audio/r{k}"] == pytest.approx((ranks <= k).double().mean().item()), k
    assert last["valid/r10"] == pytest.approx((last["valid/text_to_audio/r10"] + last["valid/audio_to_text/r10"]) / 2)
    assert not any("zero_shot" in key for key in last)  # nothing has a label here


def test_data_max_length_is_the_clip_in_samples(tmp_path: Path) -> None:
    """musiclm-pytorch's name."""
    said = MULAN.flags(tmp_path / "run", "--max_steps", "1", "--data_max_length", "4001")
    place = said.index("--clip_seconds")
    MULAN.main(*said[:place], *said[place + 2 :])
    assert MuLaN.from_pretrained(tmp_path / "run" / "model").clip_samples == 4001


# The loss and its update.


def test_sounds_of_equal_captions_are_no_negatives_unless_asked(bells: str, tmp_path: Path) -> None:
    """Where all captions are one, a clip has no negative at all, or only such."""
    said = ("--audio_data", bells, "--max_steps", "1", "--valid_fraction", "0", "--loss", "softmax")
    masked = losses(MULAN.train(tmp_path / "masked", *said))[0]
    negatives = losses(MULAN.train(tmp_path / "negatives", *said, "--duplicates", "negatives"))[0]
    assert masked == pytest.approx(0.0, abs=1e-5) and negatives > math.log(8) - 1e-3


def test_another_tokenizer_is_refused_by_its_content_and_the_same_one_is_taken_from_anywhere(
    finished: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    moved = Path(shutil.copy(TOKENIZER, tmp_path / "moved.json"))
    said = [*MULAN.eight, "--tokenizer", str(moved)]
    assert "this run is finished" in MULAN.output_of(run, *said)
    moved.write_text(moved.read_text().replace('"low"', '"LOW"'))
    other = "the checkpoint was trained with another tokenizer than --tokenizer "
    assert other + str(moved) in MULAN.refused(run, *said)
    assert other + "clip" in MULAN.refused(run, *MULAN.eight, "--tokenizer", "clip")
    line = MULAN.refused(tmp_path / "new", *said, "--init_from", str(run / "model"))
    assert "another tokenizer" in line


# The alarm.


def test_a_run_that_has_collapsed_is_told_so_after_its_warm_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an update finds is given here: where a run ends depends on the instructions of the CPU. The loss of a
    collapse stays at ln(B - 1), as users of the public trainer saw it: of 512, 6.236."""

    metrics_of: Any = Contrastive.metrics

    def collapsed(contrastive: Contrastive, result: ContrastiveResult) -> Any:
        return metrics_of(contrastive, result._replace(
            loss=torch.tensor(6.236), collapsed_loss=torch.tensor(math.log(511)),
            audio_variance=torch.tensor(0.5), text_variance=torch.tensor(1e-5),
        ))  # fmt: skip

    monkeypatch.setattr(Contrastive, "metrics", collapsed)
    said = MULAN.output_of(tmp_path, "--max_steps", "14", "--valid_fraction", "0", "--lr_warmup_steps", "6")
    warnings = [line for line in said.splitlines() if "warning" in line]
    assert [sum(word in line for line in warnings) for word in ("text side", "audio side", "6.236")] == [1, 0, 1]
    assert re.findall(r"update +6/14|warning", said)[0] != "warning"


# Towers.


@pytest.fixture
def towers(tmp_path: Path) -> tuple[str, str]:
    """A BERT with a tokenizer and an AST."""
    text_folder(tmp_path / "bert", "bert", vocab_size=len(VOCABULARY) + 3)
    shutil.copy(TOKENIZER, tmp_path / "bert" / "tokenizer.json")
    audio_folder(tmp_path / "ast")
    return str(tmp_path / "bert"), str(tmp_path / "ast")


def test_a_validation_between_two_lines_of_metrics_alarms_nobody(tmp_path: Path) -> None:
    said = "--max_steps 4 --log_every_n_steps 4 --validate_every_n_steps 3 --lr_warmup_steps 0"
    assert "warning" not in MULAN.output_of(tmp_path, *said.split())


def test_pretrained_towers_train_from_their_files_and_a_frozen_one_stays_as_it_was(
    towers: tuple[str, str], tmp_path: Path
) -> None:
    text, audio = towers
    said = (*OF_TOWERS, "--text_tower", text, "--audio_tower", audio, "--freeze_text_tower", "--max_steps", "3",
            "--save_every_n_steps", "1", "--ema_decay", "0.9")  # fmt: skip
    WITH_TOWERS.train_stopped(2, tmp_path / "run", *said)
    run = WITH_TOWERS.train(tmp_path / "run", *said)
    state = load_file(run / "model" / "model.safetensors")
    trained = {True: read_text_tower(text).weights, False: read_audio_tower(audio).weights}
    for is_frozen, weights in trained.items():
        ours = {name: state[f"{'text' if is_frozen else 'audio'}.encoder.{name}"] for name in weights}
        same = {name for name in weights if torch.equal(ours[name], weights[name])}
        assert same == (set(weights) if is_frozen else set())
    moments = {name.rpartition("exp_avg/")[2] for name in checkpoint(run, 3) if "/moments/exp_avg/" in name}
    assert moments >= {"text.norms.0.weight", "audio.norms.0.weight", "audio.encoder.layernorm.weight"}
    assert not [name for name in moments if name.startswith("text.") and "norms" not in name]
    assert (run / "model" / "tokenizer.json").read_bytes() == TOKENIZER.read_bytes()
    # Without their files, the run goes on, and the model, and one of a checkpoint, can be read.
    shutil.rmtree(text)
    shutil.rmtree(audio)
    longer = Path(shutil.copytree(run, tmp_path / "longer"))
    WITH_TOWERS.train(longer, *said, "--max_steps", "4")
    thawed = [word for word in said if word != "--freeze_text_tower"]
    assert "--freeze_text_tower was True and is now False" in WITH_TOWERS.refused(longer, *thawed, "--max_steps", "5")
    assert "--use_lion was False and is now True" in WITH_TOWERS.refused(
        longer, *said, "--max_steps", "5", "--use_lion"
    )
    assert yaml.safe_load((longer / "config.yaml").read_text())["tokenizer"] == str(Path(text, "tokenizer.json"))
    frozen = {name: weight for name, weight in state.items() if name.startswith("text.encoder.")}
    assert_same_bits({name: final_weights(longer)[name] for name in frozen}, frozen)
    assert_same_bits(MuLaN.from_pretrained(run / "model").state_dict(), state)
    online = load_model(run / "checkpoints" / "step_00000003", "online")
    assert online.config["text_tower"]["model_type"] == "bert"
    words = "text.encoder.embeddings.word_embeddings.weight"
    assert torch.equal(online.get_parameter(words), state[words])


def test_a_flag_that_a_tower_makes_idle_or_contradicts_is_refused(towers: tuple[str, str], tmp_path: Path) -> None:
    text, audio = towers
    of_text, of_audio = ("--text_tower", text), ("--audio_tower", audio)
    whole = without_own_sizes("text_dim", "text_depth", "tokenizer")
    for script, said, complaint in (
        (MULAN, of_text, "--text_dim"),
        (MULAN, ("--freeze_text_tower",), "--freeze_text_tower"),
        (whole, (*of_text, "--max_text_tokens", "13"), "12 tokens"),
        (whole, (*of_text, "--text_tower_quick_gelu"), "leave out --text_tower_quick_gelu"),
        (WITH_TOWERS, (*OF_TOWERS, *of_audio, "--sample_rate", "8000"), "16000 Hz"),
        (whole, ("--max_text_tokens", "12", *of_text, "--tokenizer", "clip"), "49408 tokens"),
    ):  # fmt: skip
        assert complaint in script.refused(tmp_path / "run", *said)
    (Path(text) / "tokenizer.json").unlink()
    assert "--tokenizer" in whole.refused(tmp_path / "run", *of_text)


# Data.


@pytest.mark.parametrize(
    ("script", "package", "extra", "said"),
    [
        (MULAN, "lion_pytorch", "lion", ["--use_lion"]),
        (MULAN, "tokenizers", "audio", []),
        (MULAN, "huggingface_hub", "hub", ["--init_from", "alice/sounds"]),
        (WITH_TOWERS, "transformers", "towers", [*OF_TOWERS, "--text_tower", "clip.pt"]),
        (VQGAN, "transformers", "towers", ["--align_with", "alice/dinov2"]),
    ],
)
def test_a_package_that_is_not_installed_is_one_line_that_says_how(
    script: Script, package: str, extra: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    line = script.refused(tmp_path / "run", *said)
    assert package.replace("_p", "-p") in line and f'pip install -e ".[{extra}]"' in line
