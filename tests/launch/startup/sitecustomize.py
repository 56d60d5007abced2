"""Read by every Python process of a job when it starts (benchmarks/launching.py), because imports take most of a start.
A sixth of them was the search for garbage among what they leave, of which nothing is garbage. A third was that of
PyTorch's compiler, which PyTorch imports with the first optimizer, and a run without --compile never uses."""

import gc
import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

gc.set_threshold(100_000, 20, 100)
COMPILER = "torch._dynamo"


class LazyCompiler(ModuleType):
    """What PyTorch calls where nothing is compiled. Anything else of the compiler imports it."""

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        return function

    @staticmethod
    def graph_break(msg: str = "") -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if COMPILER not in sys.modules or (name.startswith("__") and name != "__path__"):  # asked by the import itself
            raise AttributeError(name)
        if sys.modules[COMPILER] is self:
            sys.meta_path.remove(FINDER)
            del sys.modules[COMPILER]
            importlib.import_module(COMPILER)
        return getattr(sys.modules[COMPILER], name)


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == COMPILER else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LazyCompiler(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


FINDER = Finder()
if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
    sys.meta_path.insert(0, FINDER)
