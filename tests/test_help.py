"""`--help` of every script answers at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.scripts import ROOT

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py") if path.name not in ("setup.py", "trained.py", "hub.py"))
HEAVY = {"torch", "torchvision", "deepspeed", "horovod", "numpy", "PIL", "yaml", "safetensors", "tqdm"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_imports_nothing_that_takes_long(script: str) -> None:
    code = (
        "import atexit, runpy, sys\n"
        f"atexit.register(lambda: print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr))\n"
        f"sys.argv = [{script!r}, '--help']\n"
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    looked = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert looked.stderr == "[]\n"
    assert looked.stdout.startswith(f"usage: {script}")
