"""What macOS lacks, taken away here: no Mac has run these tests (docs/devices.md)."""

import os
import subprocess
import sys
from pathlib import Path

from forks import completed

from tests.models.helpers import assert_same_bits
from tests.scripts import ROOT, VAE, final_weights, metrics


def test_a_run_starts_and_resumes_without_what_macos_lacks_with_the_same_bits(tmp_path: Path) -> None:
    ours, usual = tmp_path / "ours", tmp_path / "usual"
    for folder in (ours, usual):
        for steps, workers in (("1", "1"), ("2", "0")):
            flags = VAE.flags(folder, "--max_steps", steps, "--num_workers", workers)
            # One thread each, so that sums round alike.
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            if folder == usual:
                done = completed("train_vae.py", flags, ROOT, env)
            else:
                command = [sys.executable, "tests/launch/like_macos.py", "train_vae.py", *flags]
                done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        assert f"resumed from {folder}" in done.stdout + done.stderr
        assert [line["step"] for line in metrics(folder)] == [1, 2]
    assert_same_bits(final_weights(ours), final_weights(usual))
