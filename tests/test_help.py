"""`--help` of every script answers at once."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.scripts import ROOT

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py") if path.name not in ("setup.py", "trained.py", "hub.py"))
HEAVY = {"torch", "torchvision", "deepspeed", "horovod", "numpy", "PIL", "yaml", "safetensors", "tqdm"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_imports_nothing_heavy_and_takes_less_than_a_second_of_the_processor(script: str) -> None:
    code = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = [{script!r}, '--help']\n"
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    looked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert looked.stderr == "[]\n"
    assert looked.stdout.startswith(f"usage: {script}")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
