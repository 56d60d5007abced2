"""Puts the scripts, configs/, docs/ and scripts/ into the package tandem when it is installed; in a checkout they stand
beside it. pyproject.toml cannot express this, and has all other options."""

import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = {f"tandem.{name}": name for name in ("configs", "docs", "scripts")}  # which files: pyproject.toml


class BuildWithScripts(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        modules = [] if package in FOLDERS else super().find_package_modules(package, package_dir)
        if package == "tandem" and not self.editable_mode:
            modules += [(package, path.stem, path.name) for path in Path().glob("*.py") if path.name != "setup.py"]
        return modules


# An editable installation has the packages alone. Then setuptools names this folder in a .pth file. For FOLDERS it
# would install a finder, which Python asks last: a program beside a checkout called tandem would take the folder of the
# checkout for the package.
folders = {} if "editable_wheel" in sys.argv else FOLDERS
setup(
    packages=[*find_packages(include=["tandem*"]), *folders],
    package_dir=folders or {"": "."},
    cmdclass={"build_py": BuildWithScripts},
)
