"""Fixtures of the tests of the scripts in `filling`; the test module's fixture `script` selects the script."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from filling import saved

from tandem.data.stores.output import OutputFolder


@pytest.fixture(scope="module", autouse=True)
def on_one_cpu() -> Iterator[None]:
    """Use the CPU, for which the expected numbers hold, and skip syncing, as no test has to survive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def model(script, tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), script.model())


@pytest.fixture(scope="module")
def source(script, tmp_path_factory) -> Path:
    """The folder of the script's inputs."""
    folder = tmp_path_factory.mktemp("source")
    script.write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def whole(script, model, source, tmp_path_factory) -> Path:
    """A filled folder, for tests that only read it or copy it."""
    return script.fill(model, source, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def on_write(monkeypatch) -> Callable[..., None]:
    """Call a function with the path before each file of an output folder is written."""
    write = OutputFolder.write

    def call(before: Callable[[Path], None]) -> None:
        def write_after(folder: OutputFolder, name: str, content: bytes) -> None:
            before(folder.path / name)
            write(folder, name, content)

        monkeypatch.setattr(OutputFolder, "write", write_after)

    return call
