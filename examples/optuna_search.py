"""Searches flags of a training script with Optuna. Each trial is a run of its own in FOLDER/trial_N.

    python examples/optuna_search.py --trials 20 --folder runs/search \
        python train_vqgan.py --config configs/vqgan/base.yaml --image_folder photos/

The same command goes on after an interruption: finished trials are in FOLDER/study.db, and those that were not finished
resume from their checkpoints. Ctrl-C or SIGTERM saves the trial that runs and ends with code 75.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import optuna

FAILED, MISTAKE, SAVED = 1, 2, 75  # exit codes: docs/running.md


def choose_flags(trial: optuna.Trial) -> dict[str, object]:
    """The space that is searched: change it."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "dim": trial.suggest_categorical("dim", [16, 24]),
    }


def read_values(folder: Path, metric: str) -> dict[int, float]:
    """The metric of every validation that has a complete line."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {row["step"]: row[metric] for row in rows if row.get(metric) is not None}


def run_trial(args: argparse.Namespace, study: optuna.Study, trial: optuna.Trial, stop_signals: Sequence[int]) -> int:
    """Train one trial, and ask it to save if there are `stop_signals`. Returns the exit code of the search, 0 to go
    on."""
    folder, metric = Path(args.folder) / f"trial_{trial.number}", args.metric
    flags = [text for name, value in choose_flags(trial).items() for text in (f"--{name}", str(value))]
    # If this process is killed, the training gets SIGTERM and saves.
    death = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    # A group of its own, so that Ctrl-C does not reach the training beside the SIGTERM below.
    process = subprocess.Popen([*death, *args.command, *flags, "--output_dir", str(folder)], start_new_session=True)
    reported = set(study.trials[trial.number].intermediate_values)
    is_running, is_ending, is_pruned = True, False, False
    while is_running:
        is_running = process.poll() is None
        for step, value in read_values(folder, metric).items():
            if step not in reported:
                trial.report(value, step)
                reported.add(step)
        if is_running and not is_ending:
            is_pruned = not stop_signals and trial.should_prune()
            is_ending = is_pruned or bool(stop_signals)
            if is_ending:
                process.terminate()
        if is_running:
            time.sleep(0.5)
    code = process.wait()
    values = read_values(folder, metric)
    if is_pruned:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    elif code == 0 and values:
        study.tell(trial, values[max(values)])
    elif stop_signals or code == SAVED:
        return SAVED  # the trial stays unfinished
    else:
        if code == 0:
            print(f"{folder} has no {metric}; name another --metric", file=sys.stderr)
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return MISTAKE if code in (0, MISTAKE) else 0
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Search flags of a training script with Optuna.")
    parser.add_argument("--trials", type=int, default=20, help="trials in all, over all starts (20)")
    parser.add_argument("--folder", default="runs/search", help="runs and study (runs/search)")
    parser.add_argument("--metric", default="valid/psnr", help="of metrics.jsonl (valid/psnr)")
    parser.add_argument("--direction", default="maximize", choices=("maximize", "minimize"))
    parser.add_argument("--warmup", type=int, default=0, help="updates before a trial may be pruned (0)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the training's command, as of python or torchrun")
    args = parser.parse_args()
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print(f"another search runs in {folder}; wait for it, or choose another --folder", file=sys.stderr)
        sys.exit(MISTAKE)
    study = optuna.create_study(
        storage=f"sqlite:///{folder}/study.db", study_name="search", load_if_exists=True, direction=args.direction,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=args.warmup),
    )  # fmt: skip
    stop_signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stop_signals.append(number))
    unfinished = study.get_trials(states=[optuna.trial.TrialState.RUNNING])
    code = 0
    while code == 0 and not stop_signals:
        if unfinished:
            trial = optuna.Trial(study, unfinished.pop(0)._trial_id)  # its parameters are those in the study
        elif len(study.trials) < args.trials:
            trial = study.ask()
        else:
            break
        code = run_trial(args, study, trial, stop_signals)
    if any(trial.value is not None for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE])):
        best = study.best_trial
        print(f"best: trial_{best.number}, {args.metric} {best.value:.6g}, {best.params}")
    sys.exit(code or (SAVED if stop_signals else 0))


if __name__ == "__main__":
    main()
