"""The scripts by name. In a checkout they are files beside this package; in an installation they are modules in it,
each with a command: `tandem-train-vae` is the `main` of train_vae.py, and so on."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from .io.installed import HOME, IS_INSTALLED

if TYPE_CHECKING:
    from .config.parser import ArgumentParser


def script_module(script: str) -> ModuleType:
    """The module of a script, such as train_vae.py, by its name in an installation: tandem.train_vae. Raises
    ImportError if there is none."""
    path = HOME / script
    name = f"tandem.{path.stem}"
    if IS_INSTALLED or name in sys.modules:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no script {script}")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script_parser(script: str) -> ArgumentParser:
    """The parser of a training script, such as train_vae.py."""
    parser: ArgumentParser = script_module(script).build_parser()
    return parser


def __getattr__(name: str) -> Callable[[], None]:
    """The `main` of a script, by its module's name: the command tandem-encode is `tandem.commands:encode`."""
    if name.startswith("_") or not (HOME / f"{name}.py").is_file():
        raise AttributeError(f"{__name__} has no command {name}")
    main: Callable[[], None] = script_module(f"{name}.py").main
    return main
