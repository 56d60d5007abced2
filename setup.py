"""The four leaves install as tandem.models, tandem.data, tandem.distributed and tandem.training: a top-level package
called ``distributed`` would break dask. tandem.files, which the leaves import, has that name in a checkout too.

The scripts and tools install as tandem.train_vae and so on, beside configs/ and docs/. They import the leaves by their
names in a checkout, so their imports are rewritten while the package is built, and so are the commands that
docs/ and README.md name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
LEAVES = ("models", "data", "distributed", "training")
PACKAGES = [name for leaf in LEAVES for name in (leaf, *(f"{leaf}.{sub}" for sub in find_packages(leaf)))]
FILES = [path.relative_to(HERE) for pattern in ("configs/**/*.yaml", "configs/**/*.json", "docs/*.md",
         "scripts/install_horovod.sh") for path in sorted(HERE.glob(pattern))]  # fmt: skip
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py") if path.stem != "setup")
COMMANDS = [name for name in SCRIPTS if "def main(" in (HERE / f"{name}.py").read_text()]
_IMPORT = re.compile(rf"^(\s*)(from|import) ({'|'.join((*LEAVES, *SCRIPTS))})\b(?!\.\w+$)", re.MULTILINE)


def as_installed(source: str) -> str:
    """The source of a script with imports, and commands in its docstring, as an installed package has them."""
    source = commands(source)
    return _IMPORT.sub(
        lambda found: (
            f"{found[1]}from tandem.{found[3]}" if found[2] == "from" else f"{found[1]}from tandem import {found[3]}"
        ),
        source,
    )


_SCRIPT = rf"({'|'.join(COMMANDS)})\.py"
_START = r"(?m)(^(?:#   | {4})|`)"  # of a command, in a block or in a line
_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]+\)\n\n(?:\*[^*]+\*\n\n)?", re.M)  # with its caption
_BELOW_TITLE = (
    "*Commands are given as the installed package has them. `make`, `tests/`, `benchmarks/` and other paths of files"
    " are those of its sources.*"
)


def commands(text: str) -> str:
    """A text with the commands of the scripts as an installed package has them."""

    def by_launcher(found: re.Match[str]) -> str:
        flag = "--module" if found[2] == "deepspeed" else "-m"
        return f"{found[1]}{found[2]}{found[3]}{flag} tandem.{found[4]}"

    def command(found: re.Match[str]) -> str:
        return f"{found[1]}tandem-{found[2].replace('_', '-')}"

    text = re.sub(rf"{_START}(torchrun|deepspeed)( (?:[^`\n]|(?<=\\)\n)*?)(?<= ){_SCRIPT}\b", by_launcher, text)
    text = re.sub(rf"{_START}python {_SCRIPT}\b", command, text)
    text = re.sub(rf"{_START}{_SCRIPT}(?= )", command, text)
    return re.sub(rf"\bpython {_SCRIPT}\b", r"python -m tandem.\1", text)


def as_shipped(page: str, has_pictures: bool = False) -> str:
    """A page of documentation with commands as an installed package has them, and without the pictures, which are not
    shipped. It says so below its title."""
    page = re.sub(r'pip install -e "\.(\[\w+\])"', r'pip install "tandem-training\1"', commands(page))
    page = page.replace("pip install -e .", "pip install tandem-training")
    page = page if has_pictures else _PICTURE.sub("", page)
    return re.sub(r"\A(# .+\n)", rf"\1\n{_BELOW_TITLE}\n", page)


def address() -> str:
    """Where the sources are published: what an sdist says, or a clone's origin; empty if that is no web address."""
    facts = HERE / "PKG-INFO"
    if facts.is_file():
        said = re.search(r"^Project-URL: Source, (\S+)$", facts.read_text(encoding="utf-8"), re.MULTILINE)
        return said[1] if said else ""
    if not (HERE / ".git").exists():
        return ""
    command = ["git", "-C", str(HERE), "config", "--get", "remote.origin.url"]
    try:
        origin = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return ""
    # The user, who may be a password, stays out.
    found = re.fullmatch(r"(?:https://|ssh://|(?=[^/]*@))(?:[^@/]*@)?([\w.-]+)[:/]([^@]+?)(?:\.git)?/?", origin)
    return f"https://{found[1]}/{found[2]}" if found else ""


def readme(url: str) -> str:
    """README.md for a page where no file is beside it: its links lead to the published sources, if there are any."""

    def link(found: re.Match[str]) -> str:
        is_image, text, path = found.groups()
        return f"{is_image}[{text}]({url}/{'raw' if is_image else 'blob'}/HEAD/{path})" if url else text

    text = as_shipped((HERE / "README.md").read_text(encoding="utf-8"), has_pictures=bool(url))
    return re.sub(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)", link, text)


class BuildWithScripts(build_py):
    def targets(self) -> dict[Path, Path]:
        """Where the scripts and other files go, and where they come from."""
        inside = Path(self.build_lib, "tandem")
        return {inside / path: HERE / path for path in (*FILES, *(Path(f"{name}.py") for name in SCRIPTS))}

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if not URL:
            print("setup.py: this is no clone with an origin on the web, so the package has no links to its sources",
                  file=sys.stderr)  # fmt: skip
        for target, source in self.targets().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8")
            change = {".py": as_installed, ".md": as_shipped, ".yaml": commands}.get(source.suffix, str)
            target.write_text(change(text), encoding="utf-8")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        added = [] if self.editable_mode else [str(target) for target in self.targets()]
        return [*super().get_outputs(include_bytecode), *added]


URL = address()
EXTRAS = {
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],  # its inside is used
    "wandb": ["wandb>=0.31"],
    "tensorboard": ["tensorboard>=2.18"],
    "fid": ["torch-fidelity>=0.4,<0.5"],  # a module that it does not list is used
    "audio": ["soundfile>=0.13", "soxr>=1.0", "open_clip_torch>=3.0,<4", "tokenizers>=0.21"],
    "video": ["av>=17"],
    "datasets": ["pyarrow>=17"],
    "clip": ["open_clip_torch>=3.0,<4"],
    "lion": ["lion-pytorch>=0.2.5"],
    "shell": ["argcomplete>=3.5"],
    "hub": ["huggingface_hub>=1.0,<3"],
    "report": ["uplot-python>=1.1,<2"],  # carries uPlot, which report.py puts into its page
    "test": [
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "setuptools>=77",
        "psutil",
        "scipy",
        "scikit-image",
        "torchvision",
        "vector-quantize-pytorch>=1.32",
        "lpips>=0.1.4",
        "torch-fidelity>=0.4,<0.5",
        "librosa>=0.11",
        "webdataset>=1.0",
        "selenium>=4.20",
        "transformers>=5",
        "ruff>=0.14",
        "mypy>=1.18",
        "types-PyYAML",
        "types-tqdm",
        "types-psutil",
    ],
}
TESTED = ("audio", "video", "datasets", "clip", "lion", "hub", "shell", "report")
EXTRAS["test"] += [needed for extra in TESTED for needed in EXTRAS[extra]]
ALL = ("deepspeed", "wandb", "tensorboard", *TESTED)
EXTRAS["all"] = [needed for extra in ALL for needed in EXTRAS[extra]]

setup(
    name="tandem-training",
    version=re.search(r'__version__ = "(.+)"', (HERE / "tandem" / "__init__.py").read_text())[1],
    description="Training scripts for the parts of generative models, with the same numbers on every backend",
    long_description=readme(URL),
    long_description_content_type="text/markdown",
    project_urls={"Source": URL, "Documentation": f"{URL}/tree/HEAD/docs", "Issues": f"{URL}/issues"} if URL else {},
    license="MIT",
    keywords="vae vqgan diffusion mulan video-tokenizer distributed-training deepspeed horovod fsdp",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=["tandem", "tandem.files", *(f"tandem.{name}" for name in PACKAGES)],
    package_dir={
        "tandem": "tandem",
        "tandem.files": "tandem/files",
        **{f"tandem.{name}": name.replace(".", "/") for name in PACKAGES},
    },
    package_data={"tandem": ["py.typed"], "tandem.training.report": ["page/*"]},
    cmdclass={"build_py": BuildWithScripts},
    entry_points={
        "console_scripts": [f"tandem-{name.replace('_', '-')} = tandem.commands:{name}" for name in COMMANDS]
    },
    install_requires=[
        "torch>=2.10,<3",  # private names of it are used
        "numpy>=1.26",
        "pillow>=11",
        "PyYAML>=6",
        "safetensors>=0.8",
        "tqdm>=4.66",
        "einops>=0.8",
    ],
    extras_require=EXTRAS,
)
