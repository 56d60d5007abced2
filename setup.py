"""What setuptools cannot be told in pyproject.toml: the scripts, configs/, docs/ and scripts/ stand beside the package
tandem in a checkout, and inside of it when installed."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("configs", "docs", "scripts")  # pyproject.toml says which files of them


class BuildWithScripts(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        is_folder, is_installed = package.endswith(FOLDERS), package == "tandem" and not self.editable_mode
        modules = [] if is_folder else super().find_package_modules(package, package_dir)
        scripts = [path for path in sorted(Path().glob("*.py")) if path.name != "setup.py" and is_installed]
        return [*modules, *((package, path.stem, path.name) for path in scripts)]


setup(
    packages=[*find_packages(include=["tandem*"]), *(f"tandem.{name}" for name in FOLDERS)],
    package_dir={f"tandem.{name}": name for name in FOLDERS},
    cmdclass={"build_py": BuildWithScripts},
)
