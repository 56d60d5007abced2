"""What people install: the wheel, without a checkout. It is installed into an environment of its own, which finds
everything else where the tests find it, and used in an empty folder."""

from __future__ import annotations

import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.launching import free_port
from tests.scripts import ROOT, SCRIPTS, words

SITE = Path(sysconfig.get_paths()["purelib"])
LAUNCHERS = ("torchrun", "deepspeed")
SOURCES = ("tandem", "distributed", "configs", "docs", "scripts", "setup.py",
           "pyproject.toml", "MANIFEST.in",
           "README.md", "LICENSE", *sorted(path.name for path in ROOT.glob("*.py")))  # fmt: skip
SHORT = ["--max_steps", "2", "--num_workers", "0", "--save_every_n_steps", "0", "--validate_every_n_steps", "0",
         "--sample_every_n_steps", "0", "--valid_samples", "8"]  # fmt: skip


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a "wheel", an "sdist" or an "editable" wheel of a folder of sources."""
    program = f"from setuptools.build_meta import build_{kind} as build; build({str(out)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    (path,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that neither an old build/ enters what is built nor a new one stays behind."""
    folder = tmp_path_factory.mktemp("source")
    for name in dict.fromkeys(SOURCES):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("installed") / "venv")


def install(wheel: Path, folder: Path) -> Path:
    """The folder of programs of a new environment that holds the wheel."""
    venv.create(folder, symlinks=True)
    bin_, (site,) = folder / "bin", (folder / "lib").glob("python*/site-packages")
    # A path in such a file does not make Python read the other .pth files there: an editable installation stays out.
    (site / "everything_else.pth").write_text(f"{SITE}\n")
    command = [sys.executable, "-m", "pip", "--python", str(bin_ / "python"), "install", "--quiet", "--no-deps",
               "--ignore-installed", "--no-index", str(wheel)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    for name in LAUNCHERS:
        text = (Path(sys.executable).parent / name).read_text()
        (bin_ / name).write_text(re.sub(r"\A#!.*", f"#!{bin_ / 'python'}", text))
        (bin_ / name).chmod(0o755)
    return bin_


def run(bin_: Path, folder: Path, *command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{bin_}{os.pathsep}{environment['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_the_wheel_holds_scripts_tools_and_configs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    commands = metadata_of(wheel, "entry_points.txt")
    paths = [*(ROOT / "configs").rglob("*.*"), *(ROOT / "docs").glob("*.*"), ROOT / "scripts" / "install_horovod.sh"]
    scripts = {path.name for path in ROOT.glob("*.py")} - {"setup.py"}
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    assert names >= {f"tandem/{name}" for name in (*files, *scripts, "py.typed")}
    modules = [f"tandem/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "distributed").rglob("*.py")]
    modules += [path.relative_to(ROOT).as_posix() for path in (ROOT / "tandem").rglob("*.py")]
    assert names >= {
        *modules,
        *(f"tandem/reporting/page/{path.name}" for path in (ROOT / "tandem/reporting/page").iterdir()),
    }
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"tandem"}
    assert set(re.findall(r"^(tandem-\S+) =", commands, re.MULTILINE)) == {
        f"tandem-{name.removesuffix('.py').replace('_', '-')}" for name in scripts
    }


@pytest.mark.parametrize(("command", "demonstration"), [
    (["torchrun", "--nproc_per_node", "2", "--standalone", "-m", "tandem.train_vae"], "vae"),
    (["deepspeed", "--num_gpus", "2", "--module", "tandem.train_vqgan", "--deepspeed_config",
      "configs/deepspeed/zero2.json"], "vqgan"),
    (["tandem-train-mulan"], "mulan"),
], ids=lambda value: value[0] if isinstance(value, list) else value)  # fmt: skip
def test_each_way_to_start_trains_a_demonstration(
    command: list[str], demonstration: str, installed: Path, tmp_path: Path
) -> None:
    if command[0] == "deepspeed":
        command = [*command[:1], "--master_port", str(free_port()), *command[1:]]
    tiny = words(SCRIPTS[f"train_{demonstration}"].tiny)
    said = run(installed, tmp_path, *command, *tiny, *SHORT, "--output_dir", "run")
    assert f"demonstration: configs/{demonstration}/demo.yaml" in said
    assert (tmp_path / "run" / "model").is_dir() and re.search(r"next: tandem-\w+", said)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_tools_and_configs_of_the_package_are_used_in_any_folder(installed: Path, tmp_path: Path) -> None:
    tiny = words(SCRIPTS["train_vae"].tiny)
    base = ["tandem-train-vae", "--config", "configs/vae/demo.yaml", *tiny, *SHORT, "--output_dir", "run"]
    without_path = ["env", "PATH=/usr/bin:/bin"]  # as if the environment were not active
    said = run(installed, tmp_path, *without_path, str(installed / base[0]), *base[1:])
    assert "configuration: configs/vae/demo.yaml" in said
    (report,) = re.findall("^report: (.+)$", said, re.MULTILINE)
    run(installed, tmp_path, *without_path, *shlex.split(report))
    assert (tmp_path / "run" / "report.html").is_file()
    run(installed, tmp_path, "tandem-encode", "--model", "run/model", "--image_folder", "demo:shapes:8",
        "--output", "codes", "--num_workers", "0")  # fmt: skip
    assert (tmp_path / "codes" / "index.json").is_file()
    assert "DiscreteVAE" in run(installed, tmp_path, "tandem-convert", "export", "run", "--to", "model", "new")
    assert "usage: tandem-sample " in run(installed, tmp_path, "tandem-sample", "--help")


#: Names of a user's own modules that are names of folders here, of a checkout or of the package, or were once.
_FOLDERS = [path for folder in (ROOT, ROOT / "tandem") for path in folder.iterdir() if path.is_dir()]
_NAMES = {path.name for path in _FOLDERS if path.name.isidentifier()}
OF_FOLDERS = sorted({"models", "data", *_NAMES} - {"tandem", "io"})


@pytest.mark.parametrize("is_installed", [False, True], ids=["checkout", "installed"])
def test_a_users_modules_are_his_own_whatever_they_are_called(
    is_installed: bool, installed: Path, tmp_path: Path
) -> None:
    for name in OF_FOLDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"NAME = {name!r}")
    imports = "".join(f"from {name} import NAME as {name}_\n" for name in OF_FOLDERS)
    (tmp_path / "mine.py").write_text(
        f"{imports}import torch\n\ndef make(args):\n    return [torch.zeros(3, 16, 16) for _ in range(64)]\n"
    )
    start = ["tandem-train-vae"] if is_installed else [sys.executable, str(ROOT / "train_vae.py")]
    tiny = words(SCRIPTS["train_vae"].tiny)
    output = run(installed, tmp_path, *start, "--dataset", "mine:make", *tiny, *SHORT, "--output_dir", "run")
    assert "finished: 2 updates" in output


def test_bash_completes_files_of_the_package(installed: Path, tmp_path: Path) -> None:
    program = f"""
source <({sys.executable} -m argcomplete.scripts.register_python_argcomplete tandem-train-vqgan)
COMP_LINE="tandem-train-vqgan --config configs/vae/d"
COMP_POINT=${{#COMP_LINE}}
COMP_TYPE=9
_python_argcomplete tandem-train-vqgan configs/vae/d --config
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    assert run(installed, tmp_path, "bash", "-c", program).split() == ["configs/vae/demo.yaml"]


def test_a_program_beside_an_editable_checkout_called_tandem_finds_the_package(source: Path, tmp_path: Path) -> None:
    """Though folders of the checkout, such as one of exported weights, are called like folders of the package."""
    checkout = Path(shutil.copytree(source, tmp_path / "tandem", symlinks=True))
    (checkout / "weights").mkdir()
    bin_ = install(build("editable", checkout, tmp_path), tmp_path / "venv")
    (tmp_path / "program.py").write_text("import tandem.weights.load\nprint(tandem.__version__, tandem.__file__)\n")
    said = run(bin_, tmp_path, "python", "program.py")
    assert str(checkout / "tandem" / "__init__.py") in said, said


def test_the_tested_versions_are_ones_that_the_package_allows(wheel: Path) -> None:
    """A range of pyproject.toml that leaves the tested version out would install an untested one."""
    said = email.message_from_string(metadata_of(wheel)).get_all("Requires-Dist") or []
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#")
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    requirements = [Requirement(text) for text in said if 'extra == "test"' not in text]
    for requirement in (each for each in requirements if each.name != "tandem-training"):  # whose extra names others
        version = tested[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} leaves {version} out"


def metadata_of(wheel: Path, file: str = "METADATA") -> str:
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith(f".dist-info/{file}"))
        return content.read(name).decode()
