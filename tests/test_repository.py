"""What keeps the repository what it is: independent leaves, scripts that are short and know no backend, one top-level
name when installed."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_package import SOURCES

ROOT = Path(__file__).resolve().parents[1]
LEAVES = ("models", "data", "distributed", "training")
BOTTOM = "tandem"  # what all of them may import
SCRIPTS = sorted(ROOT.glob("train_*.py"))
MODULES = [path for leaf in (BOTTOM, *LEAVES) for path in sorted((ROOT / leaf).rglob("*.py"))]
BACKEND_NAMES = re.compile(
    r"deepspeed|horovod|\bddp\b|DistributedDataParallel|torch\.distributed|nccl|gloo", re.IGNORECASE
)


def absolute_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""


def backend_names(tree: ast.AST) -> Iterator[str]:
    """Where code names a backend: in an identifier, an import or a string. Docstrings and help texts may."""
    texts: list[ast.AST] = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    texts += [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "help"]
    exempt = {id(part) for text in texts for part in ast.walk(text)}
    for node in ast.walk(tree):
        if id(node) not in exempt:
            words = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module", "value")]
            yield from (word for word in words if isinstance(word, str) and BACKEND_NAMES.search(word))


def test_there_are_leaves_and_scripts_to_look_at() -> None:
    assert len(SCRIPTS) >= 1 and {path.relative_to(ROOT).parts[0] for path in MODULES} == {BOTTOM, *LEAVES}


def test_no_leaf_imports_a_leaf_by_name_and_of_the_installed_package_only_the_bottom_which_imports_neither() -> None:
    for path in MODULES:
        imported = set(absolute_imports(ast.parse(path.read_text())))
        assert not {name.split(".")[0] for name in imported} & {*LEAVES}, path
        ours = {name for name in imported if name.split(".")[0] == BOTTOM}
        is_bottom = path.is_relative_to(ROOT / BOTTOM)
        assert not ours if is_bottom else all(name.startswith(f"{BOTTOM}.files") for name in ours), path


def test_relative_imports_stay_inside_their_leaf() -> None:
    for path in MODULES:
        levels = [node.level for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert max(levels, default=0) <= len(path.relative_to(ROOT).parts) - 1, path


# Those train two models, or several.
LONGER = ("train_vqgan.py", "train_tokenizer.py", "train_decoder.py")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_read_in_one_sitting(path: Path) -> None:
    text = path.read_text()
    length = len(text.splitlines())
    assert length <= (280 if path.name in LONGER else 250)
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    for name, longest in (("train", 70), ("main", 10)):
        assert (functions[name].end_lineno or 0) - functions[name].lineno + 1 <= longest, name


def blocks(text: str, size: int = 6) -> set[tuple[str, ...]]:
    """Every run of six lines of code; imports and the parser's first lines, which scripts share, interrupt a run."""
    tree = ast.parse(text)
    shared = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "build_parser":
            shared += node.body[:3]
    skipped = {number for node in shared for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = ["" if number in skipped else line.strip() for number, line in enumerate(text.splitlines(), start=1)]
    kept = [line for n, line in enumerate(lines, start=1) if (line and not line.startswith("#")) or n in skipped]
    return {block for n in range(len(kept)) if all(block := tuple(kept[n : n + size])) and len(block) == size}


@pytest.mark.parametrize("pair", itertools.combinations(SCRIPTS, 2), ids=lambda pair: f"{pair[0].stem}-{pair[1].stem}")
def test_no_six_lines_stand_in_two_scripts(pair: tuple[Path, Path]) -> None:
    ours, theirs = (blocks(path.read_text()) for path in pair)
    assert ours & theirs == set()


def test_six_equal_lines_are_found_whatever_stands_between_them() -> None:
    lines = [f"x{n} = f({n})" for n in range(6)]
    spread = "\n\n# why\n".join(f"    {line}" for line in lines)
    assert blocks("\n".join(lines)) & blocks(f"def g():\n{spread}") == {tuple(lines)}
    assert not blocks("\n".join([*lines[:3], "import a", *lines[3:]]))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_names_no_backend_outside_its_docstring_and_help(path: Path) -> None:
    assert list(backend_names(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("code", [
    "import deepspeed", "from torch.nn.parallel import DistributedDataParallel", "import torch.distributed as dist",
    "if args.using_deepspeed: pass", "f(backend='horovod')", "f(use_nccl=True)", "name == 'ddp'", "f'{x} on gloo'",
])  # fmt: skip
def test_a_backend_that_is_named_is_found(code: str) -> None:
    assert list(backend_names(ast.parse(code)))


def test_a_backend_in_a_docstring_or_a_help_text_is_none() -> None:
    assert not list(backend_names(ast.parse("'''deepspeed train_vae.py'''\nadd('--x', help='not under horovod')")))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither an old build/ enters it nor a new one stays behind."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in dict.fromkeys(SOURCES):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "-w", str(built)]
    command = [sys.executable, "-m", "pip", "wheel", *flags, "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_of_the_leaves_the_parts_of_the_report_and_one_top_level_name(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    paths = {path.relative_to(ROOT).as_posix() for path in MODULES}
    assert names >= {path if path.startswith(f"{BOTTOM}/") else f"tandem/{path}" for path in paths}
    parts = [path.relative_to(ROOT) for path in (ROOT / "training/report/page").iterdir()]
    assert len(parts) >= 6 and names >= {f"tandem/{path.as_posix()}" for path in parts}
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"tandem"}


def test_trained_weights_load_through_the_installed_package(wheel: Path, tmp_path: Path) -> None:
    """Nothing of the repository is in reach: isolated mode, another folder, the wheel alone on the path."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
import tandem.data, tandem.distributed, tandem.training
from tandem.models import DiscreteVAE
DiscreteVAE(image_size=8, num_tokens=4, hidden_dim=4).save_pretrained("weights")
DiscreteVAE.from_pretrained("weights")
assert {str(ROOT)!r} not in tandem.data.__file__
assert "distributed" not in sys.modules
"""
    subprocess.run([sys.executable, "-I", "-c", program], cwd=tmp_path, check=True)


def test_the_readme_names_every_folder_of_code_and_holds_no_placeholder() -> None:
    text = (ROOT / "README.md").read_text()
    assert "@@" not in text and "TODO" not in text
    folders = {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in MODULES}
    assert [name for name in sorted(folders) if name not in text] == []
