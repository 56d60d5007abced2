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
from tandem.commands import script_module
from tandem.config.parser import ArgumentParser
from tandem.distributed.backends import all_backends
from tandem.io.exits import FAILED, MISTAKE, exit_codes, exit_process
from tandem.io.reading import parse_json, read_json, read_lines, read_yaml
from tandem.io.renamed import rename_settings
from tandem.io.writing import delete, move_aside
from tandem.training.checkpoint.listing import list_checkpoints, step_of
from tandem.training.metrics.directions import COSTS, EVALUATION_SECONDS
from tandem.training.run_folder.starts import environment, script_of, starts

if TYPE_CHECKING:  # importing PyTorch takes seconds
    from tandem.distributed import ProcessGroup
    from tandem.training.run import Run

# What decides the last bits of every run. With --batch_parts nothing else does; without, PLACEMENT does, too.
ALWAYS = ("git_commit", "torch", "processor", "device", "precision", "batch_parts")
PLACEMENT = ("backend", "world_size", "micro_batch_size", "grad_accum_steps", "zero_stage", "cpu_threads")
# Flags that a later start within a stretch may have changed.
WITHOUT_EFFECT = {"output_dir", "num_workers", "timeout_minutes", "keep_n_checkpoints", "save_every_minutes"}
# metrics.jsonl has 12 digits, of fp64 means that other processes may add in another order.
LAST_DIGIT = 1e-11
CONFIRMED, DIFFERS = "confirmed: ", "differs: "
POLL_SECONDS = 0.2


def build_parser() -> ArgumentParser:
    text = "Replay a stretch of a run, and compare every logged value and every tensor bit by bit."
    parser = ArgumentParser("verify.py", text, is_root=distributed.launched_as_root)
    parser.usage = "%(prog)s RUN [--updates FIRST:LAST] [flags] [flags of the run's script]"
    # fmt: off
    parser.add_argument("run", metavar="RUN", help="run folder of a training script; nothing is written to it")
    parser.add_argument("--updates", type=parse_updates, metavar="FIRST:LAST",
        help="two of the run's checkpoints; 0 as the first: from the beginning (default: the two newest)")
    parser.add_argument("--every_machine", action="store_true",
        help="let the processes of each machine replay the stretch alone, and name the machines that differ")
    parser.add_argument("--output", metavar="DIR",
        help="folder of the replay, which all machines see; deleted if it confirms the run (default: RUN.replay)")
    parser.add_argument("--anyway", action="store_true",
        help="replay although PyTorch, processor, backend or processes are others, which may explain a difference")
    # fmt: on
    return parser


def parse_updates(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST, such as 1000:1500")
    return int(first), int(last)


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
        lines = [start for start in starts(run) if isinstance(start.get("step"), int)]
        if not (lines and script_of(run)):
            raise ValueError(f"{run} is no run folder: expected its config.yaml and starts.jsonl")
        kept = [0, *map(step_of, list_checkpoints(run / "checkpoints"))]
        self.first, self.last = updates or (kept[-2:] if len(kept) > 1 else (0, 0))
        if not (self.first in kept and self.last in kept[1:]):
            raise ValueError(
                f"--updates {self.first}:{self.last}: {run} holds the states after {', '.join(map(str, kept))} updates, "
                "so give two of these; a run saves every --save_every_n_steps and keeps --keep_n_checkpoints"
            )
        # A start made the updates from its own first up to those that a later start made once more.
        ends = [min([self.last, *(later["step"] for later in lines[n + 1 :])]) for n in range(len(lines))]
        indices = [n for n, start in enumerate(lines) if max(start["step"], self.first) < ends[n]]
        first_maker, last_maker = indices[0], indices[-1]
        for start in lines[first_maker + 1 : last_maker + 1]:
            if changed := sorted(start.get("changed", {}).keys() - WITHOUT_EFFECT):
                raise ValueError(f"{self}: --{changed[0]} changed after update {start['step']}; begin or end there")
        #: The conditions of the starts that made the updates, and what the replay's own starts.jsonl begins with.
        self.makers, self.starts = [conditions(lines[n]) for n in indices], lines[: first_maker + 1]
        self.settings = rename_settings(read_yaml(run / "config.yaml"))
        for start in reversed(lines[first_maker + 1 :]):
            self.settings |= {flag: old for flag, (old, _) in start.get("changed", {}).items()}
        self.has_parts = bool(self.makers[0].get("batch_parts"))
        if self.has_parts:  # on any backend: the launcher and the flags of the replay choose it
            flags = argparse.ArgumentParser()
            for backend in all_backends().values():
                backend.add_arguments(flags)
            for flag in ("distributed_backend", *vars(flags.parse_args([]))):
                self.settings.pop(flag, None)
        self.settings |= {"max_minutes": None, "save_before_minutes": None, "save_every_minutes": 0.0,
                          "save_every_n_steps": 0, "report_to": "none", "output_dir": str(output)}  # fmt: skip
        #: Whether the replay's processes add in the order of the run's; `check` sets it.
        self.is_alike = True

    def __str__(self) -> str:
        return f"updates {self.first + 1} to {self.last} of {self.run}"

    def checkpoint(self, folder: Path, step: int) -> Path:
        return folder / "checkpoints" / f"step_{step:08d}"

    def prepare(self) -> None:
        """Make the folder, with what a run reads that is resumed there. On the root. Raises OSError."""
        import yaml

        if self.output.exists():
            move_aside(self.output)
        (self.output / "best").mkdir(parents=True)
        (self.output / "config.yaml").write_text(yaml.safe_dump(self.settings))
        (self.output / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in self.starts))
        for name in ("tokenizer.json", "best/best.json"):
            if (self.run / name).is_file():
                shutil.copyfile(self.run / name, self.output / name)
        if self.first:
            shutil.copytree(self.checkpoint(self.run, self.first), self.checkpoint(self.output, self.first))

    def make(self, flags: Sequence[str]) -> None:
        """Run the script with the flags of the run and further `flags`; `watch` ends the process."""
        import yaml

        from tandem.training.run import Run

        with tempfile.TemporaryDirectory() as folder, Run.watched(self.watch):
            config = Path(folder, "config.yaml")  # other processes may not see that of `output` yet
            config.write_text(yaml.safe_dump(self.settings))
            script_module(self.makers[0]["script"]).main(["--config", str(config), *flags])

    def watch(self, run: Run, event: str, _: Any) -> None:
        if event == "start":
            with run.processes.raise_on_all_ranks():
                self.check(run)
        elif event == "updated" and run.progress.step == self.last:
            if line := run.line():
                run.write_line(line)
            run.save()
            run.close()
            verdict = ""
            with run.processes.raise_on_all_ranks():
                if run.is_root:
                    run.processes.heartbeat("comparing with the run", is_uninterrupted=True)
                    verdict = self.verdict()
            verdict = run.processes.broadcast_object(verdict)
            run.processes.say(verdict)
            exit_process(FAILED if verdict.startswith(DIFFERS) else 0)

    def check(self, run: Run) -> None:
        """Raise ValueError, in one line, if this process cannot be expected to give the bits of the run."""
        now = conditions({**environment(), **run.backend.describe()})
        self.is_alike = not any(differing(maker, now, PLACEMENT) for maker in self.makers)
        names = ALWAYS if self.has_parts else ALWAYS + PLACEMENT
        reasons = dict.fromkeys(text for maker in self.makers for text in differing(maker, now, names))
        if now["device"] != "cpu" and not (self.has_parts or self.settings.get("deterministic")):
            reasons["neither --deterministic nor --batch_parts, so that a GPU may round otherwise each time"] = None
        if reasons and not self.anyway:
            raise ValueError(f"{self} were made with {', '.join(reasons)}: make that equal, or give --anyway")
        fingerprint = run.feed.first_samples.fingerprint
        if self.makers[0].get("data_fingerprint", fingerprint) != fingerprint:
            raise ValueError(f"files in the data of {self.run} were added, removed or renamed since: restore them")
        state = read_json(self.checkpoint(self.run, self.last) / "state.json")
        if state["parts"]["progress"].get("finished"):  # by --max_minutes, perhaps
            run.progress.last_step = self.last

    def verdict(self) -> str:
        """One line: that the replay confirms the run, or the first values and tensors that differ. On the root."""
        recorded, replayed = self.values(self.run), self.values(self.output)
        # A run that ended at `first`, and was extended, made an evaluation there that the replay does not make.
        names = [n for n in {**recorded, **replayed} if n in replayed or not n.startswith(f"update {self.first}:")]
        texts = {name: self.difference(recorded.get(name), replayed.get(name)) for name in names}
        found = [f"{name} {text}" for name, text in texts.items() if text]
        beginning = f"{self} on {socket.gethostname()}"
        if not found:
            delete(self.output)
            note = "" if self.is_alike else "; validations, whose sums depend on the processes, were not compared"
            return f"{CONFIRMED}{beginning}: {len(names)} logged values and tensors are the same, bit by bit{note}"
        firsts = [
            next((text for text in found if text.startswith("update ") == is_log), None) for is_log in (True, False)
        ]
        text = "; ".join(
            first or what for first, what in zip(firsts, ("the log agrees", "the tensors agree"), strict=True)
        )
        return f"{DIFFERS}{beginning}: {text}; {len(found)} of {len(names)} differ; the replay is in {self.output}"

    def values(self, folder: Path) -> dict[str, Any]:
        """What a run logged and saved, by names such as "update 5: loss" and "engine/weights/encoder.0.weight"."""
        from tandem.training.checkpoint.format import read_checkpoint

        values: dict[str, Any] = {}
        for text in read_lines(folder / "metrics.jsonl"):
            with suppress(ValueError):  # the last line of a killed run
                line = parse_json(text)
                position = (line["step"], EVALUATION_SECONDS in line)
                if (self.first, False) < position <= (self.last, False) and (self.is_alike or not position[1]):
                    values |= {f"update {position[0]}: {name}": line[name] for name in line if name not in COSTS}
        parts = read_checkpoint(self.checkpoint(folder, self.last), verify=False)[0]
        del parts["progress"]["seconds"]
        if not self.is_alike:
            parts.pop("best", None)
        return values | dict(leaves(parts))

    def difference(self, old: Any, new: Any) -> str:
        """How a value or tensor of the run and that of the replay differ, or ""."""
        import torch

        if isinstance(old, float) and isinstance(new, float) and not self.is_alike:
            new = old if math.isclose(old, new, rel_tol=LAST_DIGIT, abs_tol=LAST_DIGIT) else new
        tensors = [x for x in (old, new) if isinstance(x, torch.Tensor)]
        if len(tensors) < 2 or (old.shape, old.dtype) != (new.shape, new.dtype):
            is_same = not tensors and old == new
            return "" if is_same else f"is {str(old)[:80]} in the run, {str(new)[:80]} in the replay"
        bits = [x.reshape(-1).view(torch.uint8).reshape(x.numel(), x.element_size()) for x in tensors]
        places = (bits[0] != bits[1]).any(dim=1).nonzero()
        if not len(places):
            return ""
        index = tuple(map(int, torch.unravel_index(places[0, 0], old.shape))) if old.dim() else ()
        return (
            f"differs in {len(places)} of {old.numel()} elements, first at {list(index)}: {old[index].item()!r} in the "
            f"run, {new[index].item()!r} in the replay"
        )


def conditions(start: Mapping[str, Any]) -> dict[str, Any]:
    """A line of starts.jsonl with what decides the bits by the names of `ALWAYS`."""
    return {
        **start,
        "torch": start.get("packages", {}).get("torch"),
        "device": str(start.get("device")).partition(":")[0],
    }


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


def compare_machines(words: Sequence[str], output: Path, processes: ProcessGroup) -> None:
    """Let each machine replay alone, by a job of as many processes as it has in this one, and print the verdicts.

    Args:
        words: The arguments for each replay, but --output.
    """
    host, verdict = socket.gethostname(), ""
    count = processes.gather_objects(host).count(host)
    with processes.raise_on_all_ranks():
        if processes.local_rank == 0:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
            command = [sys.executable, *launcher, sys.argv[0], *words, "--output", f"{output}-{host}"]
            env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
            with tempfile.TemporaryFile("w+") as said, subprocess.Popen(command, env=env, stdout=said) as replay:
                try:
                    while replay.poll() is None:
                        processes.heartbeat("waiting for the replay of this machine")
                        time.sleep(POLL_SECONDS)
                finally:
                    replay.terminate()
                said.seek(0)
                verdict = next((line.strip() for line in said if line.startswith((CONFIRMED, DIFFERS))), "none")
    verdicts = {name: text for name, text in processes.gather_objects([host, verdict]) if text}
    for name, text in verdicts.items():
        processes.say(f"{name}: no verdict; the error above says why" if text == "none" else text)
    is_different = any(text.startswith(DIFFERS) for text in verdicts.values())
    exit_process(FAILED if is_different else MISTAKE if "none" in verdicts.values() else 0)


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args, flags = parser.parse_known_args(argv)
    run = Path(args.run)
    output = Path(args.output or f"{run}.replay")
    with exit_codes(parser.error):
        if not args.every_machine:
            replay = Replay(run, args.updates, output, args.anyway)
            if distributed.launched_as_root():
                replay.prepare()
    if not args.every_machine:
        replay.make(flags)
        return
    common = ArgumentParser("verify.py", is_root=distributed.launched_as_root)
    distributed.add_arguments(common, trains=False)
    processes_args = common.parse([])
    vars(processes_args).update(fresh=False, cpu_threads=1, precision="fp32")
    words = [str(run), *(["--anyway"] if args.anyway else []), *flags]
    words += ["--updates", "{}:{}".format(*args.updates)] if args.updates else []
    distributed.launch_inference(partial(compare_machines, words, output), common, processes_args)


if __name__ == "__main__":
    main()
