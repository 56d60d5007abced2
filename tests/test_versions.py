"""The version of the package is the newest one of CHANGELOG.md, and that of CITATION.cff."""

from __future__ import annotations

import re

import yaml

from tandem import __version__
from tests.scripts import ROOT

HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \((?:tag (v\S+)|no tag)\) - (\d{4}-\d\d-\d\d)$")


def headings() -> list[tuple[str, str | None, str]]:
    lines = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ")]
    matches = [HEADING.match(line) for line in lines]
    assert all(matches), lines
    return [(match[1], match[2], match[3]) for match in matches if match]


def test_the_newest_version_of_the_changelog_is_that_of_the_package_with_its_tag() -> None:
    version, tag, _ = headings()[0]
    assert (version, tag) == (__version__, f"v{__version__}")


def test_versions_and_dates_of_the_changelog_fall() -> None:
    order = [([int(part) for part in version.split(".")], date) for version, _, date in headings()]
    assert order == sorted(order, reverse=True)


def test_the_citation_has_version_and_date_of_the_newest_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version, _, date = headings()[0]
    assert (citation["version"], citation["date-released"]) == (version, date)
