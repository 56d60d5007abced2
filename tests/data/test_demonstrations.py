"""demo:shapes, demo:tones and demo:moving: generated sets are the same everywhere, and their names are checked."""

from __future__ import annotations

import hashlib
import subprocess
import sys

from data.sets import open_images, open_sounds, open_videos
from tests.data.helpers import ROOT

SIZES = {
    "shapes": {"image_size": 16},
    "tones": {"sample_rate": 16000, "clip_seconds": 2},
    "moving": {"image_size": 16, "num_frames": 3},
}
OPEN = {"shapes": open_images, "tones": open_sounds, "moving": open_videos}


def opened(name: str, spec: str = "", **options):
    return OPEN[name](f"demo:{name}{spec}", **SIZES[name], **options)


def digest(name: str, **options) -> str:
    samples = opened(name, **options)
    return hashlib.sha256(b"".join(samples.load(i).numpy().tobytes() for i in range(20))).hexdigest()


def test_samples_are_the_same_in_every_process_and_depend_on_the_seed():
    program = "from tests.data.test_demonstrations import SIZES, digest; print(*map(digest, SIZES))"
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    for name, elsewhere in zip(SIZES, other.stdout.split(), strict=True):
        assert elsewhere == digest(name) == digest(name, seed=0) != digest(name, seed=1)
