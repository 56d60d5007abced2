"""Shared by all tests."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from tests.scripts import Script

pytest.register_assert_rewrite("tests.scripts", "tests.models.helpers")
torch.set_num_threads(1)
gc.set_threshold(10_000, 20, 100)  # a sixth of the imports was the search for garbage, of which they leave none


# Seconds of a file, not its number of tests, by which xdist would order it. test_faults waits most of its time.
LONGEST = (
    "launch/test_faults",
    "launch/test_scripts",
    "launch/test_moved",
    "launch/test_filling",
    "tests/test_every_script",
    "launch",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that no worker of pytest begins one when the others are done. Horovod
    0.28.1 cannot be installed beside Python 3.12; anything else that is missing fails."""
    items.sort(key=lambda item: next((i for i, start in enumerate(LONGEST) if start in item.nodeid), len(LONGEST)))
    if sys.version_info < (3, 12):
        return
    for item in items:
        if "horovodrun" in item.name:
            item.add_marker(pytest.mark.skip(reason="Horovod 0.28.1 needs Python <= 3.11"))


@pytest.fixture(scope="session")
def run_of_eight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Script], Path]:
    """Eight updates of a script with everything around them. Tests only look at the folder."""

    @cache
    def run(script: Script) -> Path:
        return script.train(tmp_path_factory.mktemp(script.name) / "run", *script.eight)

    return run


@pytest.fixture(scope="module")
def finished(request: pytest.FixtureRequest, run_of_eight: Callable[[Script], Path]) -> Path:
    """That run of the script that a file of tests is about: its `SCRIPT`."""
    return run_of_eight(request.module.SCRIPT)


# They read what tests/launch/jobs.py starts once per launcher.
SHARING_JOBS = "contracts|contrastive|moved|scripts|verify"


class _Groups(LoadScopeScheduling):
    """A group of tests runs in one of pytest's workers: a file, or the files that would wait for the same jobs."""

    def _split_scope(self, nodeid: str) -> str:
        if re.match(rf"tests/launch/test_({SHARING_JOBS})\.py", nodeid):
            return "jobs of DeepSpeed" if "deepspeed" in nodeid else "jobs"
        if "test_pretend" in nodeid and re.search("torchrun|deepspeed", nodeid):
            return "launched on the pretend device"
        return nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Groups:
    return _Groups(config, log)
