"""Replay a stretch of a run from one of its checkpoints to a later one, and compare every logged value and every tensor
with those of the run, bit by bit.

    python verify.py runs/vae                                # from the newest checkpoint but one to the newest
    torchrun --nproc_per_node 8 verify.py runs/vae --updates 1000:1500
    deepspeed verify.py runs/vae --updates 1000:1500
    horovodrun -np 8 python verify.py runs/vae --updates 1000:1500
    torchrun --nnodes 4 --nproc_per_node 8 ... verify.py runs/vae --every_machine    # which machine computes wrongly?

Nothing is written to the folder of the run. Exit code 0: confirmed, 1: it differs, 2: it cannot be told, and why. What
has to be equal, and for whom this is: docs/receipts.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem import distributed
from tandem.commands import script_module, script_parser
from tandem.config.converters import FOLDER, Joined, non_negative_int
from tandem.config.parser import ArgumentParser
from tandem.distributed.backends import all_backends
from tandem.io.exits import FAILED, MISTAKE, exit_codes, exit_process
from tandem.io.reading import error_text, parse_json, read_json, read_lines
from tandem.io.writing import delete, move_aside
from tandem.training.checkpoint.listing import list_checkpoints, step_of
from tandem.training.metrics.directions import COSTS, EVALUATION_SECONDS
from tandem.training.run_folder.starts import environment, starts
from tandem.weights.origin import read_run_arguments

if TYPE_CHECKING:  # importing PyTorch takes seconds
    from tandem.distributed import ProcessGroup
    from tandem.training.run import Run

# What decides the last bits of every run. With --batch_parts nothing else does; without, PLACEMENT does, too.
ALWAYS = ("git_commit", "torch", "processor", "device", "precision", "batch_parts")
PLACEMENT = ("backend", "world_size", "micro_batch_size", "grad_accum_steps", "zero_stage", "cpu_threads")
# Flags that a later start within a stretch may have changed.
WITHOUT_EFFECT = {"output_dir", "num_workers", "timeout_minutes", "keep_n_checkpoints", "save_every_minutes"}
# Of the replay: it makes no saves of its own, and no limit of time ends it.
REPLAYED_WITH = {"max_minutes": None, "save_before_minutes": None, "save_every_minutes": 0.0, "save_every_n_steps": 0,
                 "report_to": "none"}  # fmt: skip
NOT_REPLAYED = {"config", "output_dir", "fresh", "dry_run"}  # with which a script would write elsewhere, or nothing
MARKER = ".replay"  # a file of the replay's folder
# Of a checkpoint: what the time and the folder of the run decide.
NOT_COMPARED = ("progress/seconds", "tokenizer/name")
# metrics.jsonl has 12 digits, of fp64 means that other processes may add in another order.
LAST_DIGIT = 1e-11
# How verdicts begin, and their exit codes; the first that one of several machines has counts.
DIFFERS, UNKNOWN, CONFIRMED = "differs: ", "no verdict: ", "confirmed: "
CODES = {DIFFERS: FAILED, UNKNOWN: MISTAKE, CONFIRMED: 0}
POLL_SECONDS = 0.2


def build_parser() -> ArgumentParser:
    text = "Replay a stretch of a run, and compare every tensor, bit by bit, and every logged value."
    parser = ArgumentParser("verify.py", text, is_root=distributed.launched_as_root)
    parser.usage = "%(prog)s RUN [--updates FIRST:LAST] [flags] [flags of the run's script]"
    # fmt: off
    parser.add_argument("run", type=FOLDER, metavar="RUN",
        help="run folder of a training script; nothing is written to it")
    parser.add_argument("--updates", type=Joined("FIRST:LAST", ":", non_negative_int, count=2, is_ascending=True),
        help="two of the run's checkpoints; 0 as the first: from the beginning (default: the two newest)")
    parser.add_argument("--every_machine", action="store_true",
        help="let the processes of each machine replay the stretch alone, and name the machines that differ")
    parser.add_argument("--output", type=FOLDER, metavar="DIR",
        help="folder of the replay, which all machines see; deleted if it confirms the run (default: RUN.replay)")
    parser.add_argument("--anyway", action="store_true",
        help="replay although PyTorch, processor, backend or processes are others, which may explain a difference")
    # fmt: on
    return parser


class Replay:
    """The updates of a run after `first` up to `last`, made once more in the folder `output`.

    Args:
        updates: (first, last); None: the run's two newest checkpoints.
        anyway: Whether conditions that may change the bits are accepted.

    Raises:
        ValueError: one line, if the run lacks the checkpoints, or does not say how it made these updates.
    """

    def __init__(self, run: Path, updates: tuple[int, int] | None, output: Path, anyway: bool) -> None:
        self.run, self.output, self.anyway = run, output, anyway
        inside = {run.resolve(), output.resolve()} & {*run.resolve().parents, *output.resolve().parents}
        if inside or run.resolve() == output.resolve():
            raise ValueError(f"--output {output}: the replay has to be outside of {run}, and not around it")
        args, lines = read_run_arguments(run), [start for start in starts(run) if isinstance(start.get("step"), int)]
        steps = [0, *map(step_of, list_checkpoints(run / "checkpoints"))]
        self.first, self.last = updates or (steps[-2:] if len(steps) > 1 else (0, 0))
        # A start made the updates from its own first up to those that a later start made once more.
        ends = [min([self.last, *(later["step"] for later in lines[n + 1 :])]) for n in range(len(lines))]
        indices = [n for n, start in enumerate(lines) if max(start["step"], self.first) < ends[n]]
        if updates and self.first >= self.last:
            raise ValueError(f"--updates {self.first}:{self.last}: the second number has to be larger than the first")
        if not (indices and self.first in steps and self.last in steps):
            numbers = ", ".join(map(str, steps))
            raise ValueError(
                f"--updates {self.first}:{self.last}: {run} holds its state after {numbers} updates: "
                "give two of these; a run saves every --save_every_n_steps and keeps the newest --keep_n_checkpoints"
            )
        for start in lines[indices[0] + 1 : indices[-1] + 1]:
            if changed := sorted(start.get("changed", {}).keys() - WITHOUT_EFFECT):
                raise ValueError(f"{self}: --{changed[0]} changed after update {start['step']}; begin or end there")
        #: The conditions of the starts that made the updates.
        self.start_conditions = [conditions(lines[n]) for n in indices]
        #: What the replay's own starts.jsonl begins with.
        self.starts = lines[: indices[0] + 1]
        self.script, self.settings = args.script, script_parser(args.script).settings(args)
        for start in reversed(lines[indices[0] + 1 :]):
            self.settings |= {flag: old for flag, (old, _) in start.get("changed", {}).items()}
        self.settings |= {**REPLAYED_WITH, "output_dir": str(output)}
        self.has_batch_parts = bool(self.settings["batch_parts"])
        if self.has_batch_parts:  # on any backend: the launcher and the flags of the replay choose it
            backend_parser = argparse.ArgumentParser()
            for backend in all_backends().values():
                backend.add_arguments(backend_parser)
            for flag in ("distributed_backend", *vars(backend_parser.parse_args([]))):
                del self.settings[flag]

    def __str__(self) -> str:
        return f"updates {self.first + 1} to {self.last} of {self.run}"

    def prepare(self) -> None:
        """Make the folder, with what a run reads that is resumed there; an earlier replay there is renamed. On the
        root. Raises ValueError, in one line, if something else is there, as another run, or it cannot be written."""
        import yaml

        if (self.output / MARKER).is_file():
            print(f"{self.output} is now {move_aside(self.output)}")
        elif os.path.lexists(self.output) and not (self.output.is_dir() and not any(self.output.iterdir())):
            raise ValueError(f"--output {self.output} exists and is no replay; give another name")
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            (self.output / MARKER).touch()
            (self.output / "best").mkdir()
            (self.output / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in self.starts))
            (self.output / "config.yaml").write_text(yaml.safe_dump(self.settings))
            for name in ("tokenizer.json", "best/best.json"):
                if (self.run / name).is_file():
                    shutil.copyfile(self.run / name, self.output / name)
            if self.first:
                shutil.copytree(checkpoint(self.run, self.first), checkpoint(self.output, self.first))
        except OSError as error:
            delete(self.output)
            raise ValueError(f"cannot write --output {self.output}: {error_text(error)}") from None

    def make(self, flags: Sequence[str]) -> None:
        """Run the script with the flags of the run and further `flags`; `watch` ends the process."""
        import yaml

        from tandem.training.run import Run

        with tempfile.TemporaryDirectory() as folder, Run.watched(self.watch):
            config = Path(folder, "config.yaml")  # other processes may not see that of `output` yet
            config.write_text(yaml.safe_dump(self.settings))
            script_module(self.script).main(["--config", str(config), *flags])

    def watch(self, run: Run, event: str, _: Any) -> None:
        if event == "start":
            with run.processes.raise_on_all_ranks():
                self.check(run)
        elif event == "updated" and run.progress.step == self.last:
            if line := run.line():
                run.write_line(line)
            run.save()
            run.close()
            with run.processes.raise_on_all_ranks():
                verdict = self.verdict(self.has_same_placement(run)) if run.is_root else ""
            verdict = run.processes.broadcast_object(verdict)
            run.processes.say(verdict)
            exit_process(exit_code([verdict]))

    def check(self, run: Run) -> None:
        """Raise ValueError, in one line, if this process cannot be expected to give the bits of the run."""
        now = present_conditions(run)
        names = ALWAYS if self.has_batch_parts else ALWAYS + PLACEMENT
        reasons = [text for start in self.start_conditions for text in differing(start, now, names)]
        if now["device"] != "cpu" and not (self.has_batch_parts or self.settings["deterministic"]):
            reasons.append(
                "neither --deterministic nor --batch_parts, without which a GPU may round otherwise each time"
            )
        if reasons and not self.anyway:
            raise ValueError(f"{self} were made with {', '.join(reasons)}: make that equal, or give --anyway")
        fingerprint = run.feed.first_samples.fingerprint
        if self.start_conditions[0].get("data_fingerprint", fingerprint) != fingerprint:
            raise ValueError(f"files in the data of {self.run} were added, removed or renamed since: restore them")
        state = read_json(checkpoint(self.run, self.last) / "state.json")
        if state["parts"]["progress"].get("finished"):  # by --max_minutes, perhaps
            run.progress.last_step = self.last

    def has_same_placement(self, run: Run) -> bool:
        """Whether the replay has the backend and the processes of the run, so that sums are added in the same order."""
        return not any(differing(start, present_conditions(run), PLACEMENT) for start in self.start_conditions)

    def verdict(self, has_same_placement: bool) -> str:
        """One line: that the replay confirms the run, or the first value and the first tensor that differ."""
        recorded, replayed = (self.values(folder, has_same_placement) for folder in (self.run, self.output))
        # A run that ended at `first`, and was extended, made an evaluation there that the replay does not make.
        names = [n for n in {**recorded, **replayed} if n in replayed or not n.startswith(f"update {self.first}:")]
        texts = {n: difference(recorded.get(n), replayed.get(n), has_same_placement) for n in names}
        differences = [f"{name} {text}" for name, text in texts.items() if text]
        where = f"{self} on {socket.gethostname()}"
        if not differences:
            text = "are the same, bit by bit"
            if not has_same_placement:
                text = (
                    "are the same: tensors bit by bit, logged values to 11 digits, because other processes add them in "
                    "another order; validations were not compared"
                )
            return f"{CONFIRMED}{where}: {len(names)} logged values and tensors {text}"
        logged = [text for text in differences if text.startswith("update ")]
        firsts = "; ".join([*logged[:1], *differences[len(logged) :][:1]])
        return f"{DIFFERS}{where}: {firsts}; {len(differences)} of {len(names)} differ; the replay is in {self.output}"

    def values(self, folder: Path, with_validations: bool) -> dict[str, Any]:
        """What a run logged and saved, by names such as "update 5: loss" and "engine/weights/encoder.0.weight"."""
        from tandem.training.checkpoint.format import read_checkpoint

        values: dict[str, Any] = {}
        for text in read_lines(folder / "metrics.jsonl"):
            with suppress(ValueError):  # the last line of a killed run
                line = parse_json(text)
                position = (line["step"], EVALUATION_SECONDS in line)
                if (self.first, False) < position <= (self.last, False) and (with_validations or not position[1]):
                    values |= {f"update {position[0]}: {name}": line[name] for name in line if name not in COSTS}
        parts = read_checkpoint(checkpoint(folder, self.last), verify=False)[0]
        if not with_validations:
            parts.pop("best", None)
        return values | {name: value for name, value in leaves(parts) if name not in NOT_COMPARED}


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


def conditions(start: Mapping[str, Any]) -> dict[str, Any]:
    """A line of starts.jsonl with what decides the bits by the names of `ALWAYS`."""
    device = str(start.get("device")).partition(":")[0]
    packages = start.get("packages", {})
    return {**start, **({"torch": packages["torch"]} if "torch" in packages else {}), "device": device}


def present_conditions(run: Run) -> dict[str, Any]:
    """`conditions` of the replay."""
    return conditions({**environment(), **run.backend.describe()})


def differing(recorded: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The recorded conditions that are others now, in words. Runs of earlier versions record fewer."""
    pairs = [(name, recorded[name], now.get(name)) for name in names if name in recorded]
    return [f"{name} {old} and not {new}" for name, old, new in pairs if old != new]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts with their paths."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def difference(old: Any, new: Any, is_exact: bool) -> str:
    """How a value or tensor of the run and that of the replay differ, or "". Unless `is_exact`, numbers may differ by
    `LAST_DIGIT`."""
    import torch

    tensors = [x for x in (old, new) if isinstance(x, torch.Tensor)]
    if len(tensors) < 2 or (old.shape, old.dtype) != (new.shape, new.dtype):
        is_near = not is_exact and isinstance(old, float) and isinstance(new, float)
        is_same = not tensors and (old == new or (is_near and math.isclose(old, new, rel_tol=LAST_DIGIT)))
        return "" if is_same else f"is {str(old)[:80]} in the run, {str(new)[:80]} in the replay"
    bits = [x.reshape(-1).view(torch.uint8).reshape(x.numel(), x.element_size()) for x in tensors]
    indices = (bits[0] != bits[1]).any(dim=1).nonzero()
    if not len(indices):
        return ""
    index = tuple(map(int, torch.unravel_index(indices[0, 0], old.shape))) if old.dim() else ()
    values = f"{old[index].item()!r} in the run, {new[index].item()!r} in the replay"
    return f"differs in {len(indices)} of {old.numel()} elements, first at {list(index)}: {values}"


def exit_code(verdicts: Sequence[str]) -> int:
    return next(code for beginning, code in CODES.items() if any(text.startswith(beginning) for text in verdicts))


def compare_machines(words: Sequence[str], output: str, processes: ProcessGroup) -> None:
    """Let each machine replay alone, by a job of as many processes as it has in this one, and print the verdicts.

    Args:
        words: The arguments for each replay, but --output.
    """
    host, verdict = socket.gethostname(), ""
    count = processes.gather_objects(host).count(host)
    with processes.raise_on_all_ranks():
        if processes.local_rank == 0:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
            command = [*launcher, sys.argv[0], *words, "--output", f"{output}-{host}"]
            env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
            with (
                tempfile.TemporaryFile("w+") as output_file,
                subprocess.Popen(command, env=env, stdout=output_file) as replay,
            ):
                while replay.poll() is None:
                    processes.heartbeat("waiting for the replay of this machine")
                    time.sleep(POLL_SECONDS)
                output_file.seek(0)
                own_lines = (line.strip() for line in output_file if line.startswith((CONFIRMED, DIFFERS)))
                verdict = next(own_lines, f"{UNKNOWN}{host}, whose error is above")
    verdicts = [text for text in processes.gather_objects(verdict) if text]
    for text in verdicts:
        processes.say(text)
    exit_process(exit_code(verdicts))


def main(argv: Sequence[str] | None = None) -> None:
    parser, words = build_parser(), sys.argv[1:] if argv is None else argv
    args, flags = parser.parse_known_args(words)
    output = args.output or f"{Path(args.run)}.replay"
    if args.every_machine:
        common = ArgumentParser("verify.py", is_root=distributed.launched_as_root)
        distributed.add_arguments(common, trains=False)
        start = argparse.Namespace(**vars(common.parse([])), fresh=False, cpu_threads=1, precision="fp32")
        words = [word for word in words if word != "--every_machine"]
        distributed.launch_inference(partial(compare_machines, words, output), common, start)
    with exit_codes(parser.error):
        replay = Replay(Path(args.run), args.updates, Path(output), args.anyway)
        script_flags = script_parser(replay.script)._option_string_actions
        for word in (word.partition("=")[0] for word in flags):
            if word in script_flags and script_flags[word].dest in NOT_REPLAYED:
                raise ValueError(f"{word}: a replay has the flags of its run, and is made in --output; leave it out")
        if distributed.launched_as_root():
            replay.prepare()
    is_kept = False
    try:
        replay.make(flags)
        parser.error(f"{replay}: the replay ended before, because of its flags, so there is no verdict", is_agreed=True)
    except SystemExit as ending:
        is_kept = ending.code == FAILED  # its files show how it differs, or why it failed
        raise
    finally:
        if distributed.launched_as_root() and not is_kept:
            delete(replay.output)


if __name__ == "__main__":
    main()
