"""--compile: what is compiled once stays compiled, and computes the same.

Traced as for the real compiler, then run as it is. What that makes of a trace: tests/launch/test_parity.py.
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

import models
from distributed.engines.replicated import cut_graph
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


CUT: dict[str, Callable[[], tuple[nn.Module, Callable[[Any], torch.Tensor]]]] = {
    "train_vae": lambda: (
        models.DiscreteVAE(image_size=16, num_tokens=16, codebook_dim=8, num_layers=2, hidden_dim=8),
        lambda model: model(torch.rand(2, 3, 16, 16), noise=torch.rand(2, *model.noise_shape), temperature=1.0).loss,
    ),
    "train_vqgan": lambda: (
        models.VQGAN(16, dim=8, num_layers=2, codebook_size=16),
        lambda model: model(torch.rand(2, 3, 16, 16)).reconstruction.mean(),
    ),
    "train_tokenizer": lambda: (
        models.VideoTokenizer(16, "compress_space:8,residual,compress_time:8", init_dim=8, codebook_size=16),
        lambda model: model(torch.rand(2, 3, 5, 16, 16)).reconstruction.mean(),
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_gradients_of_a_model_that_is_compiled_in_parts_appear_while_its_backward_pass_still_runs(name: str) -> None:
    """So that they can be sent meanwhile. In one graph they all appear after it."""
    events: list[str] = []

    def backward_of(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(args: Any) -> Any:
            events.append("graph")
            return graph(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    for is_cut in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, loss_of = CUT[name]()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
        if is_cut:
            cut_graph(model)
        model.compile(
            backend=aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=backward_of)
        )
        loss = loss_of(model)
        events.clear()
        loss.backward()
        last_graph = max(index for index, event in enumerate(events) if event == "graph")
        while_it_runs, all_of_them = events[:last_graph].count("gradient"), events.count("gradient")
        assert while_it_runs >= all_of_them / 4 if is_cut else while_it_runs == 0, (while_it_runs, all_of_them)
