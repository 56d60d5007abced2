"""Packages that only some data sets need."""

from __future__ import annotations


def missing_package(what: str, package: str) -> ValueError:
    """The error that says how to install `package`, without which `what` does not work."""
    return ValueError(
        f'{what} needs the package {package}: pip install "tandem-training[audio]", or from a checkout '
        f'pip install -e ".[audio]"'
    )
