"""Train the rows of record.yaml for their minutes, measure them, and write docs/record.md.

    make record                                        # every row that this machine can measure, on public images
    make record ROWS=two_stages IMAGES=photos/         # one row, on images of your own
    make record MINUTES=1                              # a rehearsal, which the page does not show

Every stage is a run of train_vqgan.py. The same command goes on where it was stopped or killed, and measures nothing
twice. Results are lines of record.jsonl, and the tables of the page are made from these lines alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import yaml

from tandem.data.held_out import split_of_run
from tandem.io.exits import ASKED_TO_STOP, FAILED, MISTAKE, AskedToStop, CannotGoOn, exit_codes
from tandem.io.published import PUBLISHED
from tandem.io.writing import move_aside, write_atomically
from tandem.training.run_folder.starts import last_start
from tandem.weights.origin import read_run_arguments

from . import machine
from .inception import random_inception
from .record_images import Images, images_of, public_images
from .record_page import page_with, tables

SCRIPTS = Path(__file__).resolve().parents[1]
# In the working folder, which is that of the checkout.
CONFIG, RESULTS, PAGE = Path("benchmarks/record.yaml"), Path("benchmarks/record.jsonl"), Path("docs/record.md")
RUNS = Path("runs/record")
CORES = 2  # of a row of the kind cpu
BUSY = 0.1  # cores; a row gets a note if other programs used more of those that it ran on
MOST_MEASURED = 250  # images for rFID and iFID, evenly from all: each goes through Inception three times


@dataclass(frozen=True)
class Row:
    """A row to measure, as record.yaml has it, with the images and the Inception."""

    name: str
    kind: str  # cpu or gpu
    text: str
    stages: list[tuple[float, list[str]]]  # minutes and flags
    images: Images
    inception: str  # "", PUBLISHED or a file
    command: str  # that measures it

    @property
    def folder(self) -> Path:
        """Another one for other flags, minutes, images or weights, so that what is in it belongs to this row."""
        key = json.dumps([self.kind, self.stages, self.images.digest, self.inception]).encode()
        return RUNS / f"{self.name}-{hashlib.sha256(key).hexdigest()[:8]}"


def rows_of(args: argparse.Namespace) -> list[Row]:
    """The rows to measure. Raises ValueError, in one line, for a mistake in the arguments."""
    config = yaml.safe_load(CONFIG.read_text())
    names = args.rows.split(",") if args.rows else list(config["rows"])
    if unknown := [name for name in names if name not in config["rows"]]:
        raise ValueError(f"ROWS: there is no {unknown[0]!r}; there are {', '.join(config['rows'])}")
    if args.minutes is not None and not 0 < args.minutes < float("inf"):
        raise ValueError(f"MINUTES={args.minutes:g}: expected a number above 0")
    if args.inception not in ("", PUBLISHED) and not Path(args.inception).is_file():
        raise ValueError(f"INCEPTION={args.inception}: expected a file of weights, or {PUBLISHED}")
    reasons = {
        "cpu": "" if machine.cores() >= CORES else f"it takes {CORES} cores",
        "gpu": "" if machine.gpus() else "PyTorch sees no GPU here",
    }
    images = images_of(args.images) if args.images else public_images(RUNS / "images")
    minutes = f"{args.minutes:g}" if args.minutes else ""
    variables = {"IMAGES": images.name, "INCEPTION": Path(args.inception).name, "MINUTES": minutes}
    given = "".join(f" {variable}={value}" for variable, value in variables.items() if value)
    rows = []
    for name in names:
        row = config["rows"][name]
        if reason := reasons[row["machine"]]:
            print(f"{name} is not run: {reason}", file=sys.stderr)
            continue
        factor = args.minutes / sum(stage["minutes"] for stage in row["stages"]) if args.minutes else 1
        stages = [
            (stage["minutes"] * factor, shlex.split(f"{config['flags']} {stage['flags']}")) for stage in row["stages"]
        ]
        command = f"make record ROWS={name}{given}"
        rows.append(Row(name, row["machine"], row["text"], stages, images, args.inception, command))
    if not rows:
        raise ValueError("there is no row to measure")
    return rows


def measure(row: Row, cores: Sequence[int]) -> dict[str, Any]:
    """Train and measure a row on these cores, or go on with it. Returns its line of record.jsonl."""
    result = row.folder / "result.json"
    if result.exists():
        line = json.loads(result.read_text())
        print(f"{row.name} was measured on {line['date']}; FRESH=1 measures it again")
        return line
    was_begun = row.folder.exists()
    row.folder.mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, cores)  # also of the processes that this one starts
    facts = machine.facts()
    folders = train(row, cores)
    line = describe(row, folders, evaluate(row, folders[-1]), facts, was_begun)
    write_atomically(result, (json.dumps(line) + "\n").encode())
    return line


def train(row: Row, cores: Sequence[int]) -> list[Path]:
    """Train the stages, each from the model of the one before. Returns their run folders. However it ends, a line about
    the processor time of other programs is added to others.jsonl."""
    before, start = seconds_of_others(cores), time.monotonic()
    folders: list[Path] = []
    try:
        for number, (minutes, flags) in enumerate(row.stages, 1):
            command = ["train_vqgan.py", *row.images.flags, *flags, "--max_minutes", f"{minutes:g}"]
            command += ["--init_from", str(folders[-1])] if folders else []
            folders.append(row.folder / f"stage_{number}")
            run([*command, "--output_dir", str(folders[-1])], row.kind)
    finally:
        seconds = {"others": seconds_of_others(cores) - before, "seconds": time.monotonic() - start}
        with (row.folder / "others.jsonl").open("a") as file:
            file.write(json.dumps(seconds) + "\n")
    return folders


def evaluate(row: Row, model: Path) -> dict[str, Any]:
    """What evaluate.py says of a model: its JSON file."""
    images, output = row.folder / "measured.jsonl", row.folder / "evaluation"
    step = -(-len(row.images.paths) // MOST_MEASURED)
    images.write_text("".join(json.dumps({"path": str(path.absolute())}) + "\n" for path in row.images.paths[::step]))
    weights = row.inception or str(row.folder / "inception.safetensors")
    if not row.inception:
        safetensors.torch.save_file(random_inception(), weights)
    command = ["evaluate.py", "--model", str(model), "--image_folder", str(images), "--latents"]
    command += ["--cpu_threads", str(CORES), "--fid_weights", weights, "--output", str(output)]
    run(command, row.kind)
    return json.loads(output.with_suffix(".json").read_text())


def run(command: Sequence[str], kind: str) -> None:
    """Run a script of the checkout. If this program is killed, the script goes on alone; until it has ended, the next
    start cannot use its run folder, and says so.

    Raises:
        AskedToStop: it or this program was asked to stop, and it has saved.
        CannotGoOn: it failed; its own line says why.
    """
    print("$ python", shlex.join(command), flush=True)
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(CORES)} if kind == "cpu" else {}
    words = [sys.executable, str(SCRIPTS / command[0]), *command[1:]]
    # In a session of its own: with the terminal's Ctrl-C and a signal from here, it would end without a save.
    child = subprocess.Popen(words, env=os.environ | environment, start_new_session=True)
    try:
        code = child.wait()
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        code = ASKED_TO_STOP
    if code == ASKED_TO_STOP:
        raise AskedToStop
    if code:
        raise CannotGoOn(f"{command[0]} ended with exit code {code}")


def seconds_of_others(cores: Sequence[int]) -> float:
    """Processor time that everything but this program and its ended children has used on these cores since the machine
    started, with the time that a host took from a virtual machine. Only differences of it mean anything."""
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    times = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in cores]
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    busy = sum(getattr(of_core, kind) for of_core in times for kind in kinds)
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in own)


def describe(
    row: Row, folders: Sequence[Path], values: dict[str, Any], facts: dict[str, Any], was_begun: bool
) -> dict[str, Any]:
    """A row's line of record.jsonl. `was_begun`: before the start that ends with it."""
    last_lines = [json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in folders]
    others = [json.loads(text) for text in (row.folder / "others.jsonl").read_text().splitlines()]
    cores_of_others = sum(item["others"] for item in others) / sum(item["seconds"] for item in others)
    notes = [f"other programs used {cores_of_others:.1f} of its cores"] if cores_of_others > BUSY else []
    notes += ["stopped and started again"] if was_begun else []
    (of_model,) = values["models"].values()
    return {
        "row": row.name, "kind": row.kind, "text": row.text, "minutes": sum(minutes for minutes, _ in row.stages),
        "command": row.command, "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": last_start(folders[-1])["git_commit"],
        "psnr": last_lines[-1]["valid/ema/psnr"], "rfid": of_model["rfid"], "ifid": of_model["ifid"],
        "held_out": len(split_of_run(read_run_arguments(folders[-1])).held_out), "measured": values["samples"],
        "stages": [
            {"minutes": minutes, "flags": shlex.join(flags), "updates": last["step"], "seconds": last["seconds"]}
            for (minutes, flags), last in zip(row.stages, last_lines, strict=True)
        ],
        "images": {"name": row.images.name, "count": len(row.images.paths), "sha256": row.images.digest},
        "inception": {"name": row.inception and Path(row.inception).name, "sha256": values["network_sha256"]},
        "cores_of_others": round(cores_of_others, 3), "notes": notes, "machine": facts,
    }  # fmt: skip


def lines_of(results: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in results.read_text().splitlines()] if results.exists() else []


def record(args: argparse.Namespace) -> None:
    all_cores = sorted(os.sched_getaffinity(0))
    measured: list[dict[str, Any]] = []
    try:
        for row in rows_of(args):
            if args.fresh and row.folder.exists():
                print(f"{row.folder} is now {move_aside(row.folder)}")
            measured.append(measure(row, all_cores[:CORES] if row.kind == "cpu" else all_cores))
    finally:  # after all rows: the commit of a row that follows would have changed files
        if measured:
            print(tables(measured))
        if measured and not args.minutes:
            lines = lines_of(RESULTS)
            lines += [line for line in measured if line not in lines]
            write_atomically(RESULTS, "".join(json.dumps(line) + "\n" for line in lines).encode())
            write_atomically(PAGE, page_with(PAGE.read_text(), lines).encode())
            print(f"written to {RESULTS} and {PAGE}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.record", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--images", type=Path, metavar="DIR", help="a folder of images (default: public ones of wheels)")
    add("--rows", metavar="NAMES", help="comma list of rows (default: all of benchmarks/record.yaml)")
    add("--minutes", type=float, metavar="M", help="a rehearsal of so many minutes for each row, not on the page")
    add("--inception", default="", metavar="FILE", help="weights for rFID and iFID: a file, or published, which "
        "fetches them (default: random ones)")  # fmt: skip
    add("--fresh", action="store_true", help="measure again; what was measured here before is moved aside")
    args = parser.parse_args(argv)
    with exit_codes(lambda text: parser.exit(MISTAKE, f"make record: error: {text}\n")):
        try:
            record(args)
        except CannotGoOn as error:
            parser.exit(FAILED, f"make record: {error}; the same command goes on\n")


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, signal.default_int_handler)  # a KeyboardInterrupt, as of Ctrl-C
    main()
