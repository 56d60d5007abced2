"""The same training run through every launcher: do the losses agree with one process?

    python scripts/parity.py                                      # make parity
    python scripts/parity.py --processes 4 -- --image_folder photos/ --image_size 128
    python scripts/parity.py --processes 2 4 --batch_parts 8 -- --image_folder photos/          # the same bits
    python scripts/parity.py --script train_tokenizer.py

What follows ``--`` goes to the script. Ends with exit code 1 if a difference is larger than rounding explains; with
``--batch_parts``, if there is any.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.jobs import LAUNCHERS
from benchmarks.launching import AS_A_USER, ONE_PROCESS, Job, JobFailed, Launcher, finish
from tandem.training.metrics.directions import EVALUATION_SECONDS

# fp32 sums in another order differ by about 1e-7; Adam amplifies that a little from update to update.
FIRST_TOLERANCE, LAST_TOLERANCE = 1e-6, 1e-5
_GAN_FLAGS = "--discr_start_step 2 --lecam_weight 0.1 --apply_grad_penalty_every 2"
SMALL_MODELS = {
    "train_vae.py": "--image_folder demo:shapes --image_size 32 --num_tokens 128 --emb_dim 32 --hidden_dim 32 "
    "--num_layers 2",
    "train_vqgan.py": "--image_folder demo:shapes:64 --image_size 16 --num_layers 2 --dim 8 --codebook_size 64 "
    f"--discr_layers 2 {_GAN_FLAGS}",
    "train_tokenizer.py": "--video_folder demo:moving:64 --image_size 16 --num_frames 5 --patch_size 2 --norm rms "
    "--layers compress_space:8,residual,linear_attend_space,compress_time:8,attend_space,attend_time,gateloop_time,"
    "adaptive --init_dim 4 --input_kernel 3 "
    "--codebook_size 64 --discr_layers 1 --image_folder demo:shapes:64 --image_every 3 --lr_warmup_steps 0 "
    f"{_GAN_FLAGS}",
    "train_decoder.py": "--image_folder demo:shapes:64 --image_sizes 8 16 --dim 8 --dim_mults 1,2 "
    "--num_resnet_blocks 1 --attn_heads 2 --attn_dim_head 8 --cross_attn_heads 2 --cross_attn_dim_head 8 "
    "--resnet_groups 4 --switches coordinates sparse_attn --loss_weight min_snr none --learned_variance 0 1 "
    "--lowres_condition noise --random_crop_sizes 0 8 --condition_on image,text --ema_decay 0.9 "
    "--valid_fraction 0.15 --test_fraction 0 --learning_rate 1e-3",
    "train_mulan.py": "--audio_data demo:tones:256 --sample_rate 8000 --clip_seconds 1 --n_fft 256 --hop_length 64 "
    "--n_mels 32 --patch_size 8 --audio_dim 32 --audio_depth 2 --text_dim 32 --text_depth 2 --heads 2 --dim_head 16 "
    "--dim_latent 16 --max_text_tokens 24 --lr_warmup_steps 5 --valid_fraction 0.05",
}
# Where rounding changes the sign of a latent, its code jumps, and the runs diverge. Without equal bits, such models are
# compared at a learning rate at which weights hardly change.
STEADY = {name: ["--learning_rate", "1e-7"] for name in ("train_vqgan.py", "train_tokenizer.py")}
SHARED = ["--batch_size", "8", "--max_steps", "20", "--epochs", "1000", "--seed", "0", "--log_every_n_steps", "1",
          "--save_every_n_steps", "0", "--sample_every_n_steps", "0", "--validate_every_n_steps", "0",
          "--num_workers", "0"]  # fmt: skip
VARIANTS = {"plain": [], "accumulation 2": ["--grad_accum_steps", "2"], "clipping 0.1": ["--max_grad_norm", "0.1"]}


def run(launcher: Launcher, script: str, flags: Sequence[str], output: Path) -> list[dict[str, float]]:
    """The `update_metrics` of one run, which has OMP_NUM_THREADS CPU threads per process, by default one."""
    try:
        command = launcher.command(script, [*flags, "--output_dir", str(output)])
        outcome = finish(Job(command, script, log=None, **AS_A_USER), math.inf)
    except JobFailed as error:
        sys.exit(f"{launcher}: {error}")
    if outcome.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{outcome.output[-3000:]}")
    return update_metrics(output)


def update_metrics(run: Path) -> list[dict[str, float]]:
    """The lines of metrics of the updates in a run folder, without those of evaluations."""
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in metrics if EVALUATION_SECONDS not in line]


def difference(ours: Sequence[dict[str, float]], reference: Sequence[dict[str, float]], key: str) -> list[float]:
    """Relative difference per update; for a model with a discriminator, the larger one of both models."""
    assert len(ours) == len(reference), (len(ours), len(reference))
    return [
        max(abs(a[name] - b[name]) / abs(b[name]) for name in (key, f"discr_{key}") if name in b)
        for a, b in zip(ours, reference, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[2], help="numbers of processes to compare with one"
    )
    parser.add_argument("--script", choices=list(SMALL_MODELS), default="train_vae.py", help="training script to run")
    parser.add_argument(
        "--batch_parts",
        type=int,
        default=0,
        help="--batch_parts of the script, with which all losses must have the same bits",
    )
    parser.add_argument("--launchers", default="", help="only launchers whose names contain this text, such as zero3")
    parser.add_argument("script_flags", nargs=argparse.REMAINDER, help="after --: flags of the script")
    args = parser.parse_args(argv)
    flags = [flag for flag in args.script_flags if flag != "--"] or SMALL_MODELS[args.script].split()
    if not args.batch_parts:
        flags = [*STEADY.get(args.script, []), *flags]
    first_tolerance, last_tolerance = FIRST_TOLERANCE, LAST_TOLERANCE
    if args.batch_parts:
        flags = [*flags, "--batch_parts", str(args.batch_parts)]
        first_tolerance, last_tolerance = 0.0, 0.0
        print(f"--batch_parts {args.batch_parts}: every loss has to have the same bits")
    candidates = [replace(launcher, processes=n) for n in args.processes for launcher in LAUNCHERS]
    candidates = [launcher for launcher in candidates if args.launchers in str(launcher)]
    has_failed = False
    print(f"{'run':38s} {'update 1':>10s} {'update 20':>10s} {'worst':>10s} {'grad norm':>10s}  (relative)")
    with tempfile.TemporaryDirectory(prefix="parity-", ignore_cleanup_errors=True) as folder:
        for variant, variant_flags in VARIANTS.items():
            run_flags = [*SHARED, *variant_flags, *flags]
            reference = run(ONE_PROCESS, args.script, run_flags, Path(folder, variant.replace(" ", "_")))
            for launcher in candidates:
                output = Path(folder, f"{variant}-{launcher}".replace(" ", "_"))
                ours = run(launcher, args.script, run_flags, output)
                losses, norms = difference(ours, reference, "loss"), difference(ours, reference, "grad_norm")
                is_close = losses[0] <= first_tolerance and max(losses) <= last_tolerance
                has_failed |= not is_close
                numbers = f"{losses[0]:10.1e} {losses[-1]:10.1e} {max(losses):10.1e} {max(norms):10.1e}"
                print(f"{f'{launcher}, {variant}':38s} {numbers}   {'ok' if is_close else 'DIFFERS'}", flush=True)
    sys.exit(1 if has_failed else 0)


if __name__ == "__main__":
    main()
