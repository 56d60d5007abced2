"""Folders, config files and flags of earlier versions, in which settings and weights had other names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

import convert
import embed
import encode
from tandem import models
from tandem.io.renamed import FORMER_SETTINGS, FORMER_WEIGHTS
from tandem.models.base import read_config
from tandem.weights.load import load_model, open_model
from tests.scripts import (
    MULAN,
    ROOT,
    SCRIPTS,
    VQGAN,
    Script,
    assert_same_bits,
    assert_same_run,
    edit_checkpoint,
    final_weights,
    write_sounds,
)

# Present name of a setting -> the inverse of its conversion; the identity, if it is not here.
FORMER_VALUE: dict[str, Callable[[Any], Any]] = {"init_logit_scale": lambda value: round(math.exp(value), 6)}
FORMER_SETTING = {"init_logit_scale": "init_temperature", "normalize_input": "centred"}
FORMER_WEIGHT = {"logit_scale": "tau", "quantizer.latent_stats": "quantizer.moments"}
KL = replace(VQGAN, tiny={name: value for name, value in VQGAN.tiny.items() if name != "codebook_size"})
# Runs with all of these names: flags, of which the former ones have values that are no defaults, as in a config file.
RUNS: dict[str, tuple[Script, list[str], dict[str, Any]]] = {
    "mulan": (MULAN, ["--init_temperature", "7"], {"init_temperature": 7}),
    "vqgan": (KL, ["--no-centred", "--quantizer", "kl", "--perceptual", "none"], {"centred": False}),
}
# What a run that starts from them needs besides.
START = {"mulan": [], "vqgan": ["--discr_layers", "2", "--perceptual", "none"]}
of_runs = pytest.mark.parametrize("name", RUNS)


def with_former_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        FORMER_SETTING.get(name, name): with_former_names(value)
        if isinstance(value, dict)
        else FORMER_VALUE.get(name, lambda same: same)(value)
        for name, value in settings.items()
    }


def make_former(folder: Path) -> None:
    """Give all settings and weights in the files of a folder their former names."""
    settings_count, weights_count = 0, 0
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        former = {}
        for name, tensor in tensors.items():
            parent, slash, leaf = name.rpartition("/")
            former[f"{parent}{slash}{FORMER_WEIGHT.get(leaf, leaf)}"] = tensor
        weights_count += former.keys() != tensors.keys()
        save_file(former, path, metadata)
    for path in [path for name in ("config", "settings", "index") for path in folder.rglob(f"{name}.json")]:
        path.write_text(json.dumps(with_former_names(json.loads(path.read_text()))))
        settings_count += any(f'"{former}"' in path.read_text() for former in FORMER_SETTING.values())
    for path in folder.rglob("config.yaml"):
        path.write_text(yaml.safe_dump(with_former_names(yaml.safe_load(path.read_text()))))
    for path in folder.rglob("state.json"):
        edit_checkpoint(path.parent, lambda parts: parts.update(models=with_former_names(parts["models"])))
        settings_count += any(f'"{former}"' in path.read_text() for former in FORMER_SETTING.values())
    assert settings_count or weights_count


def former_run(name: str, folder: Path, *more: str) -> tuple[Script, Path]:
    """A run of two updates, with the names of an earlier version."""
    script, flags, _ = RUNS[name]
    make_former(run := script.train(folder, *flags, "--max_steps", "2", "--ema_decay", "0.9", *more))
    return script, run


@of_runs
def test_a_run_of_an_earlier_version_is_resumed_to_the_same_bits(name: str, tmp_path: Path) -> None:
    script, former_flags, _ = RUNS[name]
    flags = [*former_flags, "--max_steps", "4", "--ema_decay", "0.9"]
    script.train_stopped(1, tmp_path / "run", *flags)
    make_former(tmp_path / "run")
    output = script.output_of(tmp_path / "run", *flags)
    assert "resumed from" in output and " is now " not in output
    assert_same_run(tmp_path / "run", script.train(tmp_path / "whole", *flags))


@of_runs
def test_weights_of_an_earlier_version_are_read_from_every_folder_and_start_a_run(name: str, tmp_path: Path) -> None:
    script, flags, _ = RUNS[name]
    whole = script.train(tmp_path / "whole", *flags, "--max_steps", "2", "--ema_decay", "0.9")
    _, former = former_run(name, tmp_path / "former")
    (newest,) = (path.name for path in (former / "checkpoints").glob("step_*"))
    for place, weights in (("model", "best"), (f"checkpoints/{newest}", "ema"), (f"checkpoints/{newest}", "online")):
        ours, expected = (load_model(run / place, weights) for run in (former, whole))
        assert_same_bits(ours.state_dict(), expected.state_dict())
        assert ours.config == expected.config
    for source in (former / "model", former / "checkpoints" / newest):
        runs = [script.start_from(path, tmp_path / f"from_{path.name}_{path.parts[-2]}_{path.parts[-3]}", *START[name])
                for path in (source, whole / source.relative_to(former))]  # fmt: skip
        assert_same_bits(*map(final_weights, runs))


def test_statistics_that_an_earlier_version_did_not_measure_are_measured_from_the_next_update_on(
    tmp_path: Path,
) -> None:
    script, flags, _ = RUNS["vqgan"]
    run = script.train(tmp_path / "run", *flags, "--max_steps", "2", "--ema_decay", "0.9")
    added = "quantizer.channel_stats"
    for path in run.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        save_file({name: tensor for name, tensor in tensors.items() if not name.endswith(added)}, path, metadata)
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    edit_checkpoint(checkpoint, lambda parts: None)  # its checksums
    for place, weights in (("model", "best"), (f"checkpoints/{checkpoint.name}", "ema")):
        former = load_model(run / place, weights)
        assert former.latents_mean is former.latents_std is None and former.scaling_factor
    started = script.start_from(run / "model", tmp_path / "started", *START["vqgan"])
    assert "resumed from" in script.output_of(run, *flags, "--max_steps", "3", "--ema_decay", "0.9")
    for folder, updates in ((run, 3), (started, 3)):
        stats = final_weights(folder)["quantizer.latent_stats"], final_weights(folder)[added]
        assert stats[0][0].item() == pytest.approx(1 - 0.99**updates) and stats[1].shape == (3, 4)
        assert stats[1][0].tolist() == pytest.approx([0.01] * 4) and load_model(folder / "model").latents_mean


def test_a_model_without_measured_channels_has_the_checksum_that_an_earlier_version_gave_it(tmp_path: Path) -> None:
    """A folder of latents names it. The checksum was computed by the last version without `channel_stats`."""
    sizes = {"body": "taming", "dim": 8, "ch_mult": [1, 2], "norm_groups": 4, "num_resnet_blocks": [1]}
    model = models.VQGAN.from_dict({**sizes, "image_size": 16, "quantizer": "kl", "latent_dim": 4}).requires_grad_(
        False
    )
    for parameter in model.parameters():
        parameter.fill_(0.5)
    former = "85368621429578dbd5d7ef834cbff43bf5a660a15362c5cb9b75928f5847d485"
    model.save_pretrained(tmp_path)
    assert model.sha256() == open_model(tmp_path).identity["weights_sha256"] == former
    model.quantizer.channel_stats.fill_(0.5)
    model.save_pretrained(tmp_path)
    assert model.sha256() == open_model(tmp_path).identity["weights_sha256"] != former


def test_an_average_is_made_of_snapshots_of_an_earlier_version(tmp_path: Path) -> None:
    flags = ["--ema_power", "0.1", "--ema_decay", "0"]
    _, former = former_run("mulan", tmp_path / "former", *flags)
    whole = MULAN.train(tmp_path / "whole", *RUNS["mulan"][1], "--max_steps", "2", *flags)
    for run in (former, whole):
        convert.main(["average", str(run), str(run / "average"), "--ema_length", "0.1"])
    models = [MULAN.model.from_pretrained(run / "average") for run in (former, whole)]
    assert_same_bits(*(model.state_dict() for model in models))


def test_an_index_of_an_earlier_version_is_continued_and_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = former_run("mulan", tmp_path / "run")
    sounds, index = str(write_sounds(tmp_path / "sounds", ["a", "b"])), tmp_path / "index"
    fill = ["--model", str(run / "model"), "--audio", sounds, "--output", str(index)]
    embed.main(fill)
    make_former(index)
    embed.main(["--model", str(run / "model"), "--index", str(index), "--query", "a bell"])
    assert "00.wav" in capsys.readouterr().out
    embed.main(fill)
    assert "nothing is left to do" in capsys.readouterr().out


@of_runs
def test_a_former_flag_means_what_it_meant_on_the_command_line_and_in_a_config_file(name: str, tmp_path: Path) -> None:
    script, flags, former_settings = RUNS[name]
    (tmp_path / "former.yaml").write_text(yaml.safe_dump(former_settings))
    parser = script.module.build_parser()
    settings = [parser.settings(parser.parse(said)) for said in (flags, ["--config", f"{tmp_path}/former.yaml"])]
    assert settings[0].keys().isdisjoint(FORMER_SETTINGS)
    for former, value in former_settings.items():
        present, convert_value = FORMER_SETTINGS[former]
        assert [found[present] for found in settings] == [convert_value(value)] * 2 != [parser.get_default(present)] * 2
        assert f"--{former}" not in parser.format_help()


def test_a_present_and_a_former_flag_are_two_names_of_one() -> None:
    said = ["--init_temperature", "7", "--init_logit_scale", "1.9"]
    assert "two names of one flag" in MULAN.refused_alone(*said)


@pytest.mark.parametrize("value", [0, -1.0, "7", None, True, [7], math.inf, math.nan], ids=str)
def test_a_former_value_that_cannot_be_converted_is_one_line(value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model": "MuLaN", "init_temperature": value}))
    with pytest.raises(ValueError, match=r"init_temperature .* is no number above 0") as raised:
        read_config(tmp_path)
    assert len(str(raised.value).splitlines()) == 1 and str(tmp_path) in str(raised.value)


def test_every_present_name_is_one_of_a_setting_or_a_weight() -> None:
    """The table would rename to nothing else."""
    parsers = [module.build_parser() for module in (encode, *(script.module for script in SCRIPTS.values()))]
    assert all(any(parser.has_flags([present]) for parser in parsers) for present, _ in FORMER_SETTINGS.values())
    formats = json.loads((ROOT / "tests" / "models" / "formats.json").read_text())
    assert all(any(present in weights for weights in formats.values()) for present in FORMER_WEIGHTS.values())
