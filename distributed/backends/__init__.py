"""One file or folder per backend, each with a subclass of `Backend`; a new one is found without a list."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from tandem.distributed.base import Backend


@cache
def all_backends() -> dict[str, type[Backend]]:
    """Every backend by name, in the order in which ``--distributed_backend auto`` tries them."""
    backends: list[type[Backend]] = []
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        backends += [
            cls
            for cls in vars(module).values()
            if isinstance(cls, type) and issubclass(cls, Backend) and cls.__module__.startswith(module.__name__)
        ]
    return {backend.name: backend for backend in sorted(backends, key=lambda backend: backend.auto_order)}
