"""Write docs/coming_from.md: the arguments of the public scripts and trainers beside the flags here.

python scripts/coming_from.py
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coming_from.md"


def text() -> str:
    """What the page has to be."""
    sys.path.insert(0, str(ROOT))
    from training.flags.public_names import PUBLIC, page

    return page({script: importlib.import_module(script).build_parser() for script in PUBLIC})


if __name__ == "__main__":
    PAGE.write_text(text())
