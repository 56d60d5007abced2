"""The four leaves install as tandem.models, tandem.data, tandem.distributed and tandem.training: a top-level package
called ``distributed`` would break dask. Scripts and tools install as tandem.train_vae and so on, beside configs/ and
docs/. All of them import one another by their names in a checkout: imports are rewritten while the package is built."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

LEAVES = ("models", "data", "distributed", "training")
PACKAGES = [name for leaf in LEAVES for name in (leaf, *(f"{leaf}.{sub}" for sub in find_packages(leaf)))]
TEXTS = ["configs", "docs", "scripts"]  # pyproject.toml says which files of them
SCRIPTS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "setup")
_NAMES = "|".join((*LEAVES, *SCRIPTS))
_IMPORT, _FROM = (re.compile(rf"^(\s*){start}(?=({_NAMES}){end})", re.MULTILINE) for start, end in (
    ("import ", "( as |$)"), ("from ", r"\b[\w.]* import ")
))  # fmt: skip


def as_installed(source: str) -> str:
    """The source of a module with its imports as an installed package has them."""
    return _FROM.sub(r"\1from tandem.", _IMPORT.sub(r"\1from tandem import ", source))


class BuildWithScripts(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        if package in (f"tandem.{name}" for name in TEXTS):
            return []
        scripts = SCRIPTS if package == "tandem" and not self.editable_mode else []
        modules = super().find_package_modules(package, package_dir)
        return [*modules, *((package, name, f"{name}.py") for name in scripts)]

    def build_module(self, module: str, module_file: str, package: str) -> tuple[str, bool]:
        target, is_new = super().build_module(module, module_file, package)
        if not self.editable_mode:
            Path(target).write_text(as_installed(Path(target).read_text(encoding="utf-8")), encoding="utf-8")
        return target, is_new


setup(
    packages=["tandem", "tandem.files", *(f"tandem.{name}" for name in (*PACKAGES, *TEXTS))],
    package_dir={
        "tandem": "tandem",
        "tandem.files": "tandem/files",
        **{f"tandem.{name}": name.replace(".", "/") for name in (*PACKAGES, *TEXTS)},
    },
    cmdclass={"build_py": BuildWithScripts},
)
