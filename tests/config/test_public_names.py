"""What the public scripts and trainers call their arguments: each is understood or answered, and means what the table
says."""

from __future__ import annotations

import functools
import json
from collections import ChainMap
from pathlib import Path

import pytest
import yaml

import convert
from scripts import coming_from
from tandem.config import public_names
from tandem.config.public_names import rows
from tandem.io.renamed import FORMER_SWITCHES
from tests.scripts import DECODER, MULAN, SCRIPTS, VQGAN, Script

each_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda script: script.name)


@each_script
def test_every_public_argument_is_a_flag_or_is_answered(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_names, "tables", functools.cache(public_names.tables))
    parser = script.module.build_parser()
    packages = {row.name: row.package for row in reversed(rows(f"{script.name}.py"))}  # the first that has it
    flags = {option.removeprefix("--") for option in parser._option_string_actions}
    for name in packages.keys() - flags - {"devices", "gpus", "num_gpus", "resume"}:  # these have answers of their own
        with pytest.raises(SystemExit) as raised:
            parser.parse([f"--{name}", "1"])
        line = capsys.readouterr().err
        assert raised.value.code == 2 and line.count("\n") == 1 and f"--{name}: {packages[name]} " in line


@each_script
def test_every_row_of_the_page_is_true_of_the_flags(script: Script) -> None:
    parser = script.module.build_parser()
    known = parser._option_string_actions
    for row in rows(f"{script.name}.py"):
        if row.flag:
            assert known[f"--{row.name}"] is known[f"--{row.flag}"], row
        else:
            assert row.note, row
            is_former = row.name in FORMER_SWITCHES
            assert is_former or f"--{row.name}" not in known or known[f"--{row.name}"].dest == row.name, row
        for word in row.note.replace(",", " ").replace(";", " ").split():
            assert not word.startswith("--") or word in {*known, "--help"}, row


def test_the_page_has_the_tables_of_the_file() -> None:
    text = coming_from.PAGE.read_text()
    assert coming_from.page(text) == text
    assert coming_from.page(text.replace("| 0.98 |", "| 0.97 |")) == text


def test_public_names_set_their_flags_on_the_command_line_and_in_yaml(tmp_path: Path) -> None:
    said = {"folder": "photos/", "num_train_steps": 7, "lr": 2e-4, "grad_accum_every": 4, "save_results_every": 50,
            "save_model_every": 60, "results_folder": "out", "valid_frac": 0.1, "ema_decay": 0.9}  # fmt: skip
    path = tmp_path / "muse.yaml"
    path.write_text("".join(f"{name}: {value}\n" for name, value in said.items()))
    lines = [[word for name, value in said.items() for word in (f"--{name}", str(value))], ["--config", str(path)]]
    for line in lines:
        args = VQGAN.parsed(*line)
        assert (args.image_folder, args.max_steps, args.learning_rate, args.output_dir) == ("photos/", 7, 2e-4, "out")
        assert (args.grad_accum_steps, args.sample_every_n_steps, args.save_every_n_steps) == (4, 50, 60)
        assert (args.valid_fraction, args.ema_decay, args.epochs) == (0.1, 0.9, 1e9)
    path.write_text("use_ema: true\n")
    line = VQGAN.refused_alone("--config", str(path))
    assert "'use_ema'" in line and "--ema_decay" in line


def test_a_config_with_keys_of_two_scripts_is_that_of_none(tmp_path: Path) -> None:
    (tmp_path / "mixed.yaml").write_text("num_tokens: 5\nnum_workrs: 2\n")
    assert "config of" not in VQGAN.refused_alone("--config", str(tmp_path / "mixed.yaml"))


def test_only_the_public_number_of_updates_outlasts_the_epochs() -> None:
    for flags, epochs in {
        ("--max_steps", "9"): 20, ("--num_train_steps", "9"): 1e9, ("--num_train_steps", "9", "--epochs", "3"): 3,
    }.items():  # fmt: skip
        assert MULAN.parsed(*flags).epochs == epochs


def test_a_run_says_it_at_its_start_and_a_batch_that_does_not_divide_is_told_the_product(tmp_path: Path) -> None:
    said = VQGAN.output_of(tmp_path, "--grad_accum_every", "2", "--num_train_steps", "1")
    assert "8 samples" in said and "2 micro-batches" in said and "--batch_size 16 (8 x 2 x 1)" in said
    line = VQGAN.refused(tmp_path / "2", "--batch_size", "4", "--grad_accum_every", "8")
    assert " 32 " in line and "micro-batches of 4" in line


# configs/*/base.yaml against the public defaults: those of the table, and these.

PUBLIC_DEFAULTS = yaml.safe_load(Path(__file__).with_name("public_defaults.yaml").read_text())


@pytest.mark.parametrize("name", PUBLIC_DEFAULTS)
def test_a_configuration_has_the_public_defaults(name: str) -> None:
    script = SCRIPTS[f"train_{name.split('/')[0]}"]
    args = vars(script.parsed("--config", str(script.configs.parent / f"{name}.yaml")))
    said = dict(ChainMap(*PUBLIC_DEFAULTS[name].values()))
    if name.endswith("/base"):
        # A folder; an example, whose values are in the file; and a choice that is made otherwise there.
        others = {"output_dir", "grad_accum_steps", "batch_size"}
        theirs = {row.flag: row.public_default for row in rows(f"{script.name}.py") if row.public_default != "(needed)"}
        said = {n: yaml.safe_load(text) for n, text in theirs.items() if n in args.keys() - others and text} | said
    read = vars(script.module.build_parser().with_values(said))
    expected = {name: None if value is None else read[name] for name, value in said.items()}
    assert {name: args[name] for name in expected} == expected


def test_the_base_configuration_of_the_decoder_is_what_an_empty_public_configuration_gives(tmp_path: Path) -> None:
    old, new = tmp_path / "least.json", tmp_path / "least.yaml"
    old.write_text(json.dumps({"decoder": {"unets": [{"dim": 128, "dim_mults": [1, 2, 4, 8]}], "image_size": 64}}))
    convert.main(["config", str(old), str(new)])
    public, ours = (vars(DECODER.parsed("--config", str(path))) for path in (new, DECODER.configs / "base.yaml"))
    for args in (public, ours):  # each of the two is another way to write the same
        args["cond_dim"], args["num_resnet_blocks"] = args["cond_dim"] or [128], args["num_resnet_blocks"][0][0]
    by_file = {"config", "explicit", "on_command_line", "aliases", "config_note", "split_by"}
    assert {k: v for k, v in ours.items() if k not in by_file} == {k: v for k, v in public.items() if k not in by_file}
