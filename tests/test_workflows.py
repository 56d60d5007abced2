"""The files that GitHub, pre-commit and Docker read can be parsed, and name targets of make, programs and files that
there are."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from tests.scripts import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def commands(workflow: dict[str, Any]) -> Iterator[str]:
    """The lines that its steps run, one for each value of the matrix of the job."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for line in [line for step in job["steps"] for line in step.get("run", "").splitlines()]:
            (name,) = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", line) or [None]
            for value in matrix[name] if name else [""]:
                yield re.sub(r"\$\{\{ matrix\.\w+ \}\}", value, line)


@each_workflow
def test_a_workflow_runs_targets_of_make_and_files_that_there_are(path: Path) -> None:
    lines = list(commands(yaml.safe_load(path.read_text())))
    for words in [line.split() for line in lines if not line.startswith((".venv/bin/pip ", "python -m venv "))]:
        assert words[1] in TARGETS if words[0] == "make" else (ROOT / words[0]).is_file(), words
    assert any(line.startswith(("make ", ".ci/")) for line in lines)


@each_workflow
def test_a_workflow_may_read_only(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in job and job["timeout-minutes"] for job in workflow["jobs"].values())


def test_a_change_is_tested_by_ci_run_and_by_the_demonstration_on_linux_and_macos() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert ".ci/run" in commands(workflow)
    assert {*workflow["jobs"]["demo"]["strategy"]["matrix"]["os"]} == {"ubuntu-latest", "macos-latest"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_asks_for_something_and_names_files_that_there_are(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    inputs = [item for item in form["body"] if item["type"] != "markdown"]
    assert len({item["id"] for item in inputs}) == len(inputs)
    assert any(item.get("validations", {}).get("required") for item in inputs)
    for name in re.findall(r"\b(?:docs/)?\w+\.(?:py|md)\b", path.read_text()):
        assert (ROOT / name).is_file(), name


def test_the_form_about_a_run_asks_for_what_repeats_it() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/run.yml").read_text())
    required = {item["id"] for item in form["body"] if item.get("validations", {}).get("required")}
    assert required == {"command", "launcher", "expected", "happened", "starts"}


def test_the_hooks_before_a_commit_are_those_of_make_lint() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].removeprefix(".venv/bin/").replace(" --force-exclude", "") for hook in local["hooks"]]
    recipe = re.search(r"^lint:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    lines = [line.removeprefix("$(BIN)/").removesuffix(" .") for line in recipe[1].split("\t")]
    assert [*entries, "mypy --platform darwin"] == [line.strip().removesuffix(" .") for line in lines if line]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_an_image_installs_extras_that_there_are_and_starts_a_script_without_being_root(name: str) -> None:
    lines = [line.partition(" ") for line in (ROOT / name).read_text().splitlines()]
    values = {word: rest for word, _, rest in lines if word.isupper()}
    arguments = dict(rest.split("=", 1) for word, _, rest in lines if word == "ARG")
    assert f"\n{arguments['EXTRAS']} = [" in (ROOT / "pyproject.toml").read_text()
    assert values["USER"] == "${UID}" and int(arguments["UID"])
    assert (ROOT / json.loads(values["CMD"])[1]).is_file()


def test_the_base_image_has_a_pytorch_that_the_package_allows() -> None:
    (version,) = re.findall(r"^ARG BASE=pytorch/pytorch:([\d.]+)-cuda", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    (requirement,) = re.findall(r'^    "(torch>=[^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert Requirement(requirement).specifier.contains(version)


def test_an_image_holds_every_file_of_the_repository_but_those_of_github() -> None:
    """Patterns of .dockerignore are those of paths from the root, but for those that begin with **."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tops = {path.split("/")[0] for path in files}
    ignored = [(path, pattern) for path in (*tops, *files) for pattern in patterns if fnmatch(path, pattern)]
    assert {path for path, pattern in ignored if pattern.startswith("**") or "/" not in path} == {".github"}
