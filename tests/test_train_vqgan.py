"""train_vqgan.py: its schedules, its two models, its flags; tiny models, generated images, one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import train_vqgan
from tandem.models import VQGAN as Generator
from tandem.models.quantizers.gaussian import DiagonalGaussian
from tandem.training.noise import Noise
from tests.launch.filling import saved
from tests.models.towers import vision_folder
from tests.scripts import (
    VQGAN,
    assert_same_bits,
    checkpoint,
    final_weights,
    kill,
    killed,
    metrics,
)

SCRIPT = VQGAN

# A run and what it leaves.


def test_operations_are_those_of_updates_without_and_with_the_discriminator_and_its_penalty(finished: Path) -> None:
    """The discriminator starts at update 4 and is punished at 5; a codebook begins at update 1."""
    first, *alone, third, judged, punished, again, _, _ = (line["gflop_per_sample"] for line in metrics(finished))
    assert first > alone[0] == third < judged < punished and again == judged


def test_the_penalty_in_fp16_is_scaled_as_its_loss_is(tmp_path: Path) -> None:
    """The public trainer scales the discriminator's loss and not its penalty's gradient, which vanishes in fp16."""
    flags = ["--image_folder", "demo:shapes:8", "--valid_fraction", "0", "--max_steps", "3", "--learning_rate", "1e-9",
             "--discr_start_step", "0", "--apply_grad_penalty_every", "1", "--discr_max_grad_norm", "0"]  # fmt: skip

    def last_line(precision: str, weight: str) -> dict[str, float]:
        chosen = ["--precision", precision, "--penalty_weight", weight]
        return metrics(VQGAN.train(tmp_path / f"{precision}-{weight}", *flags, *chosen))[-1]

    # All updates see the same images, and hardly move; the first ones look for a scale that fp16 can hold.
    half, full, without = (last_line(*said) for said in (("fp16", "1000"), ("fp32", "1000"), ("fp32", "1e-9")))
    assert without["discr_grad_norm"] < 1e-3 * full["discr_grad_norm"]  # nearly all of the gradient is the penalty's
    assert half["skipped_updates"] < 3
    # What is not the penalty's is less than 1e-3 of either, whatever fp16 makes of it.
    assert half["discr_grad_norm"] == pytest.approx(full["discr_grad_norm"], rel=2e-3)
    assert half["gradient_penalty"] == pytest.approx(full["gradient_penalty"], rel=1e-5)  # computed in fp32 in both


def test_validations_change_nothing_of_what_is_trained(tmp_path: Path) -> None:
    """The codebook is an average that moves in training mode, so before and after them and not within."""
    flags = ["--quantizer", "vq", "--max_steps", "3", "--save_every_n_steps", "3", "--validate_every_n_steps"]
    often, never = (checkpoint(VQGAN.train(tmp_path / every, *flags, every), 3) for every in ("1", "0"))
    assert_same_bits(often, never)


def test_an_adaptive_weight_is_a_tenth_without_a_perceptual_loss_and_whole_beside_one() -> None:
    """With a whole one alone, the discriminator undoes what the reconstruction loss teaches: see docs/vqgan.md."""
    base = ["--config", str(VQGAN.configs / "base.yaml")]
    for said, scale in (
        ([], 0.1), (["--gan_weight", "0.3"], 1.0), (["--gan_weight_scale", "1"], 1.0),
        (["--gan_weight", "0.3", "--gan_weight_scale", "0"], 0.0),
        (["--perceptual", "lpips"], 1.0), (base, 1.0), ([*base, "--perceptual", "none"], 0.1),
    ):  # fmt: skip
        parser = train_vqgan.build_parser()
        args = parser.parse(said)
        assert args.gan_weight_scale == scale
        assert parser.settings(args)["gan_weight_scale"] == scale  # a resumed run compares it


def test_each_model_has_its_betas_and_its_learning_rate(tmp_path: Path) -> None:
    said = ["--max_steps", "1", "--discr_start_step", "0", "--betas", "0.5,0.9", "--discr_betas", "0.25,0.75",
            "--learning_rate", "1e-3", "--discr_learning_rate", "5e-4", "--log_every_n_steps", "1"]  # fmt: skip
    run = VQGAN.train(tmp_path, *said)
    line = next(line for line in metrics(run) if "lr" in line)
    assert (line["lr"], line["discr_lr"]) == (1e-3, 5e-4)
    found = checkpoint(run, 1)
    for model, betas in (("generator", (0.5, 0.9)), ("discriminator", (0.25, 0.75))):
        start = f"{model}: optimizer/moments/exp_avg/"
        names = [name for name in found if name.startswith(start)]
        assert names
        for name in names:  # after one update the averages are (1 - beta 1) g and (1 - beta 2) g^2
            gradient = found[name] / (1 - betas[0])
            square = found[name.replace("exp_avg", "exp_avg_sq")] / (1 - betas[1])
            torch.testing.assert_close(gradient.square(), square, rtol=1e-4, atol=1e-12)


# Resuming and starting from weights.


def test_the_same_model_in_another_spelling_is_resumed(tmp_path: Path) -> None:
    for step, said in enumerate([[], ["--num_resnet_blocks", "0,1"], ["--discr_dim", "8"]], start=1):
        VQGAN.train(tmp_path / "run", "--max_steps", str(step), *said)
    whole = VQGAN.train(tmp_path / "whole", "--max_steps", "3")
    assert_same_bits(checkpoint(tmp_path / "run", 3), checkpoint(whole, 3))


TAMING = ["--body", "taming", "--ch_mult", "1,2,2", "--norm_groups", "4"]
LATENTS = {
    "kl": [*TAMING, "--quantizer", "kl"],
    "vq": ["--quantizer", "vq", "--codebook_dim", "4", "--num_layers", "2"],
    "lfq": [*TAMING, "--quantizer", "lfq", "--codebook_size", "64"],
}


def trained(folder: Path, *more: str) -> Path:
    VQGAN.main(*VQGAN.flags(folder, *more, without=("num_layers", "codebook_size")))
    return folder


@pytest.mark.parametrize("quantizer", LATENTS)
def test_the_decoder_alone_can_be_trained_and_resumed(quantizer: str, tmp_path: Path) -> None:
    """The codebook and the scale of latents stay as well, whose averages no optimizer moves."""
    first = trained(tmp_path / "first", *LATENTS[quantizer], "--max_steps", "2")
    flags = ["--init_from", str(first / "model"), "--train", "decoder", "--grad_accum_steps", "2", "--max_steps", "4",
             "--discr_start_step", "0", "--ema_decay", "0.5", "--save_every_n_steps", "2"]  # fmt: skip
    whole = trained(tmp_path / "whole", *flags)
    with killed(VQGAN.in_update(3, kill)):
        trained(tmp_path / "run", *flags)
    assert_same_bits(checkpoint(trained(tmp_path / "run", *flags), 4), checkpoint(whole, 4))
    before, found = final_weights(first), checkpoint(whole, 4)
    for part in ("generator: weights/", "ema: "):
        after = {name: found[key] for key in found for name in before if key.startswith(part) and key.endswith(name)}
        assert after.keys() == before.keys()
        # What is added to all logits of a softmax changes nothing.
        of_decoder = {name for name in before if name.startswith("decoder.") and not name.endswith("attn_1.k.bias")}
        kept = [name for name in before if not name.startswith("decoder.")]
        assert_same_bits({name: after[name] for name in kept}, {name: before[name] for name in kept})
        assert [name for name in of_decoder if torch.equal(after[name], before[name])] == []
    assert not [key for key in found if key.startswith("generator: optimizer/") and "/encoder." in key]
    ours, theirs = (json.loads((run / "model" / "config.json").read_text()) for run in (whole, first))
    assert ours == theirs
    changed = VQGAN.flags(whole, *flags, "--train", "all", without=("num_layers", "codebook_size"))
    assert "--train" in VQGAN.refused_alone(*changed)


@pytest.mark.parametrize(
    "given", [[], ["--scaling_factor", "0.5", "--shift_factor", "0.25"]], ids=["measured", "given"]
)
def test_a_run_that_goes_on_from_another_keeps_a_scale_that_was_given_and_measures_on_what_was_measured(
    given: list[str], tmp_path: Path
) -> None:
    """A latent moves on while its encoder learns."""
    first = trained(tmp_path / "first", *LATENTS["kl"], *given, "--max_steps", "2")
    second = trained(tmp_path / "second", "--init_from", str(first), "--learning_rate", "0.1", "--max_steps", "2")
    before, after = (json.loads((run / "model" / "config.json").read_text()) for run in (first, second))
    names = ("scaling_factor", "shift_factor")
    assert [before[name] == after[name] for name in names] == [bool(given)] * 2
    assert before["latents_mean"] != after["latents_mean"] and before["latents_std"] != after["latents_std"]
    weight = final_weights(second)["quantizer.channel_stats"][0]
    assert weight.tolist() == pytest.approx([1 - 0.99**4] * 4)  # of the updates of both
    assert [before.get("scale_is_measured"), after.get("scale_is_measured")] == [None if given else True] * 2


@pytest.mark.parametrize("latent", ["sample", "mode"])
def test_continuous_latents_are_sampled_with_the_noise_of_the_run_and_weighed_by_pixel(
    latent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The decoder sees samples in training, and means elsewhere."""
    said = [*LATENTS["kl"], "--latent", latent, "--max_steps", "1", "--kl_loss_weight", "0.5",
            "--discr_start_step", "9", "--seed", "0"]  # fmt: skip
    seen: list[tuple[bool, Any]] = []
    forward = DiagonalGaussian.forward

    def watched(self: DiagonalGaussian, z: torch.Tensor, noise: Any = None) -> Any:
        seen.append((self.training, noise))
        return forward(self, z, noise)

    with patch.object(DiagonalGaussian, "forward", watched):
        line = metrics(trained(tmp_path / "run", *said, "--validate_every_n_steps", "1"))[0]
    assert capsys.readouterr().err.endswith("/latents\n")  # the command that uses the model
    in_training, elsewhere = ([noise for mode, noise in seen if mode == is_on] for is_on in (True, False))
    assert all(noise is None for noise in elsewhere) and elsewhere
    expected = Noise(0, "latents").normal(0, range(8), (4, 4, 4))
    assert len(in_training) == 1
    assert torch.equal(in_training[0], expected) if latent == "sample" else in_training[0] is None
    # Of 3 colours and 16 pixels a latent.
    assert line["loss"] == pytest.approx(line["recon_loss"] + 0.5 * line["kl"] / 48, rel=1e-6)


# Flags.


@pytest.mark.parametrize("in_file", ["vq_decay: 0.5\nvq_cosine: true", "quantizer: fsq\nfsq_levels: '4,4,4'"])
def test_a_config_is_of_use_with_another_quantizer_on_the_command_line(in_file: str, tmp_path: Path) -> None:
    (tmp_path / "vq.yaml").write_text(in_file)
    flags = ["--config", str(tmp_path / "vq.yaml"), "--quantizer", "bsq", "--max_steps", "1"]
    assert VQGAN.arguments_of(VQGAN.train(tmp_path / "run", *flags)).quantizer == "bsq"


@pytest.mark.parametrize(("name", "value"), [
    ("num_resnet_blocks", 3), ("num_resnet_blocks", None), ("fsq_levels", 5), ("normalize_input", "no"),
    ("layers", "\x1b]0;x\x07"),
])  # fmt: skip
def test_a_stranger_s_model_whose_configuration_is_no_shape_is_refused_in_one_line(
    name: str, value: Any, tmp_path: Path
) -> None:
    quantizer = "fsq" if name == "fsq_levels" else "lfq"
    model = Generator.from_dict(
        {"image_size": 16, "dim": 8, "num_layers": 2, "codebook_size": 256, "quantizer": quantizer}
    )
    line = VQGAN.refused(tmp_path / "run", "--init_from", str(saved(tmp_path / "model", model, **{name: value})))
    assert (name in line or str(tmp_path / "model") in line) and "\x1b" not in line


def test_what_has_no_effect_in_a_model_is_no_difference_from_it(tmp_path: Path) -> None:
    model = Generator.from_dict({"image_size": 16, "dim": 8, "num_layers": 2, "codebook_size": 64, "vq_cosine": True})
    (tmp_path / "other.yaml").write_text("discr_layers: 2\nquantizer: lfq\nvq_cosine: false\ncodebook_dim: 8")
    source, config = saved(tmp_path / "lfq", model), str(tmp_path / "other.yaml")
    torch.testing.assert_close(
        final_weights(VQGAN.start_from(source, tmp_path / "run", "--config", config)),
        load_file(source / "model.safetensors"),
    )


def test_a_flag_is_judged_beside_those_that_a_run_adopts(tmp_path: Path) -> None:
    VQGAN.train(tmp_path / "vq", "--quantizer", "vq", "--max_steps", "1")
    said = "--image_size", "16", "--discr_layers", "2"
    VQGAN.start_from(tmp_path / "vq", tmp_path / "decay", *said, "--vq_decay", "0.9")
    assert VQGAN.arguments_of(tmp_path / "decay").vq_decay == 0.9


@pytest.mark.parametrize("model", [
    {"body": "taming", "ch_mult": [1, 1, 1], "norm_groups": 4, "quantizer": "vq", "scaling_factor": 0.5},
    {"num_layers": 2, "quantizer": "lfq", "codebook_size": 64, "vq_cosine": True, "codebook_dim": 7, "norm_groups": 2},
])  # fmt: skip
def test_what_a_run_says_that_it_adopts_can_be_said_on_a_command_line(
    model: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = saved(
        tmp_path / "model", Generator.from_dict({"image_size": 16, "dim": 8, "num_resnet_blocks": [1], **model})
    )
    VQGAN.start_from(start, tmp_path / "run", "--discr_layers", "2")
    _, line = next(line for line in capsys.readouterr().out.splitlines() if "architecture of" in line).split(": ")
    VQGAN.start_from(start, tmp_path / "again", "--discr_layers", "2", *line.split())


@pytest.mark.parametrize("said, decay, moves", [([], 0.99, False), (["--vq_decay", "0.8"], 0.8, True)])
def test_entries_that_were_loaded_stay_where_no_vector_chooses_them(
    said: list[str], decay: float, moves: bool, tmp_path: Path
) -> None:
    """At 0.8, an entry is revived elsewhere after 21 updates without a vector. Nothing else moves here."""
    arguments = {"quantizer": "vq", "codebook_size": 512, "codebook_dim": 4, "dim": 8, "num_layers": 2}
    model = Generator.from_dict({"image_size": 16, **arguments})
    model.quantizer.initialized.fill_(True)
    said = [*said, "--discr_layers", "2", "--max_steps", "30"]
    run = VQGAN.start_from(saved(tmp_path / "vq", model), tmp_path / "run", *said)
    distances = (Generator.from_pretrained(run / "model").quantizer.codebook - model.quantizer.codebook).norm(dim=1)
    assert VQGAN.arguments_of(run).vq_decay == decay
    assert (distances.median() > 0.1) == moves


def test_an_aligned_run_goes_on_with_its_projection_and_leaves_a_model_like_any_other(tmp_path: Path) -> None:
    vision_folder(tmp_path / "vision")
    flags = [*LATENTS["kl"], "--align_with", str(tmp_path / "vision"), "--max_steps", "3", "--ema_decay", "0.5"]
    whole = trained(tmp_path / "whole", *flags, "--save_every_n_steps", "1", "--keep_n_checkpoints", "3")
    with killed(VQGAN.in_update(2, kill)):
        trained(tmp_path / "run", *flags, "--save_every_n_steps", "2")
    assert_same_bits(checkpoint(trained(tmp_path / "run", *flags), 3), checkpoint(whole, 3))
    first, last = (checkpoint(whole, step)["projection: weights/weight"] for step in (1, 3))
    assert last.shape == (16, 4, 1, 1) and (first != last).all()
    plain = trained(tmp_path / "plain", *LATENTS["kl"], "--max_steps", "1") / "model"
    ours, theirs = (Generator.from_pretrained(folder) for folder in (whole / "model", plain))
    assert ours.state_dict().keys() == theirs.state_dict().keys() and ours.config.keys() == theirs.config.keys()
    assert {path.name for path in (whole / "model").iterdir()} == {path.name for path in plain.iterdir()}
    for line in metrics(whole):
        both = line["alignment_cosine"] + line["alignment_distance"]
        assert line["alignment_loss"] == pytest.approx(both)
    vision_folder(tmp_path / "wide", hidden_size=24)
    with torch.no_grad():
        (other := vision_folder(tmp_path / "other")).layernorm.bias[0] += 1
    other.save_pretrained(tmp_path / "other")
    for changed, complaint in (
        ([], "--align_with was"),
        (["--align_with", str(tmp_path / "wide")], "trained with another --align_with"),
        (["--align_with", str(tmp_path / "other")], "trained with another --align_with"),
    ):
        more = VQGAN.flags(
            whole, *(changed and flags), *LATENTS["kl"], *changed, without=("num_layers", "codebook_size")
        )
        assert complaint in VQGAN.refused_alone(*more)
    # The flags of an aligned run train its decoder, too, without a vision model.
    said = ("--train", "decoder", "--init_from", str(whole), "--output_dir", str(tmp_path / "decoder"))
    VQGAN.main("--config", str(whole / "config.yaml"), *said, "--max_steps", "1")
    [line] = metrics(tmp_path / "decoder")
    assert "recon_loss" in line and "alignment_loss" not in line
