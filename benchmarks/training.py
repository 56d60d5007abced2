"""The training benchmarks: speed against the references, several processes, memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import machine
from .jobs import GIVE_MEMORY_BACK, HOROVODRUN, LAUNCHERS, ONE_PROCESS, TORCHRUN, JobFailed, Launcher, label, measure
from .references import DDP, DDP_SAME_NOISE, DESCRIPTIONS, HOROVOD, REFERENCE, SCRIPT
from .report import Row, comparison, failure_row

# Small enough for two cores (a quarter of a second per update on one of them). Relative to its computing time it has
# more weights than the script's default model at the default image size (1.8 million weights and 0.27 s per update,
# against 17 million and 6 s). The engine's work grows with the number of weights, so its share is larger here.
_SMALL_MODEL = "--image_size 64 --num_tokens 2048 --emb_dim 256 --num_layers 3 --num_resnet_blocks 1 --hidden_dim 96"
# For each script: a model, turns of a round, updates of a turn. A round is as long as the default logging interval, so
# that each logs once; a script with a discriminator has a gradient penalty at each fourth update.
WORKLOADS = {
    "train_vae": (f"{_SMALL_MODEL} --batch_size 8", 10, 1),
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
_HEAVY_MODEL = "--image_size 16 --hidden_dim 512 --num_resnet_blocks 6"
# The script's default model at its default image size, in a batch that keeps a GPU busy.
_GPU_MODEL = "--batch_size 64"
_SAMPLES_PER_PROCESS = 4


def training(rounds: int) -> Iterator[Row]:
    """Samples per second of each script in one process over those of its reference, and the peak memory of both."""
    if machine.gpus():
        # Turns of several updates: the host runs ahead of the GPU, as it does in a run.
        workloads = {
            f"train_vae {option}": (f"{_GPU_MODEL} --precision {option}", 3, 10)
            for option in ("fp32", "fp32 --compile", "bf16", "bf16 --compile")
        }
    else:
        workloads = WORKLOADS
    for name, (flags, turns, updates) in workloads.items():
        script, _, option = name.partition(" ")
        name = f"{script}.py {option}".strip()
        try:
            result = measure(ONE_PROCESS, [SCRIPT, REFERENCE], flags.split(), script=script, rounds=rounds,
                             turns=turns, updates=updates, environment=GIVE_MEMORY_BACK)  # fmt: skip
        except JobFailed as error:
            yield failure_row(name, error)
            continue
        yield _speed_row(name, result, REFERENCE, goal=0.97)
        ours, reference = ([peak_mib(result[side]["memory_bytes"])] for side in (SCRIPT, REFERENCE))
        yield comparison("... peak memory", "MiB", ours, reference, "over that of the reference; the imports included")


def scaling(rounds: int) -> Iterator[Row]:
    """One, two and four processes of each backend over as many references that run side by side without communicating.

    Each process has the same share of the batch and the same number of threads in all cases.
    """
    yield from _on_several(rounds, (1, 2, 4), dict.fromkeys(LAUNCHERS, (REFERENCE,)))


def exchange(rounds: int) -> Iterator[Row]:
    """Samples per second of train_vae.py on two and four processes over those of its reference in PyTorch's
    DistributedDataParallel, without and with the script's noise, and with Horovod's optimizer."""
    sides = {TORCHRUN: (DDP, DDP_SAME_NOISE), HOROVODRUN: (HOROVOD,)}
    yield from _on_several(rounds, (2, 4), sides, goal=0.98)


def _on_several(
    rounds: int, counts: tuple[int, ...], sides: Mapping[Launcher, tuple[str, ...]], goal: float | None = None
) -> Iterator[Row]:
    """train_vae.py by each launcher, over its sides, on each number of processes, of which a GPU has one."""
    gpus = machine.gpus()
    if gpus == 1:
        yield Row("2 processes", note="needs two GPUs; CUDA_VISIBLE_DEVICES= measures the CPU")
        return
    model, share, turns, updates = ("", 32, 3, 10) if gpus else (_SMALL_MODEL, _SAMPLES_PER_PROCESS, 5, 2)
    for launcher, others in sides.items():
        for processes in [count for count in counts if count <= (gpus or count)]:
            several = replace(launcher, processes=processes)
            flags = f"{model} --batch_size {share * processes} --log_every_n_steps {turns * updates}".split()
            try:
                result = measure(several, [SCRIPT, *others], flags, rounds=rounds, turns=turns, updates=updates,
                                 threads=max(1, machine.cores() // max(counts)))  # fmt: skip
            except JobFailed as error:
                yield failure_row(label(several), error)
                continue
            yield from (_speed_row(label(several), result, side, goal) for side in others)


def memory() -> Iterator[Row]:
    """Peak memory of the largest of two processes per backend and ZeRO stage, over that of one reference.

    On the CPU it is resident memory, the imports included.
    """
    processes = 1 if machine.gpus() == 1 else 2
    reference = None
    for launcher in [ONE_PROCESS, *(replace(launcher, processes=processes) for launcher in LAUNCHERS)]:
        name, flags = label(launcher), f"{_HEAVY_MODEL} --batch_size {_SAMPLES_PER_PROCESS * launcher.processes}"
        sides = [SCRIPT, *([] if reference else [REFERENCE])]
        try:
            result = measure(launcher, sides, flags.split(), rounds=1, turns=3, updates=1, environment=GIVE_MEMORY_BACK)
        except JobFailed as error:
            yield failure_row(name, error)
            continue
        ours = result[SCRIPT]["memory_bytes"]
        reference = reference or result[REFERENCE]["memory_bytes"]
        note = (
            f"above the imports: {_above_mib(ours, 'start')} to start, {_above_mib(ours, 'updates')} for updates "
            f"(reference {_above_mib(reference, 'start')}, {_above_mib(reference, 'updates')})"
        )
        yield comparison(name, "MiB", [peak_mib(ours)], [peak_mib(reference)], note)


def _speed_row(name: str, result: Mapping[str, Mapping[str, Any]], side: str, goal: float | None = None) -> Row:
    """The row that compares the script with another side, from the result of `jobs.measure`."""
    by_cpu_time = {side: statistics.median(values["samples_per_cpu_second"]) for side, values in result.items()}
    # The ratio in CPU time changes little if other programs run on the machine; it ignores a GPU's work.
    cpu = "" if machine.gpus() else f"; in CPU time {by_cpu_time[SCRIPT] / by_cpu_time[side]:.3f}"
    ours, reference = (result[key]["samples_per_second"] for key in (SCRIPT, side))
    return comparison(name, "samples/s", ours, reference, f"over {DESCRIPTIONS[side]}{cpu}", goal)


def peak_mib(memory_bytes: Mapping[str, int]) -> float:
    """The peak of a process in MiB, from "memory_bytes" of `worker.Side.write`."""
    return max(memory_bytes["start"], memory_bytes["updates"]) / 2**20


def _above_mib(memory_bytes: Mapping[str, int], when: str) -> str:
    """The peak of "start" or "updates" above the memory that the imports take, in MiB."""
    return f"{(memory_bytes[when] - memory_bytes['before']) / 2**20:.0f}"
