"""Shared by all tests."""

from __future__ import annotations

import sys

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Horovod 0.28.1 cannot be installed beside Python 3.12; anything else that is missing fails."""
    if sys.version_info < (3, 12):
        return
    for item in items:
        if "horovodrun" in item.name:
            item.add_marker(pytest.mark.skip(reason="Horovod 0.28.1 needs Python <= 3.11"))
