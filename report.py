"""Make one HTML page about training runs from their folders: curves, pictures, settings, costs and faults.

    python report.py runs/vae-demo                               # writes runs/vae-demo/report.html
    python report.py runs/vae runs/vae-lr3e-4 --output both.html # compares runs: their curves in the same axes
    python report.py runs/vae --watch                            # serves the page on this machine while the run goes on

The page needs no network and no server: it can be sent by mail and opened on a phone. It reads run folders of all
training scripts, also of unfinished and killed runs, changes nothing in them, and names files that it cannot read.
"""

from __future__ import annotations

import functools
import json
import signal
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.commands import script_parser
from tandem.config.converters import FILE, FOLDER, non_negative_int, positive_int
from tandem.config.parser import ArgumentParser
from tandem.io.exits import exit_codes
from tandem.io.reading import counted, printable
from tandem.io.writing import write_atomically
from tandem.reporting.page import is_report, page_data, read_uplot, render_page
from tandem.reporting.runs import RunReader, distinct_names
from tandem.reporting.watching import Server

LARGEST_PORT = 65535


def build_parser() -> ArgumentParser:
    parser = ArgumentParser("report.py", "Make one HTML page about training runs from their folders.")
    parser.usage = "%(prog)s RUN [RUN ...] [flags]"
    # fmt: off
    parser.add_argument("runs", nargs="+", type=FOLDER, metavar="RUN", help="run folder of a training script")
    parser.add_argument("--output", type=FILE, metavar="FILE",
        help="page to write; an older report there is replaced, any other file is not (default: report.html in the "
        "first RUN)")
    parser.add_argument("--pictures", type=positive_int, default=12, metavar="N",
        help="number of updates of each run whose pictures are shown: the first, the last, and others evenly between")
    parser.add_argument("--watch", action="store_true",
        help="write no file, but serve the page to this machine until Ctrl-C; it shows what runs write meanwhile")
    parser.add_argument("--port", type=non_negative_int, metavar="PORT",
        help="port for --watch (default: any free port)")
    # fmt: on
    return parser


def check_flags(parser: ArgumentParser, args: Namespace) -> None:
    """Refuse flags that have no effect beside the others."""
    if args.watch and args.output is not None:
        parser.error("--output has no effect with --watch, which writes no file; leave one of the two out")
    if args.port is not None and not args.watch:
        parser.error("--port has no effect without --watch")
    if (args.port or 0) > LARGEST_PORT:
        parser.error(f"--port {args.port}: the largest port is {LARGEST_PORT}")


@functools.cache
def defaults_of(script: str) -> dict[str, Any]:
    """The settings of a training script without any flag, as config.yaml has them; {} if there is no such script."""
    try:
        parser = script_parser(script)
    except ImportError:
        return {}
    settings: dict[str, Any] = json.loads(json.dumps(parser.settings(parser.with_values({}))))
    return settings


def write(path: Path, readers: Sequence[RunReader], is_default: bool) -> None:
    """Write the page. Raises ValueError, in one line, and OSError."""
    if path.is_symlink() or (path.exists() and not (path.is_file() and is_report(path))):
        raise ValueError(f"{path} exists and is no report of report.py; give another --output")
    data = page_data(readers)
    content = render_page(data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        option = "--output FILE" if is_default else "another --output"
        raise ValueError(f"cannot write {path}: {error.strerror or error}; give {option}") from None
    for run in data["runs"]:
        for note in run["notes"]:
            say(f"{run['name']}: {note}")
    pictures = sum("src" in picture for run in data["runs"] for picture in run["pictures"])
    run_count = counted(len(data["runs"]), "run")
    say(f"wrote {path}: {len(content) / 1e6:.2f} MB, {run_count}, {counted(pictures, 'picture')}")


def watch(readers: Sequence[RunReader], port: int) -> None:
    """Serve the page until Ctrl-C or SIGTERM. Raises ValueError, in one line, if the port is not available."""
    try:
        server = Server(lambda: page_data(readers), port)
    except OSError as error:
        raise ValueError(f"--port {port} is not available: {error.strerror}; give another, or leave it out") from None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server:
        try:
            say(f"reading {counted(len(readers), 'run')}")
            server.newest()
            say(f"{server.url} shows the runs until Ctrl-C")
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")


def say(text: str) -> None:
    """Print a line, which may quote a file."""
    print(printable(text), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    check_flags(parser, args)
    with exit_codes(parser.error):
        read_uplot()  # raises before the runs are read, if its package is missing
        names = distinct_names(args.runs)
        readers = [
            RunReader(path, name, args.pictures, defaults_of) for path, name in zip(args.runs, names, strict=True)
        ]
        if args.watch:
            watch(readers, args.port or 0)
        else:
            path = Path(args.output) if args.output else Path(args.runs[0]) / "report.html"
            write(path, readers, is_default=not args.output)


if __name__ == "__main__":
    main()
