"""--compile: what is compiled once stays compiled, and computes the same.

Traced as for the real compiler, then run as it is. What that makes of a trace: tests/launch/test_parity.py.
"""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from training.run.run import Run

RUN = {
    "batch_size": 8, "epochs": 100, "num_workers": 0, "log_every_n_steps": 1, "validate_every_n_steps": 0,
    "sample_every_n_steps": 0, "save_every_n_steps": 0,
}  # fmt: skip
IMAGES = {"image_folder": "demo:shapes:64", "image_size": 16, "num_layers": 2}
VQGAN = {**IMAGES, "dim": 8, "discr_layers": 2, "codebook_size": 256, "codebook_dim": 4, "discr_start_step": 1,
         "lecam_weight": 0.1, "max_grad_norm": 0.5}  # fmt: skip
MULAN = {
    "audio_data": "demo:tones:64", "sample_rate": 8000, "clip_seconds": 0.5, "n_fft": 256, "hop_length": 64,
    "n_mels": 32, "patch_size": 8, "audio_dim": 16, "audio_depth": 1, "text_dim": 16, "text_depth": 1, "heads": 2,
    "dim_head": 8, "dim_latent": 8, "max_text_tokens": 24, "valid_fraction": 0.2,
}  # fmt: skip
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "vae": ("train_vae", {**IMAGES, "num_tokens": 16, "hidden_dim": 8, "emb_dim": 8, "num_resnet_blocks": 1}),
    **{name: ("train_vqgan", {**VQGAN, "quantizer": name}) for name in ("lfq", "vq", "ibq")},
    "mulan": ("train_mulan", MULAN),
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = nn.Module.compile

    def trace_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_module(module, *args, **kwargs, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", trace_module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest would keep every line


def log(folder: Path, name: str, *more: str) -> list[dict[str, float]]:
    script, settings = RUNS[name]
    flags = [word for key, value in {**RUN, **settings}.items() for word in (f"--{key}", str(value))]
    module = importlib.import_module(script)
    module.main([*flags, "--max_steps", "6", "--output_dir", str(folder), *more])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", RUNS)
def test_a_compiled_run_computes_the_same_and_compiles_nothing_after_its_first_updates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = log(tmp_path / "plain", name)
    graphs, advance = [], Run.advance

    def count_graphs(run: Run) -> None:
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        advance(run)

    monkeypatch.setattr(Run, "advance", count_graphs)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = log(tmp_path / "compiled", name, "--compile")
    # The codebook of VQ is there from the second update on.
    assert len(graphs) == 6 and graphs[-1] == graphs[2] > 0
    for line, reference in zip(compiled, plain, strict=True):
        for key in reference.keys() - {"seconds", "samples_per_second"}:
            assert line[key] == pytest.approx(reference[key], rel=1e-6, abs=1e-9), (key, line["step"])
