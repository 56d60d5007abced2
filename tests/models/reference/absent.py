"""Packages that a public model imports and does not use, which so need not be installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn


class _Unused(ModuleType):
    """A module whose every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


def unused(names: Sequence[str]) -> None:
    """Let these modules be imported without being installed."""
    for name in names:
        sys.modules[name] = _Unused(name)
