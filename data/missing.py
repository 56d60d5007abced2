"""What to say where an optional package is missing."""

from __future__ import annotations


def required(what: str, package: str) -> ValueError:
    """The error that says how to install `package`, without which there is no `what`."""
    return ValueError(
        f'{what} needs the package {package}: pip install "tandem-training[audio]", or from a checkout '
        f'pip install -e ".[audio]"'
    )
