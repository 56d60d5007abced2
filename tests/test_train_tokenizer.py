"""train_tokenizer.py: its schedules, what it trains and validates, its flags; tiny models, generated clips."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tandem.models import VideoTokenizer
from tandem.training.run import Run
from tests.scripts import (
    VIDEO_TOKENIZER,
    assert_same_bits,
    assert_same_run,
    checkpoint,
    final_weights,
    write_videos,
)

SCRIPT = VIDEO_TOKENIZER
ALTERNATING = ["--image_folder", "demo:shapes:64", "--image_every", "3"]

# Schedules and names.


def test_the_recipe_leaves_the_weights_of_the_codes_losses_to_the_quantizer() -> None:
    said = ["--config", str(VIDEO_TOKENIZER.configs / "base.yaml"), "--perceptual", "none", "--quantizer"]
    for quantizer, expected in (("lfq", (1.0, 0.1, 2.5)), ("bsq", (0.0, 0.1, 1.0)), ("ibq", (1.0, 0.05, 1.0))):
        args = VIDEO_TOKENIZER.parsed(*said, quantizer)
        assert (args.commitment_loss_weight, args.entropy_loss_weight, args.diversity_gamma) == expected, quantizer


# A run and what it leaves.


def test_each_third_update_is_of_images_and_a_resume_in_between_goes_on_with_the_same(tmp_path: Path) -> None:
    """On clips, every head of the discriminator learns."""
    seen: dict[int, tuple[int, list[int]]] = {}

    def watch(run: Run, event: str, batch: Any) -> None:
        if event == "update":
            found = batch["videos"].shape[2], list(batch["ids"])
            assert seen.setdefault(run.progress.step, found) == found, "whenever this update is made"

    flags = [*ALTERNATING, "--max_steps", "7", "--save_every_n_steps", "1", "--weight_decay", "0"]
    with Run.watched(watch):
        whole = VIDEO_TOKENIZER.train(tmp_path / "whole", *flags, "--keep_n_checkpoints", "9")
        VIDEO_TOKENIZER.train_stopped(1, tmp_path / "run", *flags)  # before an update on images
        VIDEO_TOKENIZER.train_killed(3, tmp_path / "run", *flags)  # after it
        VIDEO_TOKENIZER.train(tmp_path / "run", *flags)
    assert_same_run(tmp_path / "run", whole)
    assert [frames for frames, _ in seen.values()] == [5, 5, 1, 5, 5, 1, 5]
    first, second = (set(ids) for frames, ids in seen.values() if frames == 1)
    assert min(first | second) >= 64 and not first & second
    before, after = ({n: t for n, t in checkpoint(whole, step).items() if n.startswith("discriminator: weights/clip")}
                     for step in (1, 2))  # fmt: skip
    assert before and not any(torch.equal(before[name], after[name]) for name in before)


def test_beside_each_picture_lies_a_film_of_the_original_and_both_models(finished: Path) -> None:
    """The public trainer writes videos black."""
    with Image.open(finished / "samples" / "step_00000004.gif") as film:
        assert film.n_frames == 5 and film.width > 3 * 128  # type: ignore[attr-defined]
        pixels = torch.frombuffer(bytearray(film.convert("RGB").tobytes()), dtype=torch.uint8)
    assert 30 < pixels.float().mean() < 225
    assert (finished / "samples" / "step_00000004.mp4").stat().st_size > 0


# Starting from weights.


@pytest.mark.parametrize("quantizer", ["lfq", "vq"])
def test_the_decoder_alone_can_be_trained(quantizer: str, tmp_path: Path) -> None:
    first = VIDEO_TOKENIZER.train(tmp_path / "first", "--quantizer", quantizer, "--max_steps", "2")
    flags = ["--quantizer", quantizer, "--init_from", str(first / "model"), "--train", "decoder", "--max_steps", "3",
             "--weight_decay", "1"]  # fmt: skip
    whole = VIDEO_TOKENIZER.train(tmp_path / "run", *flags, *ALTERNATING, "--grad_accum_steps", "2")
    before, after = final_weights(first), final_weights(whole)
    assert before.keys() == after.keys()
    of_decoder = {name for name in before if name.startswith("decoder.")}
    of_decoder -= {"decoder.layers.1.gate.to_weights.bias"}  # what is added to all inputs of a softmax changes nothing
    kept = [name for name in before if not name.startswith("decoder.")]
    assert_same_bits({name: after[name] for name in kept}, {name: before[name] for name in kept})
    assert [name for name in of_decoder if torch.equal(after[name], before[name])] == []


def test_a_model_of_images_is_inflated_to_one_of_videos_that_starts_frame_by_frame(tmp_path: Path) -> None:
    images = VIDEO_TOKENIZER.train(tmp_path / "images", "--num_frames", "1", "--max_steps", "2")
    start = ["--init_from", str(images / "model"), "--learning_rate", "1e-30", "--max_steps", "1"]
    clips = torch.rand(2, 3, 5, 16, 16, generator=torch.Generator().manual_seed(0))
    for how in ([], ["--inflate"]):
        run = VIDEO_TOKENIZER.train(tmp_path / f"run{len(how)}", *start, *how)
        slices = {name: t[:, :, :-1] for name, t in final_weights(run).items() if t.ndim == 5}
        assert all(not t.abs().gt(1e-20).any() for t in slices.values()) == bool(how)
        model = VideoTokenizer.from_pretrained(run / "model")
        # Of this model, a code comes from every second frame alone.
        frame_by_frame = torch.stack([model.encode(clips[:, :, frame]) for frame in (0, 2, 4)], dim=1)
        assert torch.equal(model.encode(clips), frame_by_frame) == bool(how)


# Flags.


def test_without_pyav_videos_are_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_videos(tmp_path / "videos", 20)
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install" in VIDEO_TOKENIZER.refused(tmp_path / "run", "--video_folder", str(tmp_path / "videos"))
