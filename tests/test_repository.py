"""What keeps the repository what it is: imports that go one way, scripts that are short and know no backend."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tandem"
SCRIPTS = sorted(ROOT.glob("train_*.py"))
#: What the modules of each folder of tandem/, or a module beside the folders, may import of the others.
MAY_IMPORT = {
    "io": "",
    "hashing": "",
    "schedules": "",
    "devices": "",
    "flops": "",
    "sides": "",
    "transforms": "",
    "config": "sides io schedules",
    "distributed": "io devices config flops",
    "models": "sides io config",
    "models.layers": "sides config flops models",
    "models.quantizers": "config devices",
    "models.autoencoders": "sides transforms config models models.layers models.quantizers",
    "models.diffusion": "config devices models models.layers",
    "models.audio_text": "io config models models.layers",
    "models.features": "io devices models",
    "weights.formats": "sides io config models models.layers models.autoencoders models.diffusion models.audio_text",
    "data": "sides io hashing devices data.sources data.decoding",
    "data.decoding": "sides io hashing data data.sources",
    "data.sources": "sides io hashing data",
    "training": "sides io hashing devices flops transforms config",
    "reporting": "io training",
    "embedding": "data data.decoding devices distributed models weights",
    "coders": "sides io devices data data.decoding distributed models models.layers models.autoencoders training",
    "measuring": "sides io devices data distributed embedding models.features models.layers training weights",
    "commands": "io",
    "weights": "sides io commands config data models training reporting weights.formats",
    "launch": "commands config data distributed models training weights weights.formats",
}
BACKEND_NAMES = re.compile(
    r"deepspeed|horovod|\bddp\b|DistributedDataParallel|torch\.distributed|nccl|gloo", re.IGNORECASE
)


def name_of(path: Path) -> str:
    """The name of a module below tandem/, as one imports it: "models.base"."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {name_of(path): path for path in [*PACKAGE.rglob("*.py"), *(PACKAGE / "distributed").rglob("*.py")]}


def imported_names(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, but for those that only a type checker imports."""
    tree = ast.parse(path.read_text())
    of_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    unread = {id(part) for node in of_types for part in ast.walk(node)}
    package = ["tandem", *path.relative_to(PACKAGE).parent.parts] if path.is_relative_to(PACKAGE) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in unread:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and id(node) not in unread:
            parents = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """The modules of tandem/ that a file imports; "" is the package."""
    names = [name.removeprefix("tandem").lstrip(".") for name in imported_names(path) if name.startswith("tandem")]
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


def folder_of(module: str) -> str:
    """The key of `MAY_IMPORT` that a module belongs to."""
    parts = module.split(".")
    return next(name for n in range(len(parts), -1, -1) if (name := ".".join(parts[:n])) in MAY_IMPORT or not n)


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


def test_imports_go_one_way() -> None:
    for module, path in MODULES.items():
        folder = folder_of(module)
        others = {folder_of(name) for name in own_imports(path)} - {folder, ""}
        assert others <= set(MAY_IMPORT.get(folder, "").split()), path
    TopologicalSorter({module: own_imports(path) - {module} for module, path in MODULES.items()}).prepare()


def test_one_line_alone_ends_a_process() -> None:
    ways = re.compile(r"\bos\._exit\(|\bsys\.exit\(|\bSystemExit\(")
    found = {path for path in [*MODULES.values(), *ROOT.glob("*.py")] if ways.search(path.read_text())}
    assert found == {PACKAGE / "io" / "exits.py"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_names_no_backend_outside_its_docstring_and_help(path: Path) -> None:
    assert list(backend_names(ast.parse(path.read_text()))) == []
