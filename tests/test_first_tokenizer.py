"""docs/first_tokenizer.md: its commands and its Python, run in the order of the page, leave what the page promises."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from tandem.models import VQGAN
from tests.test_docs import ROOT, commands

PAGE = (ROOT / "docs" / "first_tokenizer.md").read_text().replace("\\\n", " ")
LAUNCHERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
#: All that a command here has and the page has not: flags that make a training small, and one process for eight.
SMALL = [
    "--max_steps", "2", "--batch_size", "2", "--image_size", "64", "--dim", "32", "--perceptual", "none",
    "--precision", "fp32", "--num_workers", "0",
]  # fmt: skip
PROCESSES = {"--nproc_per_node 8": "--nproc_per_node 1"}
PHOTOS = 14


def steps() -> Iterator[list[str]]:
    """What the page runs, in its order: indented commands, and blocks of Python."""
    for command, block in re.findall(r"^    ((?:python|torchrun) .*)$|^```python\n([^`]+)```", PAGE, re.MULTILINE):
        if block:
            yield [sys.executable, "-c", block]
            continue
        for of_page, of_test in PROCESSES.items():
            command = command.replace(of_page, of_test)
        launcher, *words = shlex.split(command)
        is_training = any(word.startswith("train_") for word in words)
        paths = [str(ROOT / word) if word.endswith(".py") else word for word in words]
        yield [*LAUNCHERS[launcher], *paths, *(SMALL if is_training else [])]


def test_the_page_leads_from_photos_to_codes(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (PHOTOS, 72, 96, 3), dtype=np.uint8)
    for number, photo in enumerate(pixels):
        Image.fromarray(photo).save(tmp_path / "photos" / f"{number:02}.jpg")
    todo, printed = list(steps()), ""
    assert len(todo) == len(list(commands(PAGE))) + PAGE.count("```python"), "a command of the page is not run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for one another would take CPU time
    for command in todo:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}"
        printed += done.stdout

    assert "dry run: nothing of it was kept" in printed
    assert (tmp_path / "runs/photos/report.html").stat().st_size > 10_000
    assert json.loads((tmp_path / "comparison.json").read_text())
    assert (tmp_path / "comparison.png").is_file() and len(list((tmp_path / "images").rglob("*.png"))) == PHOTOS
    codes = load_file(tmp_path / "codes/codes-00000.safetensors")["codes"]
    (shape,) = re.findall(r"# \(\d+, (\d+), (\d+)\), (\w+)", PAGE)  # the page has the number of its own photos
    assert (codes.shape, codes.dtype.name) == ((PHOTOS, int(shape[0]), int(shape[1])), shape[2])
    assert f"({PHOTOS}, {shape[0]}, {shape[1]}) {shape[2]} 00.jpg" in printed
    assert VQGAN.from_pretrained(tmp_path / "weights/photos").num_codes == 1024
