"""How a program is called in a checkout and in an installed package."""

from __future__ import annotations

import sys

import pytest

from tandem.files import installed
from tandem.files.writing import say


@pytest.mark.parametrize(("started", "is_installed", "name"), [
    ("train_vae.py", False, "train_vae.py"),
    ("/site-packages/tandem/train_vae.py", True, "tandem-train-vae"),  # python -m tandem.train_vae
    ("/bin/tandem-train-vae", True, "tandem-train-vae"),
    ("/home/alice/mine.py", True, "mine.py"),
])  # fmt: skip
def test_every_message_names_the_program_as_the_user_knows_it(
    started: str, is_installed: bool, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "IS_INSTALLED", is_installed)
    monkeypatch.setattr(sys, "argv", [started])
    say("stopped")
    assert capsys.readouterr().err == f"{name}: stopped\n"
