"""--compile: what is compiled once stays compiled, and computes the same.

Both passes are traced as for the real compiler, then run as they are. What that makes of a trace:
tests/launch/test_scripts.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor

from tandem import models
from tandem.distributed.engines.reducer import GradientReducer
from tandem.distributed.engines.replicated import cut_graph
from tests.processes import Root
from tests.scripts import DECODER, MULAN, VAE, VIDEO_TOKENIZER, VQGAN, Script, without_clocks

TRAINING_ALONE = ("--valid_fraction", "0")  # half of the tracing is that of the validation, which is shown without it
ADVERSARIAL = ("--lecam_weight", "0.1", "--max_grad_norm", "0.5")  # the discriminator takes part from the start
RUNS: dict[str, tuple[Script, tuple[str, ...]]] = {
    "train_vae": (VAE, ()),
    # A Unet alone, whose graph is the longest of all; tests/models/test_every_model.py traces each model recomputed.
    "train_decoder": (DECODER, ("--image_sizes", "8", *TRAINING_ALONE)),
    "train_mulan": (MULAN, ("--audio_depth", "1", "--text_depth", "1", *TRAINING_ALONE)),
    "train_tokenizer": (VIDEO_TOKENIZER, TRAINING_ALONE),
    "train_vqgan": (VQGAN, ("--quantizer", "vq", "--discr_start_step", "1", *ADVERSARIAL, *TRAINING_ALONE)),
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = nn.Module.compile

    def trace_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_module(module, *args, **kwargs, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", trace_module)
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)  # pytest would keep every line


def test_a_machine_that_cannot_compile_is_refused_in_one_line(tmp_path: Path) -> None:
    torch._dynamo.reset()
    # Not by monkeypatch, after which PyTorch no longer finds these settings. Caches hold what was compiled before.
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}):
        said = VAE.refused(tmp_path, "--compile")
    assert "--compile: PyTorch cannot compile here (InvalidCxxCompiler: " in said and "install g++" in said


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("train_vae", "train_vqgan") else pytest.mark.long) for name in RUNS],
)
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
        # Some sums have another order, which fp32 rounds otherwise. Later, Adam has made whole steps of such rounding,
        # where a gradient is nearly 0.
        bound = 1e-5 if line["step"] == 1 else 1e-3
        for key in reference:
            assert line[key] == pytest.approx(reference[key], rel=bound, abs=1e-9), (key, line["step"])


def test_gradients_of_a_model_that_is_compiled_in_parts_leave_while_its_backward_pass_still_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one graph all of them appear after it, so that nothing can be sent meanwhile."""
    monkeypatch.setattr("tandem.distributed.engines.reducer.SMALLEST_BUCKET_BYTES", 1)
    events: list[str] = []

    def backward_of(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(args: Any) -> Any:
            events.append("graph")
            return graph(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    compiler = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=backward_of)
    for is_cut in (False, True):
        torch._dynamo.reset()
        model = models.DiscreteVAE.from_dict(
            {"image_size": 16, "num_tokens": 16, "codebook_dim": 8, "num_layers": 2, "hidden_dim": 8}
        )
        reducer = GradientReducer(list(model.parameters()), Root(2, events), "toy")
        if is_cut:
            cut_graph(model)
        model.compile(backend=compiler)
        loss = model(torch.rand(2, 3, 16, 16), noise=torch.rand(2, *model.noise_shape), temperature=1.0).recon_loss
        events.clear()
        reducer.backward(loss, 0, retain_graph=False)
        reducer.finish()
        last_graph = max(index for index, event in enumerate(events) if event == "graph")
        while_it_runs, all_of_them = (len(calls) - calls.count("graph") for calls in (events[:last_graph], events))
        assert while_it_runs >= all_of_them / 4 if is_cut else while_it_runs == 0, (while_it_runs, all_of_them)
