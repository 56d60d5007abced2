"""What keeps the repository what it is: independent leaves, scripts that are short and know no backend, one top-level
name when installed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEAVES = ("models", "data", "distributed", "training")
BOTTOM = "tandem"  # what all of them may import
SCRIPTS = sorted(ROOT.glob("train_*.py"))
MODULES = [path for leaf in (BOTTOM, *LEAVES) for path in sorted((ROOT / leaf).rglob("*.py"))]
BACKEND_NAMES = re.compile(
    r"deepspeed|horovod|\bddp\b|DistributedDataParallel|torch\.distributed|nccl|gloo", re.IGNORECASE
)


def absolute_imports(tree: ast.AST) -> Iterator[str]:
    """Names of modules, but for those that only a type checker imports."""
    of_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    unread = {id(part) for node in of_types for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in unread:
            continue
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


def test_no_leaf_imports_a_leaf_by_name_and_of_the_installed_package_only_the_bottom_which_imports_neither() -> None:
    for path in MODULES:
        imported = set(absolute_imports(ast.parse(path.read_text())))
        assert not {name.split(".")[0] for name in imported} & {*LEAVES}, path
        ours = {name for name in imported if name.split(".")[0] == BOTTOM}
        is_bottom = path.is_relative_to(ROOT / BOTTOM)
        assert not ours if is_bottom else all(name.split(".")[1:2] != ["commands"] for name in ours), path


def test_one_line_alone_ends_a_process() -> None:
    ways = re.compile(r"\bos\._exit\(|\bsys\.exit\(|\bSystemExit\(")
    found = {path for path in [*MODULES, *ROOT.glob("*.py")] if ways.search(path.read_text())}
    assert found == {ROOT / BOTTOM / "files" / "exits.py"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_names_no_backend_outside_its_docstring_and_help(path: Path) -> None:
    assert list(backend_names(ast.parse(path.read_text()))) == []
