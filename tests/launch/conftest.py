"""Jobs that several test modules share, and which of pytest's workers waits for them."""

from __future__ import annotations

import pytest
from jobs import Jobs
from launching import Launcher


@pytest.fixture(scope="session")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "jobs"
    import os
    from pathlib import Path

    folder = Path(os.environ.get("KEEP") or folder)  # TEMPORARY
    folder.mkdir(exist_ok=True)
    modules = {item.module for item in request.session.items if hasattr(getattr(item, "module", None), "tasks")}
    return Jobs(folder, sorted(modules, key=lambda module: module.__name__))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A group of tests runs in one worker (--dist loadgroup): files, but for those that share jobs."""
    for item in items:
        group = str(item.path)
        if "jobs" in getattr(item, "fixturenames", ()):
            values = item.callspec.params.values() if hasattr(item, "callspec") else []
            needs_deepspeed = any(isinstance(value, Launcher) and value.name == "deepspeed" for value in values)
            group = "jobs of DeepSpeed" if needs_deepspeed else "jobs"
        item.add_marker(pytest.mark.xdist_group(group))
