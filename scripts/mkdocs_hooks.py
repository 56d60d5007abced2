"""Hooks of mkdocs.yml: README.md is the site's first page, docs/ are the others, and CONTRIBUTING.md and the files that
they link to are in the site too.

A link to a file of the repository that is no page leads to `repo_url` where mkdocs.yml has one. Else the file is shown
as text, in `files/` of the site, and a link to a folder becomes its name. A target that does not exist stays as it is,
and `mkdocs build --strict` fails.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Files outside of docs/ that are pages, and their names in the site.
PAGES = {name: name.lower() for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")}
PAGES["README.md"] = "index.md"
LINK = re.compile(r"(!?\[(?P<text>[^\]]*)\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    sources = {path.name: path for path in (ROOT / "docs").glob("*.md")} | {name: ROOT / name for name in PAGES}
    linked_files: set[Path] = set()
    for name, source in sources.items():
        rewrite = partial(_link, folder=source.parent, repo_url=config.repo_url, linked_files=linked_files)
        text = LINK.sub(rewrite, source.read_text())
        _put(files, File.generated(config, PAGES.get(name, name), content=text))
    for path in sorted(linked_files):
        _put(files, File.generated(config, _copy_name(path), content=path.read_text()))
    return files


def _put(files: Files, file: File) -> None:
    if old := files.get_file_from_path(file.src_uri):
        files.remove(old)
    files.append(file)


def _link(link: re.Match[str], folder: Path, repo_url: str | None, linked_files: set[Path]) -> str:
    """A link as the site has it. A file that the site has to show is added to `linked_files`."""
    path = Path(os.path.normpath(folder / link["target"]))
    anchor = link["anchor"] or ""
    if not path.exists() or not path.is_relative_to(ROOT):
        return link[0]
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES or name.startswith("docs/"):
        return f"{link[1]}{PAGES.get(name) or name.removeprefix('docs/')}{anchor})"
    if repo_url:
        return f"{link[1]}{repo_url.rstrip('/')}/blob/main/{name}{anchor})"
    if path.is_dir():
        return link["text"]
    linked_files.add(path)
    return f"{link[1]}{_copy_name(path)})"


def _copy_name(path: Path) -> str:
    """With an ending that every browser shows instead of offering a download."""
    return f"files/{path.relative_to(ROOT).as_posix()}.txt"
