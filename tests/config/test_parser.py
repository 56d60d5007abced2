"""Arguments from the command line and from YAML, and the one line that a mistake gives."""

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tandem.config.config_file import read_flags
from tandem.config.converters import (
    Names,
    average_length,
    did_you_mean,
    fraction,
    frame_rate,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
    size,
    sizes,
    templates,
    two_fractions,
    worker_count,
)
from tandem.config.fields import flag, when
from tandem.config.parser import ArgumentParser
from tandem.config.shared import RateFlags, RunFlags
from tests.scripts import SCRIPTS, refusal

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.name for path in ROOT.glob("*.py") if path.name != "setup.py")
PATHS = ("PATH", "FILE", "DIR", "RUN", "OLD", "NEW", "OUT")  # words of --help for a path


@pytest.fixture
def parser() -> ArgumentParser:
    parser = ArgumentParser("train_vae.py")
    parser.add_config(RunFlags)
    parser.add_argument("--learning_rate", type=positive_float, default=1e-3)
    parser.add_argument("--image_folder")
    backends = {"type": str.lower, "choices": ("auto", "ddp"), "default": "auto"}
    parser.add_argument("--distributed_backend", "--distr_backend", **backends)
    parser.add_argument("--channel_widths", type=positive_int, nargs="+", default=[64, 128])
    parser.add_argument("--crop", type=positive_int, nargs=2, default=None)
    parser.add_argument("--flip", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--no_mixing", dest="mixing", action="store_false")
    parser.add_argument("--weight_decay", type=non_negative_float, default="1e-2")
    parser.add_argument("--steps_as_int", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    return parser


@pytest.fixture
def config(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


@dataclass
class Averaged(RunFlags):
    ema_decay: float = 0.999


def error_line(parser: ArgumentParser, *argv: str) -> str:
    line = refusal(parser.parse, *argv)
    assert line.startswith("train_vae.py: error: ")
    return line.removeprefix("train_vae.py: error: ")


WHOLE = {"8": 8, "1_000": 1000, "1e6": 10**6, "2.0": 2, "123456789012345678": 123456789012345678, "1": 1}
NOT_WHOLE = ["", "eight", "1.5", "-1", "nan", "inf", "1e400", "1e999999999", "1e-3", "0x10", "true"]
NOT_FINITE = ["nan", "inf", "-inf", "x", "", "-1e-9", "-1e-300"]


@pytest.mark.parametrize(
    ("convert", "accepted", "refused", "expected"),
    [
        (positive_int, WHOLE, [*NOT_WHOLE, "0"], "whole number"),
        (non_negative_int, {**WHOLE, "0": 0}, NOT_WHOLE, "whole number"),
        (size, {"1": 1, "4194304": 1 << 22}, [*NOT_WHOLE, "0", "4194305", "1e12"], "from 1 to 4194304, got"),
        (worker_count, {"0": 0, "1024": 1024}, [*NOT_WHOLE, "1025", "1e9", "9" * 5000], "from 0 to 1024, got .{,45}$"),
        (frame_rate, {"29.97": 29.97, "1000": 1000.0}, [*NOT_FINITE, "0", "1e300"], "at most 1000, got"),
        (positive_float, {"1e-300": 1e-300}, [*NOT_FINITE, "0"], "expected a number"),
        (non_negative_float, {"0": 0.0}, NOT_FINITE, "expected a number"),
        (fraction, {"0": 0.0}, [*NOT_FINITE, "1"], "expected a number"),
        (average_length, {"1e-3": 1e-3, "0.2886": 0.2886}, [*NOT_FINITE, "0", "0.2887"], "at most 0.2886"),
        (sizes, {"1": (1,), "0,1e1,2": (0, 10, 2)}, ["", "1,", "1,-1", "a"], "whole number"),
        (two_fractions, {"0.9,.990": (0.9, 0.99)}, ["0.9", "0.9,0.9,0.9"], "2 values with ',' between them"),
        (two_fractions, {}, ["0.9,1"], "from 0 to below 1"),
        (templates, {"{}|a {}": ("{}", "a {}")}, ["", "{}|a sound"], r"expected \{\} for the name in every sentence"),
        (Names("wandb"), {"None": ()}, ["none,wandb", "mlflow", "", ","], "comma list of wandb"),
        (Names("image", "text"), {"Text, image,text": ("image", "text")}, ["imgae,text"], r"; did you mean image\?"),
    ],
)
def test_values_are_read_exactly_and_what_is_none_or_out_of_range_is_refused(convert, accepted, refused, expected):
    for text, number in accepted.items():
        assert convert(text) == number and type(convert(text)) is type(number)
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError, match=expected):
            convert(text)


@pytest.mark.parametrize(
    ("convert", "text", "saved"),
    [
        (sizes, "0,1e1,2", "0,10,2"),
        (two_fractions, "0.9,.990", "0.9,0.99"),
        (Names("wandb", "tensorboard"), "WandB, tensorboard,wandb", "tensorboard,wandb"),
        (Names("wandb"), "None", "none"),
    ],
)
def test_config_yaml_holds_a_list_as_the_text_of_a_command_line(convert, text, saved):
    parser = ArgumentParser()
    parser.add_argument("--given", type=convert, default=text)
    parser.add_argument("--unset", type=convert)
    for args in (parser.parse([]), parser.parse(["--given", text])):
        assert args.given == convert(text) == convert(saved) and args.unset is None
        assert parser.settings(args) == {"given": saved, "unset": None}


@dataclass
class Thawing:
    """A flag that needs another one."""

    thaw: int = flag(
        0, "updates after which frozen layers learn", positive_int, requires=when("freeze", "early", "all")
    )
    freeze: str = flag("none", "layers that do not learn", choices=("none", "early", "all"))


def test_a_flag_that_does_nothing_is_an_error_on_the_command_line_and_let_pass_in_a_file(config):
    parser = ArgumentParser("train_vae.py")
    parser.add_config(Thawing)
    parser.add_argument("--config")
    assert parser.parse(["--config", config("thaw: 3")]).thaw == 3
    assert parser.parse(["--config", config("freeze: all"), "--thaw", "5"]).thaw == 5
    line = error_line(parser, "--config", config("freeze: none"), "--thaw", "3")
    assert line == "--thaw has no effect with --freeze none; leave it out, or give --freeze early or all"


def test_command_line_wins_over_config_wins_over_default(parser, config):
    path = config("batch_size: 16\nlearning_rate: 1e-4\n")
    args = parser.parse(["--config", path, "--batch_size", "32"])
    assert args.on_command_line == {"config", "batch_size"}
    assert (args.batch_size, args.learning_rate, args.epochs) == (32, 1e-4, 20)
    assert args.explicit == {"config", "batch_size", "learning_rate"}


@pytest.mark.parametrize(
    ("argv", "text", "power", "decay"),
    [
        ("--ema_power 0.05 .10", "", [0.05, 0.1], 0.0),
        ("--ema_decay 0.9", "ema_power: [0.05, 0.1]", None, 0.9),
        ("--ema_decay 0", "ema_power: [0.05]", [0.05], 0.0),
        ("--ema_decay 0 --ema_power 0.05", "ema_decay: 0.9", [0.05], 0.0),
    ],
)
def test_of_flags_that_exclude_one_another_the_command_line_wins(parser, config, argv, text, power, decay):
    args = parser.parse(["--config", config(text), *argv.split()])
    assert (args.ema_power, args.ema_decay) == (power, decay)
    again = parser.parse(["--config", config(yaml.safe_dump(parser.settings(args)))])
    assert (again.ema_power, again.ema_decay) == (power, decay)


def test_a_flag_beside_another_one_that_excludes_it_is_an_error_but_not_beside_a_default(config):
    parser = ArgumentParser("train_vae.py")
    parser.add_config(Averaged)
    assert parser.parse([]).ema_decay == 0.999
    for argv in (["--ema_power", "0.05"], ["--config", config("ema_power: [0.05]")]):
        assert vars(parser.parse(argv)).items() >= {"ema_power": [0.05], "ema_decay": 0.0}.items()
    both = "--ema_power and --ema_decay exclude one another; give one of them"
    assert both in error_line(parser, "--ema_power", "0.05", "--ema_decay", "0.9")
    assert both in error_line(parser, "--config", config("{ema_power: [0.05], ema_decay: 0.9}"))


@pytest.mark.parametrize(
    ("said", "shape"),
    [("--lr_cosine", "cosine"), ("--lr_schedule Cosine", "cosine"), ("lr_cosine: true", "cosine"),
     ("lr_schedule: cosine", "cosine"), ("lr_cosine: false", "constant"), ("", "constant")],
)  # fmt: skip
def test_a_cosine_has_two_names(config, said, shape):
    parser = ArgumentParser("train_vae.py")
    parser.add_config(RateFlags)
    parser.add_argument("--config")
    args = parser.parse(said.split() if said.startswith("--") else ["--config", config(said)])
    assert args.lr_schedule == shape and parser.settings(args)["lr_schedule"] == shape


def test_config_values_become_what_the_command_line_would_make_of_them(parser, config):
    path = config(
        "learning_rate: 5e-5\nmax_steps: 1e3\nbatch-size: 1_024\nprecision: BF16\ndistr_backend: DDP\ncompile: true\n"
        "flip: no\nno_mixing: yes\nchannel_widths: [32, 64]\ncrop: [8, 9]\nimage_folder: 010\n"
        "report_to: wandb,tensorboard\n"
    )
    args = parser.parse(["--config", path])
    assert (args.learning_rate, args.max_steps, args.batch_size) == (5e-5, 1000, 1024)
    assert (args.precision, args.distributed_backend) == ("bf16", "ddp")
    assert (args.compile, args.flip, args.mixing) == (True, False, False)
    assert (args.channel_widths, args.crop) == ([32, 64], [8, 9])
    assert (args.image_folder, args.report_to) == ("010", ("tensorboard", "wandb"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch_sizes: 8", "line 1: 'batch_sizes'; batch_size?"),
        ("config: other.yaml", "config"),
        ("seed: 0\nbatch_size: eight", "line 2: batch_size: 1 4194304, 'eight'"),
        ("distributed_backend: dpp", "expected one of auto, ddp; got 'dpp'; did you mean ddp?"),
        ("distributed_backend: other", "expected one of auto, ddp; got 'other' "),
        ("precision: off", "precision: fp32, tf32, bf16, fp16; 'off'"),
        ("image_folder: on", "image_folder: text, 'on'"),
        ("compile: 1", "compile: true false, '1'"),
        ("crop: [1, 2, 3]", "crop: 2 3"),
        ("seed: 1\ndistr_backend: ddp\ndistributed_backend: ddp", "line 3: distributed_backend 'distr_backend'"),
        ("[a, b]: 1", "key"),
        ("- batch_size", "mapping"),
        ("batch_size: [8", "YAML"),
        ("[" * 1_000, "YAML"),
        ("compile: !!bool maybe", "compile: true false, 'maybe'"),
        ("seed: !!python/object/apply:os.system ['true']", "seed: list"),
        ("wandb_tags: []", "wandb_tags: at least one value, empty list"),
        ("wandb_tags: [a, 'b,c']", "wandb_tags: without ',' 'b,c'"),
        ("wandb_tags: [a, on]", "wandb_tags: text, 'on' quotes"),
        ("wandb_tags: [a, [b]]", "wandb_tags: single value, a list"),
        ("report_to: [wandb, mlflow]", "report_to: none, tensorboard, wandb; 'wandb,mlflow'"),
    ],
)
def test_a_mistake_in_a_config_names_file_line_key_and_value(parser, config, text, expected):
    path = config(text)
    line = error_line(parser, "--config", path)
    assert path in line and [word for word in expected.split() if word not in line] == []


# Flag whose values the command line joins -> a text of it.
JOINED = {
    "attention_levels": "1,2", "betas": "0.5,0.9", "ch_mult": "1,2,2", "clip_frames": "1,5",
    "condition_on": "image,text", "crop_area": "0.5,1", "discr_betas": "0.5,0.9", "fsq_levels": "8,5,5",
    "image_size": "16x32", "layers": "compress_space:8,residual", "lr_drop_epochs": "10,20.5",
    "num_resnet_blocks": "1,2", "profile_steps": "2:3", "report_to": "tensorboard,wandb", "time_levels": "0,1",
    "wandb_tags": "a b,010", "zero_shot_templates": "a {}|the {}",
}  # fmt: skip


def test_values_that_the_command_line_joins_may_be_a_list_in_a_config(config):
    tried = set()
    for action in (action for script in SCRIPTS.values() for action in script.module.build_parser()._actions):
        if hasattr(action.type, "separator") and not action.nargs:
            name, text = action.dest, JOINED[action.dest]
            path = config(yaml.safe_dump({name: text.split(action.type.separator)}).replace("'1'", "1"))
            assert read_flags(path, {name: action}, (), str) == ({name: action.type(text)}, {name: name})
            tried.add(name)
    assert tried == set(JOINED)


def test_lists_of_joined_values_have_one_for_each_unet(config):
    values, _ = read_flags(
        config("dim_mults: [[1, 2], '1,4']\nnum_resnet_blocks: [2, 1]\nswitches: [[], none, [coordinates]]"),
        {action.dest: action for action in SCRIPTS["train_decoder"].module.build_parser()._actions}, (), str,
    )  # fmt: skip
    assert values["dim_mults"] == [(1, 2), (1, 4)] and values["num_resnet_blocks"] == [(2,), (1,)]
    assert values["switches"] == [(), (), ("coordinates",)]


def test_a_config_that_cannot_be_read_is_named(parser, tmp_path):
    assert "No such file" in error_line(parser, "--config", str(tmp_path / "none.yaml"))
    assert "Is a directory" in error_line(parser, "--config", str(tmp_path))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\x00")
    assert "no UTF-8 text" in error_line(parser, "--config", str(tmp_path / "binary.yaml"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--batch_sise=8"], "--batch_sise; --batch_size?"),
        (["--data_dir", "photos"], "--data_dir; --image_folder?"),
        (["--resume", "x"], "--resume: again"),
        (["--gpus=8"], "--gpus: launcher"),
        (["photos"], "'photos'"),
        (["--batch_size", "0"], "--batch_size: 1 4194304, '0'"),
        (["--report_to", "mlflow"], "--report_to: none, tensorboard, wandb;"),
        (["--x\x1b[2J\0"], "--x?[2J?"),
        (["--flip", "True"], "--flip is a switch without a value, got 'True': give --flip or --no-flip alone"),
        (["--no_mixing", "True"], "give --no_mixing or nothing alone"),
        (["--output_dir", ""], "--output_dir expected a path, got ''"),  # an unset "$RUN"
        (["--distributed_backend", "dpp"], "expected one of auto, ddp; got 'dpp'; did you mean ddp?"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(parser, argv, expected):
    line = error_line(parser, *argv)
    assert [word for word in expected.split() if word not in line] == []


def test_nothing_is_suggested_that_is_unlike_what_was_given():
    assert did_you_mean("quite_another", ("auto", "ddp")) == ""


def test_letters_in_another_order_suggest_the_name_that_has_them():
    """difflib finds fsq and lfq equally like fqs, and decides by the alphabet."""
    assert did_you_mean("fqs", ("lfq", "vq", "fsq")) == "; did you mean fsq?"


def test_off_the_root_a_mistake_of_all_is_silent_and_one_that_may_be_its_own_is_said_after_the_root_had_time_to_speak(
    capsys, monkeypatch
):
    waited = []
    monkeypatch.setattr("tandem.config.parser.time.sleep", waited.append)
    other = ArgumentParser("train_vae.py", is_root=lambda: False)
    with pytest.raises(SystemExit) as exit_:
        other.error("too few images", is_agreed=True)
    assert exit_.value.code == 2 and waited == [2.0] and capsys.readouterr() == ("", "")
    assert error_line(other, "--nonsense") == "unknown flag --nonsense" and waited == [2.0, 10.0]


def path_actions() -> Iterator[tuple[str, argparse.Action]]:
    """The arguments of all programs that take a path, and the program of each."""
    for program in PROGRAMS:
        parsers = [importlib.import_module(program.removesuffix(".py")).build_parser()]
        for parser in parsers:
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    parsers += dict.fromkeys(action.choices.values())
                elif action.metavar in PATHS or (action.metavar == "NAME" and action.dest in ("output", "clip")):
                    yield program, action


def test_every_path_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    found = list(path_actions())
    names = {action.dest for _, action in found}
    assert names > {"output_dir", "init_from", "image_folder", "deepspeed_config", "cache_dir", "runs", "path", "out"}
    for program, action in found:
        convert = action.type or str
        for text, path in {"~/a b": "/home/alice/a b", "~": "/home/alice", "a/~": "a/~"}.items():
            assert convert(text) == path, (program, action.dest)
        for text in ("demo:shapes:64", "alice/model@v1", "s3://a/~/b", "published"):
            assert convert(text) == text, (program, action.dest)


def test_a_path_in_a_config_file_may_begin_with_the_home_folder(parser, config, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    args = parser.parse(["--config", config("output_dir: ~/runs/vae\nvalid_folder: 010\nwandb_name: ~/vae")])
    assert (args.output_dir, args.valid_folder, args.wandb_name) == ("/home/alice/runs/vae", "010", "~/vae")
    assert "quotes" in error_line(parser, "--config", config("output_dir: no"))
