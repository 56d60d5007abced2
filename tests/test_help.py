"""`--help` of every script answers at once."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["train_vae.py", "train_vqgan.py", "train_mulan.py", "tokenize_images.py", "embed.py", "convert.py"]
HEAVY = {"torch", "torchvision", "deepspeed", "horovod", "numpy", "PIL", "yaml", "safetensors", "tqdm"}


def test_every_script_is_looked_at() -> None:
    assert {path.name for path in ROOT.glob("*.py")} - {"setup.py"} == set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_imports_nothing_heavy(script: str) -> None:
    code = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = [{script!r}, '--help']\n"
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    looked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert looked.stderr == "[]\n"
    assert looked.stdout.startswith(f"usage: {script}")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_takes_less_than_a_second_of_the_processor(script: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
