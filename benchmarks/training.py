"""The training benchmarks: speed against the references, several processes, memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import machine
from .jobs import (
    FSDP,
    GIVE_MEMORY_BACK,
    HOROVODRUN,
    LAUNCHERS,
    PYTHON,
    TORCHRUN,
    ZERO,
    JobFailed,
    Launcher,
    label,
    measure,
)
from .references import DDP, DESCRIPTIONS, HOROVOD, REFERENCE
from .report import Goal, Row
from .slow_network import SlowNetwork, slow_network

_SPEED_GOAL = Goal("ratio", ">=", 0.97)
_MIB = 2**20

# Small enough for two cores (a quarter of a second per update on one of them). Relative to its computing time it has
# more weights than the script's default model at the default image size (1.8 million weights and 0.27 s per update,
# against 17 million and 6 s). The engine's work grows with the number of weights, so its share is larger here.
_SMALL_MODEL = ("--image_size", "64", "--num_tokens", "2048", "--emb_dim", "256", "--num_layers", "3",
                "--num_resnet_blocks", "1", "--hidden_dim", "96")  # fmt: skip
# For each script: a model, turns of a round, updates of a turn. A round is as long as the default logging interval, so
# that each logs once; two models that play against each other have the penalty at each fourth update.
SMALL_MODELS = {
    "train_vae": (" ".join([*_SMALL_MODEL, "--batch_size 8"]), 10, 1),
    "train_vqgan": (
        "--image_size 64 --dim 32 --num_layers 3 --codebook_size 1024 --discr_layers 2 --batch_size 8", 1, 4
    ),
    "train_mulan": (
        "--audio_dim 64 --audio_depth 2 --text_dim 64 --text_depth 2 --heads 4 --dim_head 16 --dim_latent 32 "
        "--batch_size 16", 5, 2,
    ),
    "train_tokenizer": (
        "--image_size 32 --num_frames 9 --init_dim 16 --input_kernel 3 --codebook_size 1024 --discr_layers 2 "
        "--batch_size 4", 1, 4,
    ),
    "train_decoder": (
        "--image_sizes 16 32 --dim 16 --dim_mults 1,2 --num_resnet_blocks 1 --attn_heads 4 --attn_dim_head 16 "
        "--cross_attn_heads 4 --cross_attn_dim_head 16 --batch_size 16 --sample_timesteps 1 --num_images_save 1", 5, 2,
    ),
}  # fmt: skip
# 89 million parameters in many tensors, on images so small that weights, gradients and moments take most memory.
_HEAVY_MODEL = ("--image_size", "16", "--hidden_dim", "512", "--num_resnet_blocks", "6")
# The script's default model at its default image size, in a batch that keeps a GPU busy.
_GPU_MODEL = ("--batch_size", "64")
_SAMPLES_PER_PROCESS = 4
_COMPARED = (TORCHRUN, FSDP, ZERO[3])  # on four processes too: nothing is sharded, or everything


def training(rounds: int) -> Iterator[Row]:
    """Samples per second of each script in one process over those of its reference, and the peaks of both."""
    if machine.gpus():
        for precision in ("fp32", "bf16"):
            for compiled in ((), ("--compile",)):
                flags = (*_GPU_MODEL, "--precision", precision, *compiled)
                name = " ".join(["train_vae.py", precision, *compiled])
                # Turns of several updates: the host runs ahead of the GPU, as it does in a run.
                yield from _against_its_reference(name, "train_vae", flags, rounds=rounds, turns=3, updates=10)
        return
    for script, (flags, turns, updates) in SMALL_MODELS.items():
        yield from _against_its_reference(
            f"{script}.py", script, flags.split(), rounds=rounds, turns=turns, updates=updates
        )


def _against_its_reference(name: str, script: str, flags: Sequence[str], **counts: int) -> Iterator[Row]:
    try:
        result = measure(PYTHON, ["script", REFERENCE], flags, script=script, environment=GIVE_MEMORY_BACK, **counts)
    except JobFailed as error:
        yield Row(name, "samples/s", note=str(error))
        return
    yield from _against(result, name, {REFERENCE: _SPEED_GOAL})
    ours, theirs = ([peak_mib(result[side]["memory_bytes"])] for side in ("script", REFERENCE))
    yield Row("... peak memory", "MiB", ours, theirs, note="over that of the reference; the imports included")


def scaling(rounds: int) -> Iterator[Row]:
    """One and two processes of each backend, and four of those that shard all and of one that shards nothing, over as
    many references that run side by side without communicating.

    Each process has the same share of the batch and the same number of threads in both cases.
    """
    gpus = machine.gpus()
    if gpus == 1:
        yield Row("2 processes", "samples/s", note="needs two GPUs; CUDA_VISIBLE_DEVICES= measures the CPU")
        return
    model, share, turns, updates = ((), 32, 3, 10) if gpus else (_SMALL_MODEL, _SAMPLES_PER_PROCESS, 5, 1)
    for launcher in LAUNCHERS:
        medians: dict[int, dict[str, float]] = {}
        for started in _counted(launcher, gpus, smallest=1):
            processes = started.processes
            try:
                flags = (*model, "--batch_size", str(share * processes), "--log_every_n_steps", str(turns * updates))
                threads = max(1, machine.cores() // 2)
                sides = ["script", REFERENCE]
                speeds = rates(
                    measure(started, sides, flags, threads=threads, rounds=rounds, turns=turns, updates=updates)
                )
            except JobFailed as error:
                yield Row(label(started), "samples/s", note=str(error))
                continue
            medians[processes] = {side: statistics.median(values) for side, values in speeds.items()}
            yield Row(label(started), "samples/s", speeds["script"], speeds[REFERENCE], note=_speed_up(medians))


def _counted(launcher: Launcher, gpus: int, smallest: int) -> list[Launcher]:
    """The launcher with each number of processes to measure it with, of which a GPU has one."""
    wanted = (1, 2, 4) if launcher in _COMPARED else (1, 2)
    return [replace(launcher, processes=count) for count in wanted if smallest <= count <= (gpus or count)]


def exchange(rounds: int) -> Iterator[Row]:
    """Samples per second of train_vae.py on two and four processes over those of its reference in PyTorch's
    DistributedDataParallel, and with Horovod's optimizer: on this machine, and on two that a slow network connects."""
    gpus = machine.gpus()
    if gpus == 1:
        yield Row("2 processes", "samples/s", note="needs two GPUs; CUDA_VISIBLE_DEVICES= measures the CPU")
        return
    counts = (2, 4) if gpus != 2 else (2,)
    yield from _exchanges(rounds, counts, None)
    if not gpus:
        try:
            with slow_network() as network:
                yield from _exchanges(rounds, counts, network)
        except OSError as error:
            yield Row("2 machines, 1 Gbit/s, 2 ms", "samples/s", note=str(error))


def _exchanges(rounds: int, counts: Sequence[int], network: SlowNetwork | None) -> Iterator[Row]:
    model, share, turns, updates = ((), 32, 3, 10) if machine.gpus() else (_SMALL_MODEL, _SAMPLES_PER_PROCESS, 5, 2)
    for launcher, side in ((TORCHRUN, DDP), (HOROVODRUN, HOROVOD)):
        for processes in counts:
            started = replace(launcher, processes=processes)
            name = f"{label(started)}{', 1 Gbit/s, 2 ms' if network else ''}"
            flags = (*model, "--batch_size", str(share * processes), "--log_every_n_steps", str(turns * updates))
            try:
                result = measure(
                    started, ["script", side], flags, rounds=rounds, turns=turns, updates=updates, network=network
                )
            except JobFailed as error:
                yield Row(name, "samples/s", note=str(error))
                continue
            yield from _against(result, name, {side: Goal("ratio", ">=", 0.98)})


def memory() -> Iterator[Row]:
    """Peak memory of the largest of two processes, or four, per backend and ZeRO stage, over that of one reference.

    On the CPU it is resident memory, the imports included.
    """
    gpus = machine.gpus()
    try:
        reference = _memory(PYTHON, REFERENCE)
    except JobFailed as error:
        yield Row("reference", "MiB", note=str(error))
        return
    smallest = 1 if gpus == 1 else 2
    several = [started for launcher in LAUNCHERS for started in _counted(launcher, gpus, smallest)]
    for launcher in [PYTHON, *several]:
        name = f"memory, {label(launcher)}"
        try:
            ours = _memory(launcher, "script")
        except JobFailed as error:
            yield Row(name, "MiB", note=str(error))
            continue
        note = (
            f"above the imports: {above_mib(ours, 'start')} to start, {above_mib(ours, 'updates')} for updates "
            f"(reference {above_mib(reference, 'start')}, {above_mib(reference, 'updates')})"
        )
        yield Row(name, "MiB", [peak_mib(ours)], [peak_mib(reference)], note=note)


def _against(result: Mapping[str, Mapping[str, Any]], name: str, goals: Mapping[str, Goal | None]) -> Iterator[Row]:
    """The rows of a script over each side in `goals`, of what `jobs.measure` returned."""
    speeds = rates(result)
    by_cpu_time = {side: statistics.median(values["samples_per_cpu_second"]) for side, values in result.items()}
    for side, goal in goals.items():
        # The ratio in CPU time changes little if other programs run on the machine; it ignores a GPU's work.
        cpu = "" if machine.gpus() else f"; in CPU time {by_cpu_time['script'] / by_cpu_time[side]:.3f}"
        note = f"over {DESCRIPTIONS[side]}{cpu}"
        yield Row(name, "samples/s", speeds["script"], speeds[side], goal, note)


def rates(result: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Samples per second of each round, by side, of what `jobs.measure` returned."""
    return {side: values["samples_per_second"] for side, values in result.items()}


def _speed_up(medians: dict[int, dict[str, float]]) -> str:
    if not {1, 2} <= medians.keys():
        return ""
    script, reference = (medians[2][side] / medians[1][side] for side in medians[1])
    return f"1 -> 2 processes: {script:.2f} x (reference {reference:.2f} x)"


def _memory(launcher: Launcher, side: str) -> dict[str, int]:
    flags = (*_HEAVY_MODEL, "--batch_size", str(_SAMPLES_PER_PROCESS * launcher.processes))
    result = measure(launcher, [side], flags, rounds=1, turns=3, updates=1, environment=GIVE_MEMORY_BACK)
    found: dict[str, int] = result[side]["memory_bytes"]
    return found


def peak_mib(memory_bytes: Mapping[str, int]) -> float:
    """The peak of a process, in MiB, of what `worker.Side.write` writes."""
    return max(memory_bytes["start"], memory_bytes["updates"]) / _MIB


def above_mib(memory_bytes: Mapping[str, int], when: str) -> str:
    """The peak of "start" or "updates" above the memory that the imports take, in MiB."""
    return f"{(memory_bytes[when] - memory_bytes['before']) / _MIB:.0f}"
