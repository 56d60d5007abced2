"""The tables of docs/record.md, made from the lines of record.jsonl alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tandem.io.published import PUBLISHED

BEGIN, END = "<!-- make record: begin -->", "<!-- make record: end -->"
HEADER = "| | command | PSNR | rFID | iFID | updates | machine | date, commit | notes |"
Line = Mapping[str, Any]


def page_with(page: str, lines: Sequence[Line]) -> str:
    """The text of the page with the tables of these lines between its marks."""
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n\n{tables(lines)}\n{END}{after}"


def tables(lines: Sequence[Line]) -> str:
    """Markdown: a table for the lines that can be compared, the highest PSNR first. Of a row that was measured more
    than once on one machine, the newest line counts."""
    newest = {(_comparable(line), line["row"], _hardware(line)): line for line in lines}
    best_first = sorted(newest.values(), key=lambda line: (_comparable(line), -line["psnr"]))
    groups = [_table(list(group)) for _, group in groupby(best_first, _comparable)]
    return "\n".join(groups) or "Nothing has been measured yet.\n"


def _comparable(line: Line) -> tuple[Any, ...]:
    """Lines of one table have the same value: kind of machine, minutes, images and weights of the Inception."""
    return line["kind"], line["minutes"], line["images"]["sha256"], line["inception"]["sha256"]


def _table(lines: Sequence[Line]) -> str:
    """Markdown: a heading, which images and which Inception the values are of, and a row for each line."""
    first = lines[0]
    images, inception = first["images"], first["inception"]
    place = "a GPU" if first["kind"] == "gpu" else f"{first['machine']['cores']} cores"
    weights = {"": "random weights", PUBLISHED: "the published weights"}.get(inception["name"], inception["name"])
    parts = [
        f"## {first['minutes']:g} minutes on {place}, {images['name'] or 'public images'}",
        "",
        f"{images['count']} images (SHA-256 {images['sha256'][:12]}), {first['held_out']} of them held out for PSNR. "
        f"rFID and iFID are of {first['measured']}, by",
        f"an Inception with {weights} ({inception['sha256'][:12]}).",
        "",
        HEADER,
        "|---" * HEADER.count(" |") + "|",
        *map(_row, lines),
    ]
    return "\n".join(parts) + "\n"


def _row(line: Line) -> str:
    updates = " + ".join(str(stage["updates"]) for stage in line["stages"])
    commit, _, dirty = (line["commit"] or "unknown").partition("-")
    version = commit[:8] + (" with changes" if dirty else "")
    return (
        f"| {line['text']} | `{line['command']}` | {line['psnr']:.2f} dB | {line['rfid']:.3g} | {line['ifid']:.3g} "
        f"| {updates} | {_hardware(line)} | {line['date']}, {version} | {'; '.join(line['notes'])} |"
    )


def _hardware(line: Line) -> str:
    facts = line["machine"]
    return str(facts["gpus"][0]) if line["kind"] == "gpu" else f"{facts['cpu']}, {facts['cores']} cores"
