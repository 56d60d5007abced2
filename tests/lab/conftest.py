"""Tests that start machines are skipped, by the name of what is missing, where there can be none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lab import missing


@pytest.fixture
def needs() -> Callable[..., None]:
    """Skips the test if the computer lacks what a lab needs, or one of these tools."""

    def check(*tools: str) -> None:
        if lacks := missing(*tools):
            pytest.skip(f"no machines here: {lacks}")

    return check
