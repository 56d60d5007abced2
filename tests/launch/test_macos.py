"""What macOS lacks, taken away here: no Mac has run these tests (docs/devices.md)."""

import os
import subprocess
import sys
from pathlib import Path

from tests.models.helpers import assert_same_bits
from tests.scripts import ROOT, VAE, final_weights, metrics


def test_a_run_starts_and_resumes_without_what_macos_lacks_with_the_same_bits(tmp_path: Path) -> None:
    ours, usual = tmp_path / "ours", tmp_path / "usual"
    for folder, start in ((ours, ["tests/launch/like_macos.py", "train_vae.py"]), (usual, ["train_vae.py"])):
        for steps, workers in (("1", "1"), ("2", "0")):
            flags = VAE.flags(folder, "--max_steps", steps, "--num_workers", workers)
            # One thread each, so that sums round alike.
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run([sys.executable, *start, *flags], cwd=ROOT, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        assert f"resumed from {folder}" in done.stdout + done.stderr
        assert [line["step"] for line in metrics(folder)] == [1, 2]
    assert_same_bits(final_weights(ours), final_weights(usual))
