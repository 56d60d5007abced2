"""What the documents name exists: links, paths, commands, flags and make's targets; and their Python runs."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from filling import SIZE as SIDE
from filling import autoencoder, film_autoencoder, mulan, video_tokenizer, vqgan

import embed
import encode
from scripts import tested
from tandem.data.tokenizers import open_tokenizer
from tandem.io.renamed import FORMER_SETTINGS
from tandem.models import VQGAN, Decoder, DiscreteVAE, VideoTokenizer
from tests.hub_server import TOKEN, reached
from tests.models.reference.autoencoders import written
from tests.models.test_decoder import SMALL
from tests.scripts import SCRIPTS, words

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
AT_THE_TOP = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"))]
DOCUMENTS = [*AT_THE_TOP, *sorted((ROOT / "docs").glob("*.md"))]
# How a command line names a program -> the module with its build_parser.
PROGRAMS = {
    "benchmarks": "benchmarks.__main__",
    "benchmarks.gpu": "benchmarks.gpu.__main__",
} | {path.name: path.stem for path in ROOT.glob("*.py") if "def build_parser(" in path.read_text()}
STARTERS = {"python", "torchrun", "deepspeed", "horovodrun", "mpirun", "srun", "until", "uv"}
FLAGS_OF_OTHERS = {
    "--allow-run-as-root", "--build-arg", "--cpus-per-task", "--editable", "--extra", "--gpus", "--gpus-per-task",
    "--hostfile", "--index-url", "--ipc", "--logdir", "--master_addr", "--max-restarts", "--module", "--nnodes",
    "--no-deps", "--node_rank", "--nproc_per_node", "--ntasks", "--open-mode", "--overlap", "--pty", "--rdzv_backend",
    "--rdzv_endpoint", "--rdzv_id", "--requeue", "--rm", "--shm-size", "--signal", "--signals_to_handle", "--time",
    "--gpu", "--max_failures", "--metric", "--trials", "--workers",  # of examples/
}  # fmt: skip
FOLDERS = "benchmarks|configs|distributed|docs|examples|scripts|tandem|tests"
WRITTEN_BY_PROGRAMS = {"benchmarks/results/latest.json", "benchmarks/results/gpu.json"}


CONFIGS = sorted((ROOT / "configs").glob("*/*.yaml"))

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@cache
def parser_of(program: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = importlib.import_module(PROGRAMS[program]).build_parser()
    return parser


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Every flag, those of sub-commands among them."""
    flags = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            flags = flags.union(*map(flags_of, action.choices.values()))
    return flags


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Program and arguments of every command that starts one of the programs, in a code block or in inline code."""
    lines = text.replace("\\\n", " ").splitlines()
    for line in [line for line in lines if "`" not in line] + re.findall(r"`([^`\n]+)`", text):
        if line.split() and line.split()[0] in STARTERS:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words = list(lexer)
            start = next((n for n, word in enumerate(words) if word in PROGRAMS), len(words))
            end = next((n for n, word in enumerate(words) if n > start and set(word) <= set("();<>|&")), None)
            if start < len(words):
                yield words[start], words[start + 1 : end]


def anchors(document: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: Path) -> Iterator[tuple[Path, str]]:
    """Targets inside the repository: file and anchor, which may be empty."""
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            yield (document.parent / name).resolve() if name else document, anchor


@each_document
def test_every_link_leads_somewhere(document: Path) -> None:
    for path, anchor in links(document):
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), f"{path.name}#{anchor}"


def test_every_page_is_reached_from_the_readme() -> None:
    seen, found = set(), [README]
    while found:
        document = found.pop()
        if document.suffix == ".md" and document not in seen:
            seen.add(document)
            found += [path for path, _ in links(document)]
    assert seen == set(DOCUMENTS)


def test_the_page_of_the_tests_is_that_of_todays_tests() -> None:
    assert tested.PAGE.read_text() == tested.page(), "run python scripts/tested.py"


@each_document
def test_every_path_that_is_named_exists(document: Path) -> None:
    """Tests may be named by their path below tests/. Capital letters stand for a name to choose."""
    text = document.read_text()
    paths = set(re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./*-]*(?<!\.)", text)) - WRITTEN_BY_PROGRAMS
    scripts = set(re.findall(r"(?<![\w/.*])[\w*]+(?:/[\w*]+)*\.py\b", text))
    named = sorted(name for name in paths | scripts if name.islower())
    assert [name for name in named if not [*ROOT.glob(name), *(ROOT / "tests").glob(name)]] == []


@each_document
def test_every_command_is_one_that_its_program_takes_and_writes_nothing_that_git_would_commit(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Capital letters stand for a name to choose."""
    written = set()
    for program, arguments in commands(document.read_text()):
        known = [word for word in arguments if word not in ("--help", "--help_all", "--version")]
        try:
            args = vars(parser_of(program).parse_args(known))
        except SystemExit:
            pytest.fail(f"{program} {arguments}: {capsys.readouterr().err}")
        if known == arguments:
            names = [args.get(name) for name in ("output", "output_dir", "out")]
            ending = ".json" if program == "evaluate.py" else ""
            named = {f"{name.removesuffix(ending)}{ending}" for name in names if name and not name.isupper()}
            written |= {name.removeprefix("./") for name in named}
    if (ROOT / ".git").exists():
        command = ["git", "check-ignore", "--no-index", *sorted(written)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert {*done.stdout.split()} == written, done.stderr


def test_the_readme_names_every_extra_that_a_user_may_want() -> None:
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = {*re.findall(r"^(\w+) = \[", text, re.MULTILINE)} - {"test", "docs"}
    assert {"audio", "all"} <= extras
    assert [name for name in sorted(extras) if f"[{name}]" not in README.read_text()] == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the Python of the documents reads: small models, and what encode.py and embed.py made
    with them."""
    folder = tmp_path_factory.mktemp("documents")
    models = {
        "vae-demo": DiscreteVAE.from_dict({"image_size": SIDE, "num_layers": 1, "num_tokens": 8, "hidden_dim": 4}),
        "vqgan-demo": vqgan(), "tokenizer-demo": video_tokenizer(), "mulan-demo": mulan(), "latents": autoencoder(),
        "decoder": Decoder.from_dict(SMALL), "video_vae": film_autoencoder(),
    }  # fmt: skip
    for name, model in models.items():
        model.save_pretrained(folder / "runs" / name / "model")
    images, films = ["--image_folder", "demo:shapes:4"], ["--video_folder", "demo:moving:2"]
    vqgan().save_pretrained(folder / "weights" / "photos")  # what docs/first_tokenizer.md exports
    for name, model, data in (
        ("codes", "vqgan-demo", images), ("latents", "latents", images), ("runs/video_vae/latents", "video_vae", films),
    ):  # fmt: skip
        encode.main(["--model", str(folder / "runs" / model / "model"), *data, "--output", str(folder / name),
                     "--num_workers", "0"])  # fmt: skip
    embed.main(["--model", str(folder / "runs" / "mulan-demo" / "model"), "--audio", "demo:tones:4",
                "--output", str(folder / "index"), "--num_workers", "0"])  # fmt: skip
    return folder


@each_document
def test_the_python_of_a_page_runs(document: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    generator = torch.Generator().manual_seed(0)
    names: dict[str, Any] = {
        "images": torch.rand(2, 3, SIDE, SIDE, generator=generator),
        "videos": torch.rand(1, 3, 5, SIDE, SIDE, generator=generator),
        "film": torch.rand(1, 3, 5, SIDE, SIDE, generator=generator).split(1, dim=2),
        "waveforms": torch.rand(1, 4000, generator=generator),
    }
    for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        if block.startswith("for step, batch in training.updates("):  # the loop of a script, which stands in none alone
            continue
        if "scaling_factor" in block:
            names["model"] = VQGAN.from_pretrained("runs/latents/model")
        with hub_of_a_page(trained) if "alice/" in block else nullcontext():
            exec(compile(block, str(document), "exec"), names)


@contextmanager
def hub_of_a_page(folder: Path) -> Iterator[None]:
    """A stand-in for the Hub, with the models that docs/hub.md names."""
    with reached(folder / "hub") as hub:
        model = {path.name: path.read_bytes() for path in (folder / "runs" / "vqgan-demo" / "model").iterdir()}
        of_diffusers = {path.name: path.read_bytes() for path in written("sd", folder).iterdir()}
        file = written("taming", folder).read_bytes()
        hub.publish("alice/faces", model)
        hub.repositories["alice/faces"].branches["v2"] = hub.repositories["alice/faces"].branches["main"]
        hub.repositories["alice/faces"].private = True
        hub.publish("stabilityai/sd-vae-ft-mse", of_diffusers)
        hub.publish("alice/experiments", {"epoch_8.ckpt": b"", "epoch_9.ckpt": file})
        yield


def test_commands_are_found() -> None:
    found = {program for document in DOCUMENTS for program, _ in commands(document.read_text())}
    assert found == set(PROGRAMS)


def said_with(config: Path, folder: Path) -> list[str]:
    """Flags beside a config file: one that trains a decoder alone starts from a model, of whose shape it is."""
    said = ["--config", str(config)]
    if "train: decoder" in config.read_text():
        is_of_videos = config.parent.name == "tokenizer"
        sizes = {"body": "wan", "init_dim": 4} if is_of_videos else {"body": "taming", "dim": 4, "norm_groups": 2}
        shape = {**sizes, "quantizer": "kl"}
        (VideoTokenizer if is_of_videos else VQGAN).from_dict(shape).save_pretrained(folder)
        said += words({**shape, "init_from": folder})
    return said


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_config_is_one_that_its_script_takes_and_builds_its_models_of(config: Path, tmp_path: Path) -> None:
    name = f"train_{config.parent.name}"
    script, args = importlib.import_module(name), SCRIPTS[name].config(*said_with(config, tmp_path))
    if config == ROOT / "configs/vae/base.yaml":  # the documents say: defaults
        defaults, said = vars(script.build_parser().parse([])), args.invocation.explicit - {"config", "valid_fraction"}
        assert {name: vars(args)[name] for name in said} == {name: defaults[name] for name in said}
    more: dict[str, Any] = {  # that a model is built with
        "train_mulan": lambda: [open_tokenizer("clip", args.max_text_tokens)],
        "train_decoder": lambda: [{"image_embed": 512, "text_encodings": (77, 512)}],
    }
    with torch.device("cpu" if getattr(args, "init_from", None) else "meta"):  # shapes alone
        assert list(script.build_model(args, *more.get(name, list)()).parameters())
        if name in ("train_vqgan", "train_tokenizer"):
            script.build_discriminator(args)


@each_document
def test_every_flag_that_is_named_is_one_of_a_program_or_launcher(document: Path) -> None:
    text = re.sub(r"^#SBATCH.*$", "", document.read_text(), flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    former = {f"--{name}" for name in FORMER_SETTINGS} if document.name == "CHANGELOG.md" else set()
    assert named - former <= FLAGS_OF_OTHERS.union(*(flags_of(parser_of(program)) for program in PROGRAMS))
