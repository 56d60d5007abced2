"""train_mulan.py from the command line to the files it leaves; tiny models, one process."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import tokenizers
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

import data
import train_mulan
from models import MuLaN
from training.measures.embedder import Embedder

ROOT = Path(__file__).resolve().parents[1]
TINY = {
    "audio_data": "demo:tones:64", "sample_rate": 8000, "clip_seconds": 0.5, "n_fft": 256, "hop_length": 64,
    "n_mels": 32, "audio_dim": 16, "audio_depth": 2, "text_dim": 16, "text_depth": 2, "heads": 2, "dim_head": 8,
    "dim_latent": 8, "patch_size": 8, "max_text_tokens": 24, "batch_size": 8, "lr_warmup_steps": 4,
    "valid_fraction": 0.2, "num_workers": 0, "log_every_n_steps": 1, "validate_every_n_steps": 0,
    "sample_every_n_steps": 0, "save_every_n_steps": 0,
}  # fmt: skip
N_TRAIN = 51  # of the 64 tones; 13 are for validation
# The first 24 of them name a sound each.
WORDS = [
    "violin", "flute", "drum", "harp", "bell", "voice", "piano", "organ", "guitar", "trumpet", "cello", "oboe", "horn",
    "tuba", "whistle", "clap", "siren", "rain", "wind", "thunder", "dog", "cat", "bird", "engine", "a", "the", "and",
    "of", "with", "sound", "recording", "loud", "soft", "tone", "wave", "noise", "slow", "fast", "high", "low",
]  # fmt: skip


LONGER = " with the loud noise of rain and wind and a slow high tone"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device whose numbers the tests know."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer.json of a few words, between marks of start and end."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "words.json"
    made.save(str(path))
    return str(path)


@pytest.fixture(scope="session")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> str:
    """24 sounds of any rate, length and number of channels, with two captions each that no other sound has. Tests only
    look at it."""
    return write_sounds(tmp_path_factory.mktemp("sounds"), [f"{word} sound\n{word}{LONGER}" for word in WORDS[:24]])


def write_sounds(folder: Path, texts: Sequence[str]) -> str:
    """A folder of sounds, each with its text beside it."""
    folder.mkdir(exist_ok=True)
    noise = np.random.default_rng(0)
    for number, text in enumerate(texts):
        rate, channels = (8000, 11025, 44100)[number % 3], 1 + number % 4
        frames = int(rate * (0.1 + 0.05 * number))
        phases = np.arange(frames)[:, None] * (2 * np.pi * 200 * 1.1**number / rate)
        waves = 0.3 * np.sin(phases) + noise.normal(0, 0.02, (frames, channels))
        soundfile.write(folder / f"{number:02d}.wav", waves, rate)
        (folder / f"{number:02d}.txt").write_text(text)
    return str(folder)


def flags(output_dir: Path, *more: str) -> list[str]:
    tiny = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    return [*tiny, "--output_dir", str(output_dir), *more]


def parsed(*more: str) -> argparse.Namespace:
    return train_mulan.build_parser().parse(["--audio_data", "sounds", *more])


def train(output_dir: Path, *more: str) -> Path:
    train_mulan.main(flags(output_dir, *more))
    return output_dir


def refused(capsys: pytest.CaptureFixture[str], output_dir: Path, *more: str) -> str:
    """The one line of an error, which ends the process with code 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as raised:
        train(output_dir, *more)
    assert raised.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train_mulan.py: error: ")
    return line


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(output_dir)]


def without_clocks(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "samples_per_second")} for line in lines]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def checkpoint(output_dir: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by file and name."""
    folder = output_dir / "checkpoints" / f"step_{step:08d}"
    return {f"{path.name}: {k}": v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def best_facts(output_dir: Path) -> dict[str, Any]:
    return dict(json.loads((output_dir / "best" / "best.json").read_text()))


# Arguments.


def test_the_flags_of_the_public_trainer_are_understood() -> None:
    """musiclm-pytorch's MuLaNTrainer, and its defaults."""
    args = parsed("--num_train_steps", "7", "--lr", "1e-3", "--betas", "0.8,0.95", "--max_grad_norm", "1",
                  "--valid_frac", "0.1", "--grad_accum_every", "4", "--save_model_every", "9", "--split_seed", "3",
                  "--data_max_length", "8000", "--use_lion")  # fmt: skip
    assert (args.max_steps, args.learning_rate, args.betas, args.max_grad_norm) == (7, 1e-3, (0.8, 0.95), 1.0)
    assert (args.valid_fraction, args.grad_accum_steps, args.save_every_n_steps) == (0.1, 4, 9)
    assert (args.split_seed, args.data_max_length, args.use_lion) == (3, 8000, True)
    args = parsed()
    assert (args.learning_rate, args.betas, args.max_grad_norm, args.valid_fraction) == (3e-4, (0.9, 0.99), 0.5, 0.05)
    assert (args.split_seed, args.save_every_n_steps, args.grad_accum_steps) == (42, 1000, 1)
    assert (args.audio_dim, args.audio_depth, args.text_dim, args.text_depth) == (512, 6, 512, 6)
    assert (args.dim_latent, args.heads, args.dim_head, args.patch_dropout, args.loss) == (
        128,
        8,
        64,
        0.25,
        "decoupled",
    )


def test_the_learning_rate_rises_to_the_end_of_the_warm_up_and_falls_along_a_cosine_to_0() -> None:
    args = parsed("--learning_rate", "2", "--lr_warmup_steps", "10")
    rates = [train_mulan.learning_rate(step, 110, args) for step in range(111)]
    assert rates[:10] == pytest.approx([0.2 * (n + 1) for n in range(10)])
    assert rates[10] == pytest.approx(2.0) and rates[60] == pytest.approx(1.0) and rates[110] == pytest.approx(0.0)
    assert rates[35] == pytest.approx(1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(("total", "highest"), [(1, 0), (2, 1), (9, 4), (600, 300)])
def test_a_run_shorter_than_its_warm_up_still_reaches_the_highest_rate(total: int, highest: int) -> None:
    args = parsed("--learning_rate", "2", "--lr_warmup_steps", "500")
    rates = [train_mulan.learning_rate(step, total, args) for step in range(total)]
    assert max(rates) == rates[highest] == pytest.approx(2.0)


def test_without_sounds_the_demonstration_runs() -> None:
    def parse(*said: str) -> argparse.Namespace:
        return train_mulan.build_parser().parse(said, demonstration=train_mulan.DEMO_CONFIG, data_flag="audio_data")

    args = parse()
    assert args.audio_data.startswith("demo:tones") and args.output_dir == "runs/mulan-demo"
    args = parse("--audio_data", "sounds")
    assert args.output_dir == "runs/mulan" and args.audio_dim == 512


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "mulan").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_understood_and_builds_its_model(path: Path) -> None:
    args = train_mulan.build_parser().parse(["--config", str(path)])
    with torch.device("meta"):  # shapes alone
        model = train_mulan.build_model(args, data.open_tokenizer("clip", args.max_text_tokens))
    assert (model.config["audio_dim"], model.config["n_mels"]) == (args.audio_dim, args.n_mels)
    assert model.noise_size > 4


def test_there_are_configs_for_the_demonstration_the_public_trainer_and_musiccaps() -> None:
    assert {"demo", "base", "musiccaps"} <= {path.stem for path in (ROOT / "configs" / "mulan").iterdir()}


# A run and what it leaves.

EIGHT = (
    "--max_steps", "8", "--validate_every_n_steps", "2", "--sample_every_n_steps", "4", "--save_every_n_steps", "2",
    "--keep_n_checkpoints", "9", "--ema_decay", "0.9",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tokenizer: str) -> Path:
    """Eight updates with an average of the weights, validated at each second. Tests only look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return train(tmp_path_factory.mktemp("run") / "run", *EIGHT, "--tokenizer", tokenizer)


def test_the_log_tells_loss_temperature_and_spread_of_every_update(finished: Path) -> None:
    lines = metrics(finished)
    assert [line["step"] for line in lines] == list(range(1, 9))
    always = {
        "samples", "epoch", "loss", "lr", "temperature", "audio_variance", "text_variance", "grad_norm",
        "skipped_updates", "bad_samples", "samples_per_second", "seconds",
    }  # fmt: skip
    args = parsed("--lr_warmup_steps", "4")
    for line in lines:
        assert always <= set(line)
        assert line["lr"] == train_mulan.learning_rate(line["step"] - 1, 8, args)
        assert 0 < line["audio_variance"] < 1 and 0 < line["text_variance"] < 1
        assert line["skipped_updates"] == 0 and line["epoch"] == pytest.approx(8 * line["step"] / N_TRAIN, abs=1e-6)
    assert lines[0]["temperature"] == pytest.approx(10.0)


def test_validation_really_runs(finished: Path) -> None:
    """It never did in the public trainer."""
    measured = {"loss", "r10", "zero_shot/top1", "zero_shot/chance_top1"} | {
        f"{way}/{name}"
        for way in ("text_to_audio", "audio_to_text")
        for name in ("r1", "r5", "r10", "median_rank", "map10", "chance_r1")
    }
    both = {f"{which}/{name}" for which in ("valid", "valid/ema") for name in measured}
    for line in metrics(finished):
        assert {key for key in line if key.startswith("valid")} == (both if line["step"] % 2 == 0 else set())
    assert len({line["valid/loss"] for line in metrics(finished) if "valid/loss" in line}) == 4  # of other weights


def test_it_saves_at_the_end_and_not_at_step_0(finished: Path, tmp_path: Path, tokenizer: str) -> None:
    """The public trainer did the opposite."""
    names = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert names == ["latest", *(f"step_{step:08d}" for step in (2, 4, 6, 8))]
    run = train(tmp_path / "run", "--max_steps", "3", "--save_every_n_steps", "1000", "--tokenizer", tokenizer)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", "step_00000003"]
    assert (run / "model" / "model.safetensors").exists()


def test_pictures_are_drawn_where_asked_and_at_the_end(finished: Path) -> None:
    names = sorted(path.name for path in (finished / "samples").iterdir())
    assert names == ["step_00000004.png", "step_00000008.png"]
    with Image.open(finished / "samples" / names[0]) as picture:
        assert len(set(picture.convert("L").tobytes())) > 20  # something is in it


def test_the_model_that_is_left_loads_with_its_tokenizer_and_is_the_average(finished: Path, tokenizer: str) -> None:
    assert (finished / "model" / "tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()
    assert (finished / "best" / "tokenizer.json").read_bytes() == Path(tokenizer).read_bytes()
    average = load_file(finished / "checkpoints" / "step_00000008" / "ema.safetensors")
    online = load_file(finished / "checkpoints" / "step_00000008" / "engine.safetensors")
    kept = MuLaN.from_pretrained(finished / "model").state_dict()
    for name, tensor in kept.items():
        assert torch.equal(tensor, average[f"weights/{name}"]), name
    assert not torch.equal(
        kept["audio_latents.projections.0.weight"], online["weights/audio_latents.projections.0.weight"]
    )


def test_best_is_the_model_of_the_highest_recall_at_10(finished: Path) -> None:
    measured = {line["step"]: line["valid/ema/r10"] for line in metrics(finished) if "valid/ema/r10" in line}
    facts = best_facts(finished)
    assert len(set(measured.values())) > 1
    assert facts["value"] == max(measured.values()) == measured[facts["step"]]
    assert facts["step"] == min(step for step, value in measured.items() if value == facts["value"])
    assert facts["metric"] == "valid/ema/r10"
    average = load_file(finished / "checkpoints" / f"step_{facts['step']:08d}" / "ema.safetensors")
    for name, tensor in MuLaN.from_pretrained(finished / "best").state_dict().items():
        assert torch.equal(tensor, average[f"weights/{name}"]), name


def test_a_model_of_clips_tokens_needs_no_file_of_them(tmp_path: Path) -> None:
    run = train(tmp_path / "run", "--max_steps", "2")
    assert MuLaN.from_pretrained(run / "model").config["vocab_size"] == 49408
    assert not (run / "model" / "tokenizer.json").exists()
    assert best_facts(run)["metric"] == "valid/r10"


def test_recalls_are_those_of_the_model_that_is_left_over_all_captions(
    sounds: str, tokenizer: str, tmp_path: Path
) -> None:
    """Several captions per clip; computed once more, in one go."""
    more = ["--audio_data", sounds, "--tokenizer", tokenizer, "--valid_fraction", "0.5", "--max_steps", "3"]
    run = train(tmp_path / "run", *more)
    model = MuLaN.from_pretrained(run / "model")
    recordings = data.open_sounds(sounds, sample_rate=8000, clip_seconds=0.5)
    words = data.open_tokenizer(tokenizer, 24)
    _, valid = data.split(24, 0.5, 42, at_least=8)
    indices = [valid[i] for i in range(len(valid))]
    assert len(indices) == 12
    captions = [caption for index in indices for caption in recordings.captions(index)]
    owners = torch.arange(12).repeat_interleave(2)
    with torch.no_grad():
        audio = model.encode_audio(torch.stack([recordings.load(index) for index in indices]))
        tokens, lengths = words.encode(captions)
        text = model.encode_text(tokens, torch.tensor(lengths))
    scores = text @ audio.T
    ranks = 1 + (scores > scores[torch.arange(24), owners][:, None]).sum(1)
    both = scores.T.masked_fill(owners != torch.arange(12)[:, None], -2).amax(1)  # of the better of two captions
    of_audio = 1 + ((both[:, None] < scores.T) & (owners != torch.arange(12)[:, None])).sum(1)
    last = metrics(run)[-1]
    for way, found in (("text_to_audio", ranks), ("audio_to_text", of_audio)):
        for k in (1, 5, 10):
            assert last[f"valid/{way}/r{k}"] == pytest.approx((found <= k).double().mean().item()), (way, k)
    assert last["valid/r10"] == pytest.approx((last["valid/text_to_audio/r10"] + last["valid/audio_to_text/r10"]) / 2)
    assert not any("zero_shot" in key for key in last)  # nothing has a label here


def test_one_epoch_is_the_number_of_sounds_divided_by_the_batch(tmp_path: Path, tokenizer: str) -> None:
    """In the public trainer it was as many updates as there are sounds."""
    run = train(tmp_path / "run", "--epochs", "1", "--tokenizer", tokenizer, "--log_every_n_steps", "3")
    last = metrics(run)[-1]
    assert last["step"] == math.ceil(N_TRAIN / 8) == 7
    assert last["epoch"] == pytest.approx(1.0, abs=8 / N_TRAIN)


def test_without_validation_all_sounds_are_trained_on_and_nothing_is_validated(tmp_path: Path, tokenizer: str) -> None:
    run = train(tmp_path / "run", "--valid_frac", "0", "--max_steps", "2", "--validate_every_n_steps", "1",
                "--tokenizer", tokenizer)  # fmt: skip
    for line in metrics(run):
        assert line["epoch"] == pytest.approx(line["samples"] / 64)
        assert not [key for key in line if key.startswith("valid")]
    assert (run / "samples" / "step_00000002.png").exists() and not (run / "best").exists()


def test_config_yaml_alone_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    train_mulan.main(["--config", str(finished / "config.yaml"), "--output_dir", str(tmp_path / "run")])
    assert without_clocks(metrics(tmp_path / "run")) == without_clocks(metrics(finished))
    assert files(tmp_path / "run" / "model") == files(finished / "model")


def test_data_max_length_is_the_clip_in_samples(tmp_path: Path, tokenizer: str) -> None:
    """musiclm-pytorch's name; what config.yaml then says of both is read back."""
    said = list(flags(tmp_path / "run", "--tokenizer", tokenizer, "--max_steps", "1"))
    place = said.index("--clip_seconds")
    del said[place : place + 2]
    train_mulan.main([*said, "--data_max_length", "4001"])
    assert MuLaN.from_pretrained(tmp_path / "run" / "model").clip_samples == 4001
    train_mulan.main(["--config", str(tmp_path / "run" / "config.yaml"), "--output_dir", str(tmp_path / "again")])
    assert MuLaN.from_pretrained(tmp_path / "again" / "model").clip_samples == 4001


# The loss and its update.


def formula(audio: Tensor, text: Tensor, kind: str, temperature: float = 10.0, bias: float = -10.0) -> float:
    """Of unit vectors (n, d), no two captions alike."""
    s = temperature * audio.double() @ text.double().T
    n, right = len(s), s.diagonal()
    if kind == "sigmoid":
        return -float(functional.logsigmoid((2 * torch.eye(n) - 1) * (s + bias)).sum() / n)
    others = s.masked_fill(torch.eye(n, dtype=torch.bool), -math.inf) if kind == "decoupled" else s
    return float((-right + (others.logsumexp(1) + others.logsumexp(0)) / 2).mean())


@pytest.mark.parametrize("kind", ["decoupled", "softmax", "sigmoid"])
def test_the_first_loss_is_the_formulas(
    kind: str, sounds: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    forward = MuLaN.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        seen.append((out.audio[:, 0].detach(), out.text[:, 0].detach()))
        return out

    monkeypatch.setattr(MuLaN, "forward", watched)
    run = train(tmp_path / "run", "--audio_data", sounds, "--tokenizer", tokenizer, "--loss", kind, "--max_steps", "1",
                "--valid_fraction", "0")  # fmt: skip
    assert losses(run)[0] == pytest.approx(formula(*seen[0], kind), rel=1e-5)


def test_sounds_of_equal_captions_are_no_negatives_unless_asked(tmp_path: Path, tokenizer: str) -> None:
    """Where all captions are one, a clip has no negative at all, or only such."""
    everything = write_sounds(tmp_path / "sounds", ["a bell"] * 16)
    said = ("--audio_data", everything, "--tokenizer", tokenizer, "--max_steps", "1", "--valid_fraction", "0",
            "--loss", "softmax")  # fmt: skip
    masked = losses(train(tmp_path / "masked", *said))[0]
    negatives = losses(train(tmp_path / "negatives", *said, "--duplicates", "negatives"))[0]
    assert masked == pytest.approx(0.0, abs=1e-5) and negatives > math.log(8) - 1e-3


def test_accumulation_sees_all_negatives_of_the_batch(tmp_path: Path, tokenizer: str) -> None:
    """Losses of two micro-batches are those of one (GradCache), and every gradient is, that of the temperature too."""
    said = ("--max_steps", "6", "--tokenizer", tokenizer, "--patch_dropout", "0.4")
    whole, parts = (metrics(train(tmp_path / n, *said, "--grad_accum_steps", n)) for n in ("1", "2"))
    for ours, expected in zip(parts, whole, strict=True):
        for key in ("loss", "temperature", "grad_norm"):
            rounding = 1e-6 if ours["step"] == 1 or key != "grad_norm" else 1e-4
            assert ours[key] == pytest.approx(expected[key], rel=rounding), (key, ours["step"])
    assert whole[-1]["temperature"] != whole[0]["temperature"]


def test_accumulation_takes_a_micro_batch_at_a_time(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    forward = MuLaN.forward

    def watched(model: MuLaN, waveforms: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(waveforms))
        return forward(model, waveforms, *args, **kwargs)

    monkeypatch.setattr(MuLaN, "forward", watched)
    train(tmp_path, "--max_steps", "1", "--valid_fraction", "0", "--tokenizer", tokenizer, "--grad_accum_every", "4")
    assert sizes == [2] * 8  # once without a graph, once with one


def test_validation_and_pictures_take_no_more_sounds_at_a_time_than_training(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who accumulates because memory is short must not run out of it at the first validation."""
    sizes: list[int] = []
    encode = MuLaN._audio_latents

    def counted(model: MuLaN, waveforms: Tensor, noise: Tensor | None) -> Tensor:
        sizes.append(len(waveforms))
        return encode(model, waveforms, noise)

    monkeypatch.setattr(MuLaN, "_audio_latents", counted)
    train(tmp_path, "--max_steps", "1", "--tokenizer", tokenizer, "--grad_accum_steps", "4", "--valid_fraction", "0.5")
    assert len(sizes) > 8 and max(sizes) == 2  # a batch of 8 in four parts


def test_thousands_of_sentences_are_embedded_a_few_hundred_at_a_time(tokenizer: str) -> None:
    sizes: list[int] = []

    class Model:
        def encode_text(self, tokens: Tensor, lengths: Tensor) -> Tensor:
            sizes.append(len(tokens))
            return tokens[:, :2].float()

    words = data.open_tokenizer(tokenizer, 24)
    embedder = Embedder(Model(), words, 2, torch.device("cpu"))
    texts = ["a low noise", "a high sine"] * 500
    assert torch.equal(embedder.texts(texts), words.encode(texts)[0][:, :2].float())
    assert max(sizes) <= 256


def test_another_tokenizer_is_refused_by_its_content_and_the_same_one_is_taken_from_anywhere(
    finished: Path, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    moved = shutil.copy(tokenizer, tmp_path / "moved.json")
    said = list(flags(run, *EIGHT))
    train_mulan.main([*said, "--tokenizer", str(moved)])
    assert "this run is finished" in capsys.readouterr().err
    Path(moved).write_text(Path(tokenizer).read_text().replace('"low"', '"LOW"'))
    for more, words in (
        (said, "the checkpoint was trained with another tokenizer"),
        (
            list(flags(tmp_path / "new", *EIGHT, "--init_from", str(run / "model"))),
            "was trained with another tokenizer",
        ),
    ):
        with pytest.raises(SystemExit) as left:
            train_mulan.main([*more, "--tokenizer", str(moved)])
        assert left.value.code == 2
        assert words in capsys.readouterr().err


def test_hierarchical_layers_add_a_loss_each_with_its_temperature(tmp_path: Path, tokenizer: str) -> None:
    said = ("--max_steps", "2", "--tokenizer", tokenizer)
    plain = losses(train(tmp_path / "plain", *said))
    run = train(tmp_path / "run", *said, "--hierarchical_layers", "1")
    assert losses(run)[0] > 1.5 * plain[0]
    assert MuLaN.from_pretrained(run / "model").tau.shape == (2,)


@pytest.mark.parametrize("depths", [("1", "1"), ("1", "3")])
def test_towers_of_depth_1_train(depths: tuple[str, str], tmp_path: Path, tokenizer: str) -> None:
    """The public model crashed."""
    run = train(tmp_path, "--audio_depth", depths[0], "--text_depth", depths[1], "--max_steps", "2",
                "--tokenizer", tokenizer)  # fmt: skip
    assert all(math.isfinite(loss) for loss in losses(run))


def test_the_temperature_stays_below_100_and_the_loss_finite(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public one was not clamped: its exponential overflowed, and every weight was NaN."""
    build = train_mulan.build_model

    def hot(*args: Any) -> MuLaN:
        model = build(*args)
        with torch.no_grad():
            model.tau.fill_(200.0)  # exp(200) is not in fp32
        return model

    monkeypatch.setattr(train_mulan, "build_model", hot)
    run = train(tmp_path, "--max_steps", "3", "--tokenizer", tokenizer)
    for line in metrics(run):
        assert line["temperature"] == pytest.approx(100.0) and math.isfinite(line["loss"])
        assert math.isfinite(line["grad_norm"]) and line["skipped_updates"] == 0


def test_lion_moves_every_weight_by_the_learning_rate(tmp_path: Path, tokenizer: str) -> None:
    """By its sign, after the decay of matrices: with AdamW a small gradient makes for another step."""
    said = ("--max_steps", "1", "--tokenizer", tokenizer, "--learning_rate", "0.001", "--weight_decay", "0.5")
    run = train(tmp_path / "run", *said, "--use_lion")
    args = train_mulan.build_parser().parse(flags(tmp_path, *said))
    before = train_mulan.build_model(args, data.open_tokenizer(tokenizer, 24)).state_dict()
    weights = load_file(run / "model" / "model.safetensors")
    moved = 0
    for name, weight in before.items():
        decayed = weight * (1 - 0.001 * 0.5) if weight.ndim >= 2 else weight
        by = (weights[name] - decayed).abs()
        assert torch.all((by - 0.001).abs().minimum(by) < 2e-6), name
        moved += int((by > 5e-4).sum())
    assert moved > 1000


def test_betas_reach_the_optimizer(tmp_path: Path, tokenizer: str) -> None:
    """After one update the mean of gradients is (1 - beta1) times the gradient."""
    said = ("--max_steps", "1", "--tokenizer", tokenizer)
    means = []
    for betas in ("0.9,0.99", "0.5,0.99"):
        run = train(tmp_path / betas, *said, "--betas", betas)
        (mean,) = (v for k, v in checkpoint(run, 1).items() if "tau" in k and "exp_avg" in k and "sq" not in k)
        means.append(mean)
    torch.testing.assert_close(means[1], 5 * means[0])


def test_low_precision_keeps_the_loss_near(tmp_path: Path, tokenizer: str) -> None:
    said = ("--max_steps", "2", "--tokenizer", tokenizer)
    exact, rounded = (losses(train(tmp_path / p, *said, "--precision", p)) for p in ("fp32", "bf16"))
    assert rounded[0] != exact[0] and rounded == pytest.approx(exact, rel=0.05)


# The alarm.


def test_a_run_whose_captions_are_all_one_is_told_that_it_has_collapsed(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss stays at ln(B - 1), as users of the public trainer saw it: of 512, 6.236."""
    everything = write_sounds(tmp_path / "sounds", ["a bell"] * 16)
    run = train(tmp_path / "run", "--audio_data", everything, "--tokenizer", tokenizer, "--valid_fraction", "0",
                "--max_steps", "10", "--lr_warmup_steps", "1", "--duplicates", "negatives", "--init_temperature", "1",
                "--learning_rate", "1e-5")  # fmt: skip
    said = capsys.readouterr().err
    assert "warning: the text embeddings are almost one and the same vector" in said
    assert losses(run)[-1] == pytest.approx(math.log(7), rel=0.01)
    assert "has not left 1.946" in said
    assert said.count("the text side has collapsed") == said.count("nothing is learned") == 1


def test_the_alarm_begins_after_the_warm_up_of_a_short_run_too(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its warm-up is cut to half of it, however many updates were asked for."""
    everything = write_sounds(tmp_path / "sounds", ["a bell"] * 16)
    train(tmp_path / "run", "--audio_data", everything, "--tokenizer", tokenizer, "--valid_fraction", "0",
          "--max_steps", "6", "--lr_warmup_steps", "500", "--duplicates", "negatives")  # fmt: skip
    assert "the text side has collapsed" in capsys.readouterr().err


def test_a_healthy_run_is_not_alarmed(tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, "--max_steps", "8", "--lr_warmup_steps", "1", "--tokenizer", tokenizer)
    assert "warning" not in capsys.readouterr().err


# Resuming.


class KilledError(BaseException):
    """Takes the place of SIGKILL: nobody catches it, and nothing is written after it."""


def raise_killed() -> None:
    raise KilledError


def at_update(step: int, patch: pytest.MonkeyPatch, how: Callable[[], None]) -> None:
    """Do something in the middle of update number ``step`` (from 0)."""
    schedule = train_mulan.learning_rate

    def learning_rate(now: int, total: int, args: argparse.Namespace) -> float:
        if now == step:
            how()
        return schedule(now, total, args)

    patch.setattr(train_mulan, "learning_rate", learning_rate)


def killed(step: int, output_dir: Path, *more: str) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        at_update(step, patch, raise_killed)
        train(output_dir, *more)


def asked_to_stop(step: int, output_dir: Path, *more: str) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as raised:
        at_update(step, patch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        train(output_dir, *more)
    assert raised.value.code == 75
    assert (output_dir / "checkpoints" / f"step_{step + 1:08d}").is_dir()


@pytest.mark.parametrize(
    ("interrupt", "step"), [(killed, 5), (asked_to_stop, 3), (asked_to_stop, 4)], ids=["killed", "stop4", "stop5"]
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    interrupt: Callable[..., None], step: int, finished: Path, tokenizer: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Weights, moments, average, clock, generators, the best model and every line of the log; musiclm-pytorch's
    checkpoint has neither steps nor generators. Update 4 is one with a validation, 5 one without."""
    said = (*EIGHT, "--tokenizer", tokenizer)
    interrupt(step, tmp_path / "run", *said)
    capsys.readouterr()
    run = train(tmp_path / "run", *said)
    assert "resumed from" in capsys.readouterr().err
    ours, expected = checkpoint(run, 8), checkpoint(finished, 8)
    assert set(ours) == set(expected)
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []
    assert without_clocks(metrics(run)) == without_clocks(metrics(finished))
    for folder in ("model", "best", "samples"):
        assert files(run / folder) == files(finished / folder), folder


def test_a_checkpoint_holds_the_clock_the_moments_and_the_generators(finished: Path) -> None:
    """The public trainer's holds none of them."""
    text = " ".join(checkpoint(finished, 8))
    for part in ("engine", "ema", "random", "exp_avg_sq", "weights/tau"):
        assert part in text, part
    state = (finished / "checkpoints" / "step_00000008" / "state.json").read_text()
    assert '"samples": 64' in state


def test_the_best_model_of_the_validation_at_which_a_run_was_stopped_is_kept(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is older than that validation: whoever asks for a stop may not wait."""
    values = iter([0.2, 0.9, 0.5, 0.6])  # of updates 2, 4, 6, 8
    monkeypatch.setattr(train_mulan, "evaluate", lambda *_: {"r10": next(values)})
    said = ("--max_steps", "8", "--validate_every_n_steps", "2", "--tokenizer", tokenizer)
    asked_to_stop(3, tmp_path, *said)
    assert best_facts(tmp_path)["step"] == 4
    best = files(tmp_path / "best")
    train(tmp_path, *said)
    assert [line["valid/r10"] for line in metrics(tmp_path) if "valid/r10" in line] == [0.2, 0.9, 0.5, 0.6]
    assert (best_facts(tmp_path)["step"], best_facts(tmp_path)["value"]) == (4, 0.9)
    assert files(tmp_path / "best") == best


def test_a_finished_run_says_so_and_changes_nothing(
    finished: Path, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nor does it ask anything: the public trainer asked, on every process, whether to delete what is there."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: pytest.fail("a folder was deleted"))
    run = tmp_path / "run"
    shutil.copytree(finished, run, symlinks=True)
    before = files(run)
    train(run, *EIGHT, "--tokenizer", tokenizer)
    said = capsys.readouterr().err
    assert "this run is finished" in said and str(run / "model") in said and "finished:" not in said
    assert files(run) == before


@pytest.mark.parametrize(("name", "now"), [("dim_latent", "4"), ("audio_depth", "3"), ("max_text_tokens", "16")])
def test_another_model_is_refused_on_resume(
    name: str, now: str, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--max_steps", "1", "--tokenizer", tokenizer)
    line = refused(capsys, tmp_path, "--max_steps", "2", "--tokenizer", tokenizer, f"--{name}", now)
    assert f"--{name} was {TINY[name]} and is now {now}" in line


def test_another_tokenizer_is_refused_on_resume(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--max_steps", "1", "--tokenizer", tokenizer)
    line = refused(capsys, tmp_path, "--max_steps", "2", "--tokenizer", "clip")
    assert "the checkpoint was trained with another tokenizer than --tokenizer clip" in line


def test_training_starts_from_the_weights_of_another_run(finished: Path, tokenizer: str, tmp_path: Path) -> None:
    run = train(tmp_path, "--max_steps", "1", "--tokenizer", tokenizer, "--init_from", str(finished / "model"),
                "--learning_rate", "1e-30", "--clip_seconds", "0.6", "--patch_dropout", "0")  # fmt: skip
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, finished))
    torch.testing.assert_close(ours, theirs)


def test_init_from_another_model_names_what_differs(
    finished: Path, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--tokenizer", tokenizer, "--init_from", str(finished / "model"))
    assert "dim_latent 8" in refused(capsys, tmp_path, *more, "--dim_latent", "4")


# Data.


def test_sounds_of_any_rate_and_channels_train_and_none_cuts_the_texts(
    sounds: str, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stereo broke the public trainer's batches; and what cut sounds to the shortest cut their tokens too."""
    seen: set[tuple[int, ...]] = set()
    forward = MuLaN.forward

    def watched(model: MuLaN, waveforms: Tensor, tokens: Tensor, lengths: Tensor, noise: Any = None) -> Any:
        assert waveforms.shape[1] == 4000
        seen.update(tuple(row[:n].tolist()) for row, n in zip(tokens, lengths.tolist(), strict=True))
        return forward(model, waveforms, tokens, lengths, noise)

    monkeypatch.setattr(MuLaN, "forward", watched)
    run = train(tmp_path, "--audio_data", sounds, "--tokenizer", tokenizer, "--epochs", "6", "--valid_fraction", "0")
    assert metrics(run)[-1]["bad_samples"] == 0
    number = {word: index for index, word in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}
    one = {(1, number[word], number["sound"], 2) for word in WORDS[:24]}
    longer = [number[word] for word in LONGER.split()]
    other = {(1, number[word], *longer, 2) for word in WORDS[:24]}
    assert seen <= one | other and len(seen & one) > 12 and len(seen & other) > 12


def test_broken_sounds_are_named_counted_and_replaced(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(write_sounds(tmp_path / "sounds", [f"{word} sound" for word in WORDS[:24]]))
    (folder / "07.wav").write_bytes((folder / "07.wav").read_bytes()[:30])
    (folder / "11.txt").write_text(" \n")
    run = train(tmp_path / "run", "--audio_data", str(folder), "--tokenizer", tokenizer, "--epochs", "3",
                "--valid_fraction", "0")  # fmt: skip
    said = capsys.readouterr().err
    assert metrics(run)[-1]["bad_samples"] == 2
    assert said.count("07.wav") == 1 and said.count("11.wav") == 1 and "has no caption" in said


def test_a_text_of_no_token_is_a_bad_sample_and_not_the_end_of_a_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the second caption, which validations read too, nor a label."""
    letters = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))  # without a token for what is unknown
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "letters.json"))
    folder = Path(write_sounds(tmp_path / "sounds", [f"{word} sound" for word in WORDS[:24]]))
    _, valid = data.split(24, 0.5, 42, at_least=8)
    of_caption, of_label = (f"{valid[i]:02d}" for i in (2, 5))
    (folder / f"{of_caption}.txt").write_text("a bell\n\u9418\n")
    (folder / f"{of_label}.json").write_text(json.dumps({"caption": "a bell", "label": "\u9418"}))
    run = train(tmp_path / "run", "--audio_data", str(folder), "--tokenizer", str(tmp_path / "letters.json"),
                "--valid_fraction", "0.5", "--max_steps", "2")  # fmt: skip
    said = capsys.readouterr().err
    assert "valid/r10" in metrics(run)[-1] and metrics(run)[-1]["bad_samples"] == 2
    for name in (of_caption, of_label):
        assert said.count(f"{name}.wav: the tokenizer") == 1


def nothing_readable(tmp: Path) -> str:
    folder = Path(write_sounds(tmp / "broken", ["a bell"] * 24))
    for path in folder.glob("*.wav"):
        path.write_bytes(b"RIFF no sound")
    return str(folder)


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def without_captions(tmp: Path) -> str:
    folder = Path(write_sounds(tmp / "silent", ["a bell"] * 3))
    for path in folder.glob("*.txt"):
        path.unlink()
    return str(folder)


# What is given as --audio_data, and what the line must name.
BAD_DATA: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing folder": (lambda tmp: str(tmp / "nowhere"), "nowhere"),
    "empty folder": (lambda tmp: str(tmp), "no sound in"),
    "folder without captions": (without_captions, "has a caption"),
    "manifest without captions": (lambda tmp: written(tmp / "m.csv", "path,title\na.wav,bell\n"), "caption"),
    "manifest without rows": (lambda tmp: written(tmp / "m.csv", "path,caption\n"), "no rows"),
    "manifest of missing files": (
        lambda tmp: written(tmp / "m.csv", "path,caption\n" + "".join(f"{n}.wav,bell\n" for n in range(40))),
        "No such file",
    ),
    "broken sounds": (nothing_readable, "sounds could be read"),
    "fewer sounds than a batch": (lambda tmp: "demo:tones:10", "too few"),
    "no such demonstration": (lambda tmp: "demo:songs", "demo:tones"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_trained_on_is_one_line_and_not_an_endless_loop(
    name: str, tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty loader spun for ever in the public trainer."""
    make, text = BAD_DATA[name]
    spec = make(tmp_path)
    assert text in refused(capsys, tmp_path / "run", "--audio_data", spec, "--tokenizer", tokenizer)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["--batch_size", "1"], "--batch_size 1 leaves a pair without anything"),
        (["--hierarchical_layers", "2"], "hierarchical_layers 2: a tower of 2 layers has 1 below"),
        (["--hierarchical_layers", "1", "--text_depth", "1"], "hierarchical_layers 1"),
        (["--zero_shot_templates", "a {}|a sound"], "a sound"),
        (["--betas", "0.9"], "2 values"),
        (["--betas", "0.9,1"], "below 1"),
        (["--data_max_length", "8000"], "--clip_seconds 0.5"),
        (["--tokenizer", "nowhere.json"], "nowhere.json"),
        (["--max_text_tokens", "2"], "--max_text_tokens 2"),
        (["--init_from", "nowhere"], "nowhere"),
        (["--init_temperature", "1000"], "init_temperature 1000"),
        (["--time_mask_fraction", "0.9", "--patch_dropout", "0.9"], "patch_dropout"),
        (["--n_mels", "200"], "n_mels 200"),
        (["--patch_size", "64"], "patch_size 64"),
        (["--fmin", "3000", "--fmax", "2000"], "fmin 3000"),
        (["--hop_length", "300"], "hop_length 300"),
        (["--clip_seconds", "1e-9"], "no sample in a clip"),
        (["--audio_dim", "18"], "18"),
        (["--loss", "clip"], "decoupled"),
        (["--batch_size", "7", "--grad_accum_steps", "2"], "7 /"),
        (["--spectogram", "power"], "did you mean --spectrogram?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_gives_one_line(
    said: list[str], text: str, tokenizer: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if "--tokenizer" not in said and "--max_text_tokens" not in said:
        said = ["--tokenizer", tokenizer, *said]
    assert text in refused(capsys, tmp_path / "run", *said)


@pytest.mark.parametrize(
    ("package", "said", "text"),
    [
        ("lion_pytorch", ["--use_lion"], "lion-pytorch"),
        ("soundfile", ["--audio_data", "SOUNDS"], "soundfile"),
        ("soxr", ["--audio_data", "SOUNDS"], "soxr"),
        ("tokenizers", [], "tokenizers"),
    ],
)
def test_a_package_that_is_not_installed_is_one_line_that_says_how(
    package: str, said: list[str], text: str, sounds: str, tokenizer: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, package, None)
    said = [sounds if word == "SOUNDS" else word for word in said]
    line = refused(capsys, tmp_path / "run", *said, "--tokenizer", tokenizer)
    assert text in line and "pip install" in line
