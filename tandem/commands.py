"""The commands that the package installs: `tandem-train-vae` is the `main` of train_vae.py, and so on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from .files.installed import HOME, IS_INSTALLED


def __getattr__(name: str) -> Callable[[], None]:
    """The command of a script, by its module's name."""
    if name.startswith("_") or not (HOME / f"{name}.py").is_file():
        raise AttributeError(f"{__name__} has no command {name}")
    if IS_INSTALLED:
        module = importlib.import_module(f"tandem.{name}")
    else:  # an editable installation: scripts of a checkout import the folders beside them
        sys.path.insert(0, str(HOME))
        module = importlib.import_module(name)
    main: Callable[[], None] = module.main
    return main
