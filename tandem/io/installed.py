"""The differences between a checkout and an installed package: where configs/ and docs/ are, and how users start a
script.

In a checkout the scripts, configs/ and docs/ are beside the folder tandem/, in an installed package inside it.
"""

from __future__ import annotations

import difflib
import importlib
import os
import shutil
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
IS_INSTALLED = (_PACKAGE / "train_vae.py").is_file()
HOME = _PACKAGE if IS_INSTALLED else _PACKAGE.parent  # the folder that holds the scripts, configs/ and docs/
_CONFIGS = "configs/"


def command_of(script: str) -> list[str]:
    """The command by which a user starts a script of this repository, such as train_vae.py, in the current folder,
    whether or not the environment of this process is active."""
    python = Path(sys.executable)
    if not IS_INSTALLED:
        return [_name_or_path(python, "python"), short_path(HOME / script)]
    if (command := python.with_name(installed_command(script))).exists():
        return [_name_or_path(command, command.name)]
    return [_name_or_path(python, "python"), "-m", f"tandem.{Path(script).stem}"]


def short_path(path: Path) -> str:
    """A path relative to the current folder, if it is below it; else the path unchanged."""
    try:
        relative = os.path.relpath(path)
    except FileNotFoundError:  # the current folder was deleted
        return os.fspath(path)
    return os.fspath(path) if relative.startswith(os.pardir) else relative


def _name_or_path(path: Path, name: str) -> str:
    """The name of a program, if a shell finds this very program under the name; else its path."""
    program = shutil.which(name)
    is_same = (
        program
        and os.path.samefile(os.path.dirname(os.path.abspath(program)), path.parent)
        and os.path.samefile(program, path)
    )
    return name if is_same else short_path(path)


def installed_command(script: str) -> str:
    """The command that a package installs for a script: tandem-train-vae for train_vae.py."""
    return f"tandem-{Path(script).stem.replace('_', '-')}"


def program() -> str:
    """The name of this program for messages: train_vae.py, or tandem-train-vae of a package."""
    name = os.path.basename(sys.argv[0])
    is_script = IS_INSTALLED and name.endswith(".py") and (HOME / name).is_file()  # started by python -m tandem.NAME
    return installed_command(name) if is_script else name


def find_shipped_file(path: str) -> str:
    """The file of configs/ for a path such as configs/vae/demo.yaml, from any working folder; the path itself if it
    exists, or if no such file is shipped."""
    if os.path.exists(path) or not path.startswith(_CONFIGS):
        return path
    file = os.path.realpath(HOME / path)
    return file if file.startswith(f"{HOME / _CONFIGS}{os.sep}") and os.path.isfile(file) else path


def similar_files(path: str, error: OSError) -> str:
    """`"; did you mean x or y?"` for the YAML or JSON files in the folder of `path`, and in configs/, whose name is the
    nearest to its own; `""` if none is near, or if the `error` is another one than that there is no such file."""
    if not isinstance(error, FileNotFoundError):
        return ""
    folder, name = os.path.split(path)
    files = [*Path(folder).glob("*.[jy]*"), *Path(HOME, _CONFIGS).rglob("*.[jy]*")]
    near = difflib.get_close_matches(name, {file.name for file in files}, 1, 0.7)
    paths = {
        os.fspath(file) if file.parent == Path(folder) else os.path.relpath(file, HOME)
        for file in files
        if file.name in near
    }
    return f"; did you mean {' or '.join(sorted(paths))}?" if paths else ""


def how_to_install(extra: str) -> str:
    """The command that installs an extra of pyproject.toml."""
    package = "tandem-training" if IS_INSTALLED else short_path(HOME)
    return f'pip install {"" if IS_INSTALLED else "-e "}"{package}[{extra}]"'


def missing_package(purpose: str, package: str, extra: str = "audio") -> ValueError:
    """The error for a missing `package` that `purpose` needs, with the command that installs it by an extra."""
    return ValueError(f"{purpose} needs the package {package}: {how_to_install(extra)}")


def require_packages(purpose: str, *packages: str, extra: str = "audio") -> None:
    """Import packages, so that loader workers that are forked later need not. Raises `missing_package` if one cannot be
    imported."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise missing_package(purpose, error.name or package, extra) from None
