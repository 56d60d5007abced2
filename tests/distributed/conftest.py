"""What the tests of distributed/ share: an environment without a launcher, and the real backend of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from tandem.distributed import Backend
from tests import processes

# What launchers set. Tests set the variables of the launcher that they need.
LAUNCHER_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "CROSS_RANK", "LOCAL_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
)  # fmt: skip


@pytest.fixture(autouse=True)
def started_with_python_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables in the environment, whatever a test leaves there, and no GPU, because expected numbers
    are those of CPUs."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "")  # a variable that is only deleted is not taken away again when a test has set it
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


@pytest.fixture
def single() -> Iterator[Callable[..., Backend]]:
    """Connects backends of one process, e.g. ``single(batch_size=4, precision="bf16")``."""
    with ExitStack() as stack:
        yield lambda **values: stack.enter_context(processes.single(**values))
