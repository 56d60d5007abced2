"""--compile: what is compiled once stays compiled, and computes the same.

Traced as for the real compiler, then run as it is. What that makes of a trace: tests/launch/test_parity.py.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.scripts import DECODER, SCRIPTS, VAE, VQGAN, Script, without_clocks

TRAINING_ALONE = ("--valid_fraction", "0")  # half of the tracing is that of the validation, which is shown without it
ADVERSARIAL = ("--lecam_weight", "0.1", "--max_grad_norm", "0.5")  # the discriminator takes part from the start
RUNS: dict[str, tuple[Script, tuple[str, ...]]] = {
    **{name: (script, ()) for name, script in SCRIPTS.items() if script not in (VQGAN, DECODER)},
    # A Unet alone, whose graph is the longest of all; that it is recomputed is traced in tests/models/test_unet.py.
    "train_decoder": (DECODER, ("--image_sizes", "8", *TRAINING_ALONE)),
    **{
        f"{name} recomputed": (script, ("--gradient_checkpointing", *TRAINING_ALONE))
        for name, script in SCRIPTS.items()
        if script not in (VAE, DECODER)
    },
    "lfq": (VQGAN, ("--quantizer", "lfq", "--discr_start_step", "1", *ADVERSARIAL)),
    **{
        name: (VQGAN, ("--quantizer", name, "--discr_start_step", "1", *ADVERSARIAL, *TRAINING_ALONE))
        for name in ("vq", "ibq")
    },
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = nn.Module.compile

    def trace_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_module(module, *args, **kwargs, backend="eager")

    monkeypatch.setattr(nn.Module, "compile", trace_module)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest would keep every line


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("name", RUNS)
def test_a_compiled_run_computes_the_same_and_compiles_nothing_after_its_first_updates(
    name: str, tmp_path: Path
) -> None:
    script, flags = RUNS[name]
    flags = (*flags, "--max_steps", "7")
    plain = without_clocks(script.train(tmp_path / "plain", *flags))
    graphs: list[int] = []

    def count_graphs() -> None:
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with script.in_update(3, count_graphs), script.in_update(6, count_graphs):
        compiled = without_clocks(script.train(tmp_path / "compiled", *flags, "--compile"))
    # Three updates compile everything: the codebook of VQ is there from the second one on.
    assert len(graphs) == 2 and graphs[0] == graphs[1] > 0
    for line, reference in zip(compiled, plain, strict=True):
        assert line.keys() == reference.keys()
        for key in reference:
            assert line[key] == pytest.approx(reference[key], rel=1e-6, abs=1e-9), (key, line["step"])
