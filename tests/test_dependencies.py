"""What is used of the inside of other packages is there: a test of a new version of them says in one line what went."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest
import torch

from tests.scripts import ROOT

ADAPTER = ROOT / "distributed" / "backends" / "deepspeed"
SOURCES = {
    "deepspeed": sorted(ADAPTER.glob("*.py")),
    "open_clip": sorted((ROOT / "models").glob("*.py")),
    "huggingface_hub": [ROOT / "models" / "files" / "hub.py", ROOT / "hub.py"],
    "torch_fidelity": [ROOT / "training" / "measures" / "fid.py"],
}


def chain(node: ast.AST) -> str:
    """`a.b.c` of nested attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    inner = chain(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def names_used(package: str, path: Path) -> Iterator[str]:
    """Dotted names of a package that a file imports or reads."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := chain(node)).startswith(f"{package}."):
            yield name


def private_names_of_torch() -> set[str]:
    """Those that any module uses; a private name may go with any version."""
    used = {
        name
        for folder in ("data", "distributed", "models", "training", "tandem")
        for path in (ROOT / folder).rglob("*.py")
        for name in names_used("torch", path)
    }
    return {name for name in used if any(part.startswith("_") and part[:2] != "__" for part in name.split("."))}


def is_there(name: str) -> bool:
    root, *rest = name.split(".")
    found = importlib.import_module(root)
    for index, part in enumerate(rest):
        if not hasattr(found, part):
            try:
                found = importlib.import_module(".".join([root, *rest[: index + 1]]))
            except ImportError:
                return False
        else:
            found = getattr(found, part)
    return True


def test_every_private_name_of_torch_that_is_used_is_in_the_installed_version() -> None:
    used = private_names_of_torch()
    gone = sorted(name for name in used if not is_there(name))
    assert "torch._foreach_norm" in used and not gone, f"torch {metadata.version('torch')} has no {', '.join(gone)}"


@pytest.mark.parametrize(("package", "distribution"), [
    ("deepspeed", "deepspeed"), ("open_clip", "open_clip_torch"), ("huggingface_hub", "huggingface_hub"),
    ("torch_fidelity", "torch-fidelity"),
])  # fmt: skip
def test_every_name_that_is_used_is_in_the_installed_version(package: str, distribution: str) -> None:
    used = {name for path in SOURCES[package] for name in names_used(package, path)}
    gone = sorted(name for name in used if not is_there(name))
    assert used and not gone, f"{distribution} {metadata.version(distribution)} has no {', '.join(gone)}"


def test_what_is_used_of_torchs_objects_is_in_the_installed_version() -> None:
    from torch.distributed.fsdp import FSDPModule

    from distributed.backends.fsdp.engine import _END_OF_BACKWARD

    version = f"torch {torch.__version__}"
    assert hasattr(FSDPModule, "_get_fsdp_state"), f"FSDPModule of {version} has no _get_fsdp_state"
    state = get_type_hints(FSDPModule._get_fsdp_state)["return"]
    assert hasattr(state, _END_OF_BACKWARD), f"FSDP's state of {version} has no {_END_OF_BACKWARD}"
    flag = "_step_supports_amp_scaling"  # of optimizers that skip an update themselves
    assert flag in inspect.getsource(torch.amp.GradScaler.step), f"GradScaler of {version} reads no {flag}"


def test_what_is_used_of_open_clip_is_checked_when_it_is_imported() -> None:
    from models import clip

    used = {name.split(".")[1] for path in SOURCES["open_clip"] for name in names_used("open_clip", path)}
    assert used == set(clip._OF_PACKAGE)


def test_a_name_that_is_gone_is_found() -> None:
    assert is_there("deepspeed.zero.Init._zero_init_param") and not is_there("deepspeed.zero.Init.gone")
    assert is_there("deepspeed.utils.logger") and not is_there("deepspeed.gone.logger")


def test_what_is_used_of_deepspeeds_engine_is_checked_when_a_model_is_wrapped() -> None:
    from distributed.backends.deepspeed import state

    names = {chain(node) for node in ast.walk(ast.parse((ADAPTER / "engine.py").read_text()))}
    of_engine = {name.split(".")[2] for name in names if name.startswith("self._ds._")}
    assert of_engine and of_engine <= set(state._OF_ENGINE)
    of_classes = {name.removeprefix("deepspeed.") for name in names if re.match(r"deepspeed\..*\._", name)}
    assert of_classes and of_classes <= set(state._OF_CLASSES)


@pytest.mark.parametrize("stage", range(4))
def test_what_another_version_lacks_is_named_in_one_line(stage: int) -> None:
    from distributed import UserMistake
    from distributed.backends.deepspeed import state

    engine = SimpleNamespace(**dict.fromkeys(state._OF_ENGINE))
    optimizer = SimpleNamespace(**dict.fromkeys(state._OF_ZERO[stage]))
    state.check_inside(engine, optimizer, stage)
    del engine._config
    with pytest.raises(UserMistake) as raised:
        state.check_inside(engine, optimizer, stage)
    assert f"at ZeRO {stage} has no engine._config: it differs from the versions" in str(raised.value)
    assert "\n" not in str(raised.value)
