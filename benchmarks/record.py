"""Train the rows of record.yaml for their minutes, measure them, and write docs/record.md.

    make record                                        # every row that this machine can measure, on public images
    make record ROWS=two_stages IMAGES=photos/         # one row, on images of your own
    make record MINUTES=1                              # a rehearsal, which the page does not show

Every stage is a run of train_vqgan.py. The same command goes on where it was stopped or killed, and measures nothing
twice. Results are lines of record.jsonl, and the tables of the page are made from these lines alone.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import torch
import yaml
from PIL import Image

from tandem.data.decoding.images import ENDINGS
from tandem.data.held_out import split_of_run
from tandem.io.exits import ASKED_TO_STOP, FAILED, INTERRUPTED, MISTAKE, AskedToStop, CannotGoOn, exit_codes
from tandem.io.published import PUBLISHED
from tandem.io.writing import move_aside, write_atomically
from tandem.training.run_folder.starts import starts
from tandem.weights.origin import read_run_arguments

from . import machine

ROOT = Path(__file__).resolve().parents[1]
CONFIG, RESULTS, PAGE = (
    ROOT / name for name in ("benchmarks/record.yaml", "benchmarks/record.jsonl", "docs/record.md")
)
REHEARSALS = ROOT / "benchmarks" / "results" / "record.jsonl"
BEGIN, END = "<!-- make record: begin -->", "<!-- make record: end -->"
CORES = 2  # of a row of the kind cpu
BUSY = 0.1  # cores; a row gets a note if other programs used more of those that it ran on
MOST_MEASURED = 250  # images for rFID and iFID, evenly from all: each goes through Inception three times
TILE = 96  # pixels
#: The colour photographs in the wheels of scikit-image and scikit-learn, without the second one of the stereo pair.
PHOTOS = {
    "train": ("skimage/data/astronaut.png", "skimage/data/motorcycle_left.png", "skimage/data/rocket.jpg",
              "sklearn/datasets/images/china.jpg", "sklearn/datasets/images/flower.jpg"),
    "held_out": ("skimage/data/chelsea.png", "skimage/data/coffee.png"),
}  # fmt: skip


@dataclass(frozen=True)
class Images:
    """Images to train on and to measure.

    Args:
        name: For the page and for IMAGES of the command; empty for the public ones.
        flags: How train_vqgan.py gets them.
    """

    name: str
    folder: Path
    flags: list[str]
    paths: list[Path]
    digest: str  # SHA-256 over names and contents

    @property
    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "count": len(self.paths), "sha256": self.digest}


def images_of(folder: Path, name: str) -> Images:
    """The images of a folder with its sub-folders. Raises ValueError if there are none."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())
    if not paths:
        raise ValueError(f"IMAGES={folder}: expected a folder of images; without IMAGES, public images are taken")
    contents = [f"{hashlib.sha256(p.read_bytes()).hexdigest()} {p.relative_to(folder).as_posix()}\n" for p in paths]
    flags = ["--image_folder", str(folder), "--valid_fraction", "0.1", "--split_seed", "0"]
    return Images(name, folder, flags, paths, hashlib.sha256("".join(contents).encode()).hexdigest())


def public_images(folder: Path) -> Images:
    """Tiles of photographs that are in the wheels of installed packages, written to `folder` as BMP, whose bytes are
    the pixels, so that their digest does not depend on a version of zlib. Two photographs are held out as a whole:
    tiles beside those of the training would be too easy. Raises ValueError if a photograph is not installed."""
    for split, names in PHOTOS.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for name in names:
            package, _, file = name.partition("/")
            spec = importlib.util.find_spec(package)
            path = Path(next(iter((spec and spec.submodule_search_locations) or [""])), file)
            if not path.is_file():
                raise ValueError(f"{name} is not installed with scikit-image or scikit-learn: give IMAGES=photos/")
            photo = Image.open(path).convert("RGB")
            for top in range(0, photo.height - TILE + 1, TILE):
                for left in range(0, photo.width - TILE + 1, TILE):
                    tile = photo.crop((left, top, left + TILE, top + TILE))
                    tile.save(folder / split / f"{path.stem}_{top:03d}_{left:03d}.bmp")
    images = images_of(folder, "")
    flags = ["--image_folder", str(folder / "train"), "--valid_folder", str(folder / "held_out")]
    return replace(images, flags=flags)


@contextmanager
def on_cores(count: int | None) -> Iterator[list[int] | None]:
    """Bind this process, and those that it starts, to so many cores; None binds nothing. Yields the cores, or None
    where the system cannot bind (macOS)."""
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores := sorted(before)[:count])
    try:
        yield cores
    finally:
        os.sched_setaffinity(0, before)


def seconds_of_others(cores: Sequence[int] | None) -> float:
    """Processor time that everything but this program and its ended children has used on these cores since the machine
    started, with the time that a host took from a virtual machine. Only differences of it mean anything."""
    busy = 0.0
    for core, times in enumerate(psutil.cpu_times(percpu=True)):
        if cores is None or core in cores:
            names = ("user", "nice", "system", "irq", "softirq", "steal")
            busy += sum(getattr(times, name, 0.0) for name in names)
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in own)


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a program, which gets the signals that ask this one to stop.

    Raises:
        AskedToStop: it was asked to stop, and saved.
        CannotGoOn: it failed; its own line says why.
    """
    print("$", shlex.join(["python", *command]), flush=True)
    child = subprocess.Popen([sys.executable, *command], env={**os.environ, **environment}, start_new_session=True)
    handlers = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            handlers[number] = signal.signal(number, lambda number, _: child.send_signal(number))
        code = child.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if code in (ASKED_TO_STOP, INTERRUPTED) or -code in handlers:  # the latter: before Python could handle it
        raise AskedToStop
    if code:
        raise CannotGoOn(f"{Path(command[0]).name} ended with exit code {code}")


@dataclass(frozen=True)
class Row:
    """A row to measure, as record.yaml has it, with the images and the Inception."""

    name: str
    kind: str  # cpu or gpu
    text: str
    stages: list[tuple[float, list[str]]]  # minutes and flags
    images: Images
    inception: str  # "", PUBLISHED or a file
    runs: Path
    is_rehearsal: bool

    @property
    def minutes(self) -> float:
        return sum(minutes for minutes, _ in self.stages)

    @property
    def folder(self) -> Path:
        """Another one for other flags, minutes, images or weights, so that what is in it belongs to this row."""
        key = json.dumps([self.kind, self.stages, self.images.digest, self.inception]).encode()
        return self.runs / f"{self.name}-{hashlib.sha256(key).hexdigest()[:8]}"

    @property
    def command(self) -> str:
        variables = {"ROWS": self.name, "IMAGES": self.images.name, "INCEPTION": Path(self.inception).name}
        variables |= {"MINUTES": f"{self.minutes:g}"} if self.is_rehearsal else {}
        return " ".join(["make record", *(f"{name}={value}" for name, value in variables.items() if value)])


def measure(row: Row) -> dict[str, Any]:
    """Train and measure a row, or go on with it. Returns its line of record.jsonl."""
    result = row.folder / "result.json"
    if result.exists():
        line: dict[str, Any] = json.loads(result.read_text())
        print(f"{row.name} was measured on {line['date']}; FRESH=1 measures it again")
        return line
    row.folder.mkdir(parents=True, exist_ok=True)
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if row.kind == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(CORES)}
    with on_cores(CORES if row.kind == "cpu" else None) as cores:
        facts = machine.facts()
        folders = [row.folder / f"stage_{number}" for number in range(1, len(row.stages) + 1)]
        for number, (minutes, flags) in enumerate(row.stages):
            command = [str(ROOT / "train_vqgan.py"), *row.images.flags, *flags, "--max_minutes", f"{minutes:g}"]
            command += ["--init_from", str(folders[number - 1])] if number else []
            with noting_others(row.folder / "others.jsonl", cores):
                run([*command, "--output_dir", str(folders[number])], environment)
        values = evaluate(row, folders[-1], environment)
    line = describe(row, folders, facts, values)
    write_atomically(result, (json.dumps(line) + "\n").encode())
    return line


@contextmanager
def noting_others(path: Path, cores: Sequence[int] | None) -> Iterator[None]:
    """Add a line to a file about the processor time of other programs while the body ran, however it ended."""
    before, start = seconds_of_others(cores), time.monotonic()
    try:
        yield
    finally:
        with path.open("a") as file:
            seconds = {"others": seconds_of_others(cores) - before, "seconds": time.monotonic() - start}
            file.write(json.dumps(seconds) + "\n")


def evaluate(row: Row, model: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """What evaluate.py says of a model: its JSON file."""
    weights, output, data = row.folder / "inception.safetensors", row.folder / "evaluation", row.images.folder
    if (step := -(-len(row.images.paths) // MOST_MEASURED)) > 1:
        data = row.folder / "measured.csv"
        with data.open("w", newline="") as file:
            csv.writer(file).writerows([["path"], *([str(path.absolute())] for path in row.images.paths[::step])])
    if not row.inception:
        from .inception import random_inception

        safetensors.torch.save_file(random_inception(), weights)
    run([str(ROOT / "evaluate.py"), "--model", str(model), "--image_folder", str(data), "--latents",
         "--cpu_threads", str(CORES), "--fid_weights", row.inception or str(weights), "--output", str(output)],
        environment)  # fmt: skip
    values: dict[str, Any] = json.loads(output.with_suffix(".json").read_text())
    return values


def describe(row: Row, folders: Sequence[Path], facts: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A row's line of record.jsonl."""
    last_lines = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in folders]
    all_starts = [start for folder in folders for start in starts(folder)]
    commits = list(dict.fromkeys(start["git_commit"] for start in all_starts))
    others = [json.loads(text) for text in (row.folder / "others.jsonl").read_text().splitlines()]
    cores_of_others = sum(item["others"] for item in others) / sum(item["seconds"] for item in others)
    notes = []
    if cores_of_others > BUSY:
        notes.append(f"other programs used {cores_of_others:.1f} of its cores")
    if len(all_starts) > len(folders):
        notes.append("stopped and started again")
    if len(commits) > 1:
        notes.append(f"begun at {(commits[0] or 'no commit')[:8]}")
    (of_model,) = values["models"].values()
    return {
        "row": row.name, "kind": row.kind, "text": row.text, "minutes": row.minutes, "command": row.command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commits[-1],
        "psnr": last_lines[-1]["valid/ema/psnr"], "rfid": of_model["rfid"], "ifid": of_model["ifid"],
        "held_out": len(split_of_run(read_run_arguments(folders[-1])).held_out), "measured": values["samples"],
        "stages": [
            {"minutes": minutes, "flags": shlex.join(flags), "updates": last["step"], "seconds": last["seconds"]}
            for (minutes, flags), last in zip(row.stages, last_lines, strict=True)
        ],
        "images": row.images.facts,
        "inception": {"name": row.inception and Path(row.inception).name, "sha256": values["judge_sha256"]},
        "cores_of_others": round(cores_of_others, 3), "notes": notes, "machine": facts,
    }  # fmt: skip


def comparable(line: Mapping[str, Any]) -> tuple[Any, ...]:
    """Lines of one table have the same value: kind of machine, minutes, images and weights of the Inception."""
    return line["kind"], line["minutes"], line["images"]["sha256"], line["inception"]["sha256"]


def tables(lines: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a table for the lines that can be compared, the highest PSNR first. Of a row that was measured more
    than once on one machine, the newest line counts."""
    newest = {(comparable(line), line["row"], hardware(line)): line for line in lines}
    parts = []
    for _, group in groupby(sorted(newest.values(), key=comparable), comparable):
        rows = sorted(group, key=lambda line: -line["psnr"])
        parts += [f"## {heading(rows[0])}", "", sources(rows[0]), ""]
        parts += ["| | command | PSNR | rFID | iFID | updates | machine | date, commit | notes |", "|---" * 9 + "|"]
        for line in rows:
            updates = " + ".join(str(stage["updates"]) for stage in line["stages"])
            cells = [
                line["text"], f"`{line['command']}`", f"{line['psnr']:.2f} dB", f"{line['rfid']:.3g}",
                f"{line['ifid']:.3g}", updates, hardware(line), f"{line['date']}, {commit(line)}",
                "; ".join(line["notes"]),
            ]  # fmt: skip
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts) or "Nothing has been measured yet.\n"


def heading(line: Mapping[str, Any]) -> str:
    hardware = f"{CORES} cores" if line["kind"] == "cpu" else "a GPU"
    return f"{line['minutes']:g} minutes on {hardware}, {line['images']['name'] or 'public images'}"


def sources(line: Mapping[str, Any]) -> str:
    """Which images and which Inception a table is of."""
    images, inception = line["images"], line["inception"]
    weights = {"": "random weights", PUBLISHED: "the published weights"}.get(inception["name"], inception["name"])
    return (
        f"{images['count']} images (SHA-256 {images['sha256'][:12]}), {line['held_out']} of them held out for PSNR. "
        f"rFID and iFID are of {line['measured']}, by\nan Inception with {weights} ({inception['sha256'][:12]})."
    )


def hardware(line: Mapping[str, Any]) -> str:
    facts = line["machine"]
    return str(facts["gpus"][0]) if line["kind"] == "gpu" else f"{facts['cpu']}, {facts['cores']} cores"


def commit(line: Mapping[str, Any]) -> str:
    name, _, dirty = (line["commit"] or "unknown").partition("-")
    return name[:8] + (" with changes" if dirty else "")


def page_with(page: str, lines: Sequence[Mapping[str, Any]]) -> str:
    """The text of the page with the tables of these lines between its marks. Raises ValueError without marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"expected the page to have {BEGIN} and {END} once each")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n\n{tables(lines)}\n{END}{after}"


def lines_of(results: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []


def cannot_run(kind: str) -> str:
    """Why this machine cannot measure rows of a kind; empty if it can."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if kind == "gpu":
        return "" if accelerator else "PyTorch sees no GPU here"
    if accelerator and accelerator.type != "cuda":  # ROCm's GPUs have this type, too
        return f"the scripts would use the {accelerator.type}, which cannot be hidden from them"
    return "" if machine.cores() >= CORES else f"it takes {CORES} cores"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--images", type=Path, metavar="DIR", help="a folder of images (default: public ones of wheels)")
    add("--rows", metavar="NAMES", help="comma list of rows (default: all of --config)")
    add("--minutes", type=float, metavar="M", help="a rehearsal of so many minutes for each row, in results of its own")
    add("--inception", default="", metavar="FILE", help="weights for rFID and iFID: a file, or published, which "
        "fetches them (default: random ones)")  # fmt: skip
    add("--fresh", action="store_true", help="measure again; what was measured here before is moved aside")
    add("--config", type=Path, default=CONFIG, metavar="FILE", help="the rows (default: benchmarks/record.yaml)")
    add("--runs", type=Path, default=Path("runs/record"), metavar="DIR", help="run folders (default: runs/record)")
    add("--results", type=Path, metavar="FILE", help="lines of JSON (default: benchmarks/record.jsonl, of rehearsals "
        "benchmarks/results/record.jsonl)")  # fmt: skip
    add("--page", type=Path, metavar="FILE", help="page to rewrite (default: docs/record.md, of rehearsals none)")
    return parser


def rows_of(args: argparse.Namespace) -> list[Row]:
    """The rows to measure. Raises ValueError, in one line, for a mistake in the arguments."""
    config = yaml.safe_load(args.config.read_text())
    names = args.rows.split(",") if args.rows else list(config["rows"])
    if unknown := [name for name in names if name not in config["rows"]]:
        raise ValueError(f"ROWS: there is no {unknown[0]!r}; there are {', '.join(config['rows'])}")
    if args.minutes is not None and not 0 < args.minutes < float("inf"):
        raise ValueError(f"MINUTES={args.minutes:g}: expected a number above 0")
    if args.inception not in ("", PUBLISHED) and not Path(args.inception).is_file():
        raise ValueError(f"INCEPTION={args.inception}: expected a file of weights, or {PUBLISHED}")
    reasons = {name: cannot_run(config["rows"][name]["machine"]) for name in names}
    for name, reason in reasons.items():
        if reason:
            print(f"{name} is not run: {reason}", file=sys.stderr)
    if all(reasons.values()):
        raise ValueError("there is no row to measure")
    images = (
        images_of(args.images, f"{args.images.resolve().name}/") if args.images else public_images(args.runs / "images")
    )
    rows = []
    for name in names:
        if not reasons[name]:
            described = config["rows"][name]
            factor = args.minutes / sum(stage["minutes"] for stage in described["stages"]) if args.minutes else 1
            stages = [
                (stage["minutes"] * factor, shlex.split(f"{config['flags']} {stage['flags']}"))
                for stage in described["stages"]
            ]
            rows.append(
                Row(name, described["machine"], described["text"], stages, images, args.inception, args.runs,
                    is_rehearsal=bool(args.minutes))
            )  # fmt: skip
    return rows


def record(args: argparse.Namespace) -> None:
    results = args.results or (REHEARSALS if args.minutes else RESULTS)
    page = args.page or (None if args.minutes else PAGE)
    new: list[dict[str, Any]] = []
    try:
        for row in rows_of(args):
            if args.fresh and row.folder.exists():
                print(f"{row.folder} is now {move_aside(row.folder)}")
            new.append(measure(row))
    finally:  # after all rows: the commit of a row that follows would have changed files
        if new:
            lines = lines_of(results)
            lines += [line for line in new if line not in lines]
            results.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(results, "".join(json.dumps(line) + "\n" for line in lines).encode())
            if page:
                write_atomically(page, page_with(page.read_text(), lines).encode())
            print(tables(lines), f"written to {results}{f' and {page}' if page else ''}", sep="\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    with exit_codes(lambda text: parser.exit(MISTAKE, f"make record: error: {text}\n")):
        try:
            record(args)
        except CannotGoOn as error:
            parser.exit(FAILED, f"make record: {error}; the same command goes on\n")


if __name__ == "__main__":
    main()
