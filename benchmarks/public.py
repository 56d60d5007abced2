"""Samples per second of every script over those of the public trainer that it follows, in fp32 and bf16.

Each side has a process of its own, and they take turns, as worker.py describes. The models are equal in widths, layers,
sides and batches; what differs is in docs/figures.md. The public packages are not installed with this repository.

    python -m benchmarks.public --only vae,mulan --rounds 5
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import distributed

from . import public_loops, report
from .flags import names_of
from .jobs import JobFailed, run
from .report import Row
from .worker import SCRIPT, Script, Side

PUBLIC = "public"
PRECISIONS = ("fp32", "bf16")
# All work other than the updates is switched off, so that every update does the same.
QUIET = ("--valid_fraction", "0", "--num_workers", "0", "--validate_every_n_steps", "0", "--sample_every_n_steps", "0",
          "--save_every_n_steps", "0", "--log_every_n_steps", "10", "--epochs", "1e9")  # fmt: skip
_ACCELERATE = ("accelerate", "beartype", "ema-pytorch", "einops")


@dataclass(frozen=True)
class Comparison:
    """A script and the public trainer that does the same.

    Args:
        script: Name of the script's module.
        package: The public package, as pip knows it.
        needs: What else pip must install, where only what an update uses is wanted.
        unused: Modules that the package imports and that no update uses.
        loop: Makes one update per ``next``.
        flags: The script's, which describe both models.
    """

    script: str
    package: str
    needs: tuple[str, ...]
    unused: tuple[str, ...]
    loop: Callable[[argparse.Namespace, str, Path], Iterator[None]]
    flags: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        """What is not installed, as pip knows it."""
        names = (self.package.split("==")[0], *self.needs)
        return [name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None]

    @property
    def pip_line(self) -> str:
        """Installs the package without what it imports in vain."""
        return f"pip install --no-deps {' '.join((self.package, *self.needs))}"


COMPARISONS = {
    "vae": Comparison(
        "train_vae", "dalle-pytorch==1.6.6", ("axial-positional-embedding", "rotary-embedding-torch", "einops"),
        ("taming", "taming.models", "taming.models.vqgan", "omegaconf", "youtokentome", "transformers", "tokenizers",
         "tokenizers.processors", "ftfy"),
        public_loops.dalle_pytorch, ("--config", "configs/vae/demo.yaml"),
    ),
    "vqgan": Comparison(
        "train_vqgan", "muse-maskgit-pytorch==0.3.5", (*_ACCELERATE, "vector-quantize-pytorch"),
        ("muse_maskgit_pytorch.t5", "memory_efficient_attention_pytorch",
         "memory_efficient_attention_pytorch.flash_attention"), public_loops.muse_maskgit,
        ("--image_folder", "demo:shapes:64", "--image_size", "64", "--batch_size", "16", "--dim", "32",
         "--num_layers", "2", "--codebook_size", "1024", "--discr_layers", "2", "--apply_grad_penalty_every", "1"),
    ),
    "mulan": Comparison(
        "train_mulan", "musiclm-pytorch==0.2.8",
        (*_ACCELERATE, "torchaudio", "lion-pytorch", "vector-quantize-pytorch", "x-clip", "ftfy", "regex"),
        ("audiolm_pytorch", "audiolm_pytorch.utils"), public_loops.musiclm,
        ("--config", "configs/mulan/demo.yaml", "--spectrogram", "power", "--n_fft", "128", "--hop_length", "125",
         "--clip_seconds", "1"),
    ),
    "tokenizer": Comparison(
        "train_tokenizer", "magvit2-pytorch==0.5.1",
        (*_ACCELERATE, "vector-quantize-pytorch", "gateloop-transformer", "rotary-embedding-torch", "kornia",
         "kornia-rs", "taylor-series-linear-attention", "jaxtyping", "wadler-lindig", "pytorch-warmup",
         "pytorch-custom-utils"),
        ("cv2",), public_loops.magvit2,
        ("--video_folder", "demo:moving:64", "--image_size", "32", "--num_frames", "9", "--batch_size", "4",
         "--layers", "residual,compress_space:64,residual,compress_time:64,residual", "--init_dim", "32",
         "--input_kernel", "3", "--codebook_size", "1024", "--discr_layers", "2", "--discr_start_step", "1000000000"),
    ),
    "decoder": Comparison(
        "train_decoder", "dalle2-pytorch==1.15.6",
        (*_ACCELERATE, "kornia", "kornia-rs", "x-clip", "coca-pytorch", "rotary-embedding-torch",
         "resize-right", "pytorch-warmup", "embedding-reader", "vector-quantize-pytorch"),
        (), public_loops.dalle2,
        ("--image_folder", "demo:shapes:64", "--test_fraction", "0", "--batch_size", "16", "--image_sizes", "24", "48",
         "--dim", "16", "--dim_mults", "2,4", "2", "--num_resnet_blocks", "1", "--cond_dim", "64",
         "--attn_heads", "4", "--attn_dim_head", "16", "--switches", "memory_efficient,plain_init_conv",
         "--random_crop_sizes", "16", "--objective", "x_start", "--sample_timesteps", "1", "--num_images_save", "1"),
    ),
}  # fmt: skip


def public(names: Sequence[str], rounds: int, turns: int = 3) -> Iterator[Row]:
    """One row for each script and precision; one that says what to install if a script's package is missing."""
    for name in names:
        of_script = COMPARISONS[name]
        if missing := of_script.missing:
            note = f"not installed: {', '.join(missing)}; {of_script.pip_line}"
            yield Row(f"{of_script.script}.py", "samples/s", note=note)
            continue
        for precision in PRECISIONS:
            title = f"{of_script.script}.py, {precision}"
            try:
                results = _measure(name, precision, rounds, turns)
            except JobFailed as error:
                yield Row(title, "samples/s", note=str(error))
                continue
            ours, theirs = results[SCRIPT], results[PUBLIC]
            by_cpu = (statistics.median(side["samples_per_cpu_second"]) for side in (ours, theirs))
            note = f"over {of_script.package}; in CPU time {next(by_cpu) / next(by_cpu):.3f}"
            yield Row(title, "samples/s", ours["samples_per_second"], theirs["samples_per_second"], note=note)


def _measure(name: str, precision: str, rounds: int, turns: int) -> dict[str, dict[str, Any]]:
    """What ``worker.Side.write`` writes, by side."""
    sides = (SCRIPT, PUBLIC)
    with tempfile.TemporaryDirectory(prefix="tandem-benchmark-") as folder:
        flags = ["--name", name, "--precision", precision, "--folder", folder, "--sides", ",".join(sides),
                 "--rounds", str(rounds), "--turns", str(turns)]  # fmt: skip
        run([[sys.executable, "-m", "benchmarks.public", "worker", "--side", side, *flags] for side in sides], {})
        return {side: json.loads((Path(folder) / f"{side}.json").read_text()) for side in sides}


class _Public(Side):
    """The public trainer, in one process."""

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def run(self, loop: Iterator[None], batch_size: int) -> None:
        """Make all updates and write the results."""
        self.samples_per_update = batch_size
        for _ in self.turns():
            next(loop)
        self.write()


def _work(argv: Sequence[str]) -> None:
    """Run one side of a comparison."""
    parser = argparse.ArgumentParser()
    for flag in ("name", "precision", "sides", "side"):
        parser.add_argument(f"--{flag}", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    for flag in ("rounds", "turns"):
        parser.add_argument(f"--{flag}", type=int, required=True)
    parser.set_defaults(updates=1, warmup=3)
    options = parser.parse_args(argv)
    of_script = COMPARISONS[options.name]
    script = importlib.import_module(of_script.script)
    script_parser = script.build_parser()
    updates = options.warmup + options.rounds * options.turns
    flags = ["--precision", options.precision, "--output_dir", str(options.folder / "run"), "--max_steps"]
    args = script_parser.parse([*of_script.flags, *QUIET, *flags, str(updates + 1)])
    with distributed.from_args(args) as backend:
        if options.side == SCRIPT:
            Script(options, backend).run(script, args, script_parser.settings(args))
            return
        public_loops.unused(of_script.unused)
        _Public(options, backend.device).run(of_script.loop(args, options.precision, options.folder), args.batch_size)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.public", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=names_of(COMPARISONS), default=list(COMPARISONS), metavar="NAMES",
                        help=f"comma list of {', '.join(COMPARISONS)} (default: all)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each comparison (default: 5)")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    rows = []
    for row in public(args.only, args.rounds):
        rows.append(row)
        print(" ".join([*row.cells(), row.note]), file=sys.stderr)
    print(f"\n{report.table(rows)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        _work(sys.argv[2:])
    else:
        main()
