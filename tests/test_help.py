"""`--help` of every script answers at once and names every flag; the whole help explains it."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

import pytest

from tandem import __version__
from tests.scripts import ROOT, SCRIPTS, Script

PROGRAMS = sorted(path.name for path in ROOT.glob("*.py") if path.name != "setup.py")
HEAVY = {"torch", "torchvision", "deepspeed", "horovod", "numpy", "PIL", "yaml", "safetensors", "tqdm"}


@pytest.mark.parametrize("script", PROGRAMS)
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


@pytest.mark.parametrize("script", PROGRAMS)
def test_each_program_says_its_version_and_any_name_of_a_file_in_any_encoding(script: str) -> None:
    code = (
        "import atexit, runpy, sys\n"
        "for file in (sys.stderr, sys.stdout):\n"
        "    atexit.register(lambda file=file: print('\\xe9\\udce9', file=file))\n"
        f"sys.argv = [{script!r}, '--version']\n"
        f"runpy.run_path({script!r}, run_name='__main__')"
    )
    for encoding, name in (("ascii:strict", r"\xe9\udce9"), ("utf-8:strict", r"é\udce9")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", env=environment)
        assert (done.returncode, done.stdout) == (0, f"tandem-training {__version__}\n{name}\n"), done
        assert done.stderr == f"{name}\n"


def said(script: Script, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as exit_:
        script.module.main([flag])
    assert exit_.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=str)
def test_help_fits_on_a_screen_or_two_and_names_every_flag(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = (said(script, flag, monkeypatch, capsys) for flag in ("--help", "--help_all"))
    actions = [a for a in script.module.build_parser()._actions if a.help is not argparse.SUPPRESS]
    for action in actions:
        name = action.option_strings[0]
        assert re.search(rf"(^|\s){name}(\s|,|$)", short), name
        assert re.search(rf"^  (-\w, )?{name}\b", whole, re.MULTILINE) or name == "-h", name
    assert len(short.splitlines()) < 110 and len(short) < len(whole) / 2
    explained = short.split("all other flags")[0]
    first_flags = [script.data.flag, "output_dir", "config", "batch_size", "max_steps", "learning_rate"]
    for first in first_flags:
        assert f"\n  --{first}" in explained
