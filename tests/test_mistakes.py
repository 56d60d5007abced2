"""A mistake in the flags of a program is one line that names it, with code 2, before anything is written.

Each entry of mistakes.yaml is a case."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import filling
import pytest
import yaml
from filling import autoencoder, mulan, saved, video_tokenizer, vqgan
from filling_fixtures import on_one_cpu  # noqa: F401

from tandem.models import Discriminator
from tests.data.conditions import write_tars
from tests.models.towers import vision_folder
from tests.scripts import DECODER, ROOT, SCRIPTS, refusal, write_captioned, write_images
from tests.test_encode_images import vae
from tests.test_report import make
from tests.test_sample import write_inputs

MISTAKES = yaml.load(Path(__file__).with_name("mistakes.yaml").read_text(), yaml.BaseLoader)
CASES = [(program, flags) for program, table in MISTAKES.items() for flags in table]
FIRST_FLAGS = {
    "encode.py": "--output {out}", "evaluate.py": "--num_workers 0",
    "sample.py": "--output {out} --sample_timesteps 2 --num_workers 0",
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, data and files that are none."""
    folder = tmp_path_factory.mktemp("inputs")
    models = {
        "vqgan": vqgan(), "kl": autoencoder(), "unscaled": vqgan(quantizer="kl"), "vae": vae(), "mulan": mulan(),
        "other_mulan": mulan(1), "tokenizer": video_tokenizer(), "rgba": vqgan(channels=4),
        "grey": autoencoder(channels=1),
        "discriminator": Discriminator.from_dict({"dim": 8}),
    }  # fmt: skip
    for name, model in models.items():
        saved(folder / name, model)
    saved(folder / "huge_vae", vae(), image_size=2**21)
    saved(folder / "endless_mulan", mulan(), clip_seconds=1e300)
    filling.write_images(folder / "photos")
    filling.write_videos(folder / "clips")
    filling.write_sounds(folder / "sounds")
    filling.EMBED.fill(folder / "mulan", folder / "sounds", folder / "index")
    write_inputs(folder / "draw")
    DECODER.train(folder / "decoder", "--max_steps", "1")
    write_captioned(folder / "captioned", 20)
    write_images(folder / "bare", 20)
    write_tars(folder / "texts", but={number: {"txt": b"no image"} for number in range(12)})
    for name in ("empty", "no_videos"):
        (folder / name).mkdir()
    for number in range(20):
        (folder / "no_videos" / f"{number}.mp4").write_text("no video")
    make(folder / "run")
    vision_folder(folder / "vision")
    (folder / "text.wav").write_text("text")
    (folder / "hot.yaml").write_text("temp_min: 0.8")
    return folder


@pytest.mark.parametrize(("program", "flags"), CASES)
def test_a_mistake_is_one_line(
    program: str, flags: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    for name, value in {"XDG_CACHE_HOME": tmp_path, "TORCH_HOME": tmp_path, "HF_HUB_OFFLINE": 1}.items():
        monkeypatch.setenv(name, str(value))
    out, script = tmp_path / "out", program.removesuffix(".py")
    text = f"{FIRST_FLAGS.get(program, '')} {flags}"
    words = shlex.split(text.replace("{out}", str(out)).replace("{configs}", str(ROOT / "configs")))
    main = importlib.import_module(script).main
    line = SCRIPTS[script].refused(out, *words) if script in SCRIPTS else refusal(main, *words)
    assert line.startswith(f"{program}: error: ") and MISTAKES[program][flags] in line
    # What is wrong with the content of data may show at the first batch.
    begun = {".lock", "config.yaml", "starts.jsonl"} if script in SCRIPTS else set()
    assert {path.name for path in out.glob("*")} <= begun and not (inputs / "run" / "report.html").exists()
