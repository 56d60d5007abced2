"""Jobs that several test modules share."""

from __future__ import annotations

import pytest
from jobs import Jobs


@pytest.fixture(scope="session")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "jobs"
    folder.mkdir(exist_ok=True)
    modules = {item.module for item in request.session.items if hasattr(getattr(item, "module", None), "tasks")}
    return Jobs(folder, sorted(modules, key=lambda module: module.__name__))
