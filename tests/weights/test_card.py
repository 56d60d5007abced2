"""The model card of a run: what it tells, and what it keeps to itself."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import train_vae
from tandem.weights.card import KINDS, Kind, model_card, public_settings
from tandem.weights.origin import read_public_settings
from tests.scripts import ROOT

KIND = Kind("a thing", "train_vae.py", ("image_folder", "images"), "tandem-encode --model {}", ("a-tag",))
SECRETS = {
    "image_folder": "/home/alice/private-photos", "output_dir": "runs/secret-project", "init_from": "~/old/vae.pt",
    "report_to": "wandb", "run_name": "for-customer-x", "wandb_project": "secret-project",
}  # fmt: skip


def write_run(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {
        "script": "train_vae.py", "command": ["train_vae.py", "--image_folder", "/home/alice/private-photos"],
        "host": "alices-laptop", "python": "3.11.7", "packages": {"torch": "2.15.0"}, "git_commit": "abc-dirty",
        "world_size": 8, "device": "cuda:0", "backend": "ddp", "precision": "bf16", "platform": "Linux-alice",
    }  # fmt: skip
    (folder / "starts.jsonl").write_text(json.dumps(start) + "\n")
    return folder


def card(run: Path | None, settings: dict[str, Any] | None = None, has_picture: bool = False) -> str:
    return model_card(
        "alice/faces",
        "DiscreteVAE",
        "5 parameters",
        KIND,
        run,
        settings or {},
        has_picture=has_picture,
        has_discriminator=False,
        version="1.2",
    )


def test_numbers_switches_choices_and_demonstrations_are_public_and_what_a_user_typed_is_not() -> None:
    parser = train_vae.build_parser()
    args = parser.parse([])
    settings = {**parser.settings(args), **SECRETS}
    shown = public_settings(parser, settings, parser.fixed_on_resume)
    assert not {"image_folder", "output_dir", "init_from", "run_name", "wandb_project"} & shown.keys()
    assert shown["learning_rate"] == 1e-3 and shown["precision"] == "fp32" and shown["channels"] == 3
    assert public_settings(parser, {"image_folder": "demo:shapes:64"}, ()) == {"image_folder": "demo:shapes:64"}
    others = {"deepspeed_config": {"nvme_path": "/home/alice"}, "max_steps": None, "fsq_levels": [8, "/home"]}
    assert public_settings(parser, others, others.keys()) == {}
    for text in ("demo:shapes/../home", "hf_abc", "1e5/x", "s3://bucket", "my run"):
        assert public_settings(parser, {"image_folder": text, "run_name": text}, ()) == {}


def test_of_a_configuration_the_card_shows_what_the_script_knows_and_nothing_of_one_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path, [])
    for content, shown in {"seed: 3\ncolour: 7\n": {"seed": 3}, "a: [": {}, "- seed": {}}.items():
        (run / "config.yaml").write_text(content)
        assert read_public_settings(run, KIND) == shown
    (run / "config.yaml").unlink()
    assert read_public_settings(run, KIND) == {}


def test_the_card_names_no_path_host_or_command(tmp_path: Path) -> None:
    parser = train_vae.build_parser()
    run = write_run(tmp_path / "runs", [{"step": 1, "samples": 4, "epoch": 1.0, "valid/loss": 1.0}])
    settings = public_settings(parser, {**parser.settings(parser.parse([])), **SECRETS}, parser.fixed_on_resume)
    text = card(run, settings)
    for secret in ("/home", "private", "laptop", "secret", "customer", "vae.pt", "Linux", str(tmp_path)):
        assert secret not in text
    facts = ("ddp on 8 x cuda, bf16", "torch: 2.15.0", "abc-dirty", "4 samples in 1 update (", "--image_folder DIR")
    assert all(fact in text for fact in facts)


@pytest.mark.parametrize("model", KINDS)
def test_a_stranger_learns_the_package_and_commands_that_it_installs(model: str, tmp_path: Path) -> None:
    """In a checkout or out of one; what a command is called there is said once."""
    text = model_card(
        "alice/x",
        model,
        "5 parameters",
        KINDS[model],
        write_run(tmp_path, []),
        {},
        has_picture=False,
        has_discriminator=True,
        version="1.2",
    )
    assert "`tandem-training`\n1.2. Its" in text and f"`python {KINDS[model].script}`" in text
    commands = re.findall(r"^    (\S+) (.*)", text, re.MULTILINE)
    assert len(commands) == 3
    for command, arguments in commands:
        script = command.removeprefix("tandem-").replace("-", "_")
        assert command.startswith("tandem-") and "def main(" in (ROOT / f"{script}.py").read_text()
        flags = importlib.import_module(script).build_parser()._option_string_actions
        assert set(re.findall(r"--\w+", arguments)) <= set(flags)
