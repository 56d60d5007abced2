"""--compile: what is compiled once stays compiled, and computes the same.

Traced as for the real compiler, then run as it is. What that makes of a trace: tests/launch/test_scripts.py.
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
from distributed.collectives import Alone
from distributed.engines.reducer import GradientReducer
from distributed.engines.replicated import cut_graph
from tests.scripts import DECODER, MULAN, VAE, VIDEO_TOKENIZER, VQGAN, Script, without_clocks

TRAINING_ALONE = ("--valid_fraction", "0")  # half of the tracing is that of the validation, which is shown without it
ADVERSARIAL = ("--lecam_weight", "0.1", "--max_grad_norm", "0.5")  # the discriminator takes part from the start
RUNS: dict[str, tuple[Script, tuple[str, ...]]] = {
    "train_vae": (VAE, ()),
    # A Unet alone, whose graph is the longest of all; tests/models/test_every_model.py traces each model recomputed.
    "train_decoder": (DECODER, ("--image_sizes", "8", *TRAINING_ALONE)),
    "train_mulan": (MULAN, ("--audio_depth", "1", "--text_depth", "1", *TRAINING_ALONE)),
    "train_tokenizer": (VIDEO_TOKENIZER, TRAINING_ALONE),
    "train_vqgan recomputed": (VQGAN, ("--gradient_checkpointing", *TRAINING_ALONE)),
    **{
        name: (VQGAN, ("--quantizer", name, "--discr_start_step", "1", *ADVERSARIAL, *TRAINING_ALONE))
        for name in ("lfq", "vq")
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


def mulan_loss(model: Any) -> torch.Tensor:
    waveforms, tokens = torch.rand(2, model.clip_samples) - 0.5, torch.randint(0, 32, (2, 6))
    out = model(waveforms, tokens, torch.tensor([6, 4]), torch.rand(2, model.noise_size))
    return (out.audio * out.text).sum()


CUT: dict[str, Callable[[], tuple[nn.Module, Callable[[Any], torch.Tensor]]]] = {
    "train_vae": lambda: (
        models.DiscreteVAE(image_size=16, num_tokens=16, codebook_dim=8, num_layers=2, hidden_dim=8),
        lambda model: model(torch.rand(2, 3, 16, 16), noise=torch.rand(2, *model.noise_shape), temperature=1.0).loss,
    ),
    "train_vqgan": lambda: (
        models.VQGAN(16, dim=8, num_layers=1, codebook_size=16),
        lambda model: model(torch.rand(2, 3, 16, 16)).reconstruction.mean(),
    ),
    "train_mulan": lambda: (
        models.MuLaN(sample_rate=8000, clip_seconds=0.5, n_fft=256, hop_length=64, n_mels=32, patch_size=8,
                     audio_dim=16, audio_depth=1, text_dim=16, text_depth=1, heads=2, dim_head=8, vocab_size=32,
                     max_text_tokens=8, dim_latent=8),
        mulan_loss,
    ),
    "train_tokenizer": lambda: (
        models.VideoTokenizer(16, "compress_space:8,residual,compress_time:8", init_dim=8, codebook_size=16),
        lambda model: model(torch.rand(2, 3, 5, 16, 16)).reconstruction.mean(),
    ),
}  # fmt: skip


class Two(Alone):
    """Another process that has nothing to add. `events` gets what is sent."""

    world_size = 2

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def all_reduce_(self, tensor: torch.Tensor, name: str) -> Alone:
        self._events.append("sent")
        return self


@pytest.mark.parametrize("name", CUT)
def test_gradients_of_a_model_that_is_compiled_in_parts_leave_while_its_backward_pass_still_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph all of them appear after it, so that nothing can be sent meanwhile."""
    monkeypatch.setattr("distributed.engines.reducer.SMALLEST_BUCKET_BYTES", 1)
    events: list[str] = []

    def backward_of(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(args: Any) -> Any:
            events.append("graph")
            return graph(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    for is_cut in (False, True) if name == "train_vae" else (True,):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, loss_of = CUT[name]()
        reducer = GradientReducer(list(model.parameters()), Two(events), "toy")
        if is_cut:
            cut_graph(model)
        model.compile(
            backend=aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=backward_of)
        )
        loss = loss_of(model)
        events.clear()
        reducer.backward(loss, torch.tensor(1.0), 0, retain_graph=False)
        reducer.finish()
        last_graph = max(index for index, event in enumerate(events) if event == "graph")
        while_it_runs, all_of_them = events[:last_graph].count("sent"), events.count("sent")
        assert while_it_runs >= all_of_them / 4 if is_cut else while_it_runs == 0, (while_it_runs, all_of_them)
