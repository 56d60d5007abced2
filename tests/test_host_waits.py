"""No script waits for its device within an update: the host runs ahead, so that the device always has work.

An update is made on the meta device, whose tensors have shapes and no numbers: whatever reads a number there raises an
error. Copies that would make the host wait for a GPU are refused too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import base, collectives, stop, watchdog
from distributed.backends.ddp import DDPBackend
from distributed.collectives import Alone
from distributed.engines import finite, replicas
from tests.processes import Root
from tests.scripts import SCRIPTS, KilledError, words
from training import noise
from training.run import run as run_module

META = torch.device("meta")
PROCESSES = 2
MAKERS = {torch.tensor, torch.as_tensor}


class NoWait(TorchDispatchMode):
    """Refuses copies from memory that is not pinned which the host would wait for, and indices on the host."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        name = function.name()
        if name == "aten::_to_copy" and _is_host(args[0]) and options.get("device") == META:
            assert options.get("non_blocking"), "a copy to the device that the host waits for"
        if name == "aten::copy_" and args[0].device == META and _is_host(args[1]):
            assert (*args, options.get("non_blocking"))[2], "a copy to the device that the host waits for"
        if name in ("aten::index.Tensor", "aten::index_put_") and args[0].device == META:
            assert not any(_is_host(index) for index in args[1]), "an index on the host is copied to the device"
        return function(*args, **options)


class NoMaker(TorchFunctionMode):
    """Refuses tensors that are made of Python's numbers on the device: they are copied there, and the host waits."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if function in MAKERS:
            assert torch.device(options.get("device") or "cpu") != META, "torch.full needs no copy to the device"
        return function(*args, **options)


def _is_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dim() > 0


class Fused:
    """Stands in for the fused kernel, which there is not on the meta device."""

    def __init__(self, cls: type[torch.optim.Optimizer]) -> None:
        self._cls = cls

    def __call__(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = self._cls(*args, **{**options, "fused": None})
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        optimizer.step = lambda: None  # type: ignore[assignment,method-assign]
        return optimizer


@contextlib.contextmanager
def _on_meta(updates: Callable[..., Any]) -> Iterator[None]:
    """One of two processes that train on the meta device; what happens around updates stays on the host."""

    def connect(backend: DDPBackend) -> None:
        backend.device, backend.comm = META, Root(PROCESSES)

    class Watchdog(watchdog.Watchdog):
        def __init__(self, comm: Any, *others: Any) -> None:
            super().__init__(Alone(), *others)

    def drawn(self: Any, law: str, step: int, positions: Sequence[int], shape: Sequence[int], device: Any) -> Tensor:
        return torch.zeros(len(positions), *shape, device=device)  # meta has no random numbers

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": PROCESSES}.items():
            patch.setenv(name, str(value))
        patch.setattr(DDPBackend, "connect", connect)
        patch.setattr(DDPBackend, "disconnect", lambda backend, gracefully: None)
        patch.setattr(watchdog, "Watchdog", Watchdog)
        patch.setattr(base.Backend, "barrier", lambda backend: None)
        patch.setattr(collectives, "gather_objects", lambda value, comm, device: [value] * PROCESSES)
        patch.setattr(collectives, "broadcast_object", lambda value, comm, device: value)
        patch.setattr(collectives, "sum_scalars", lambda values, comm, device: dict(values))
        patch.setattr(replicas, "check_replicas", lambda *_: None)
        patch.setattr(finite.SkipGuard, "_read", lambda guard: 0)  # on a GPU, the count of the update before
        patch.setattr(stop.StopRequest, "arrive", lambda request, total: None)  # on a GPU, read an update later
        patch.setattr(noise.Noise, "_drawn", drawn)
        patch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # meta has no precisions
        for name in ("Adam", "AdamW"):
            patch.setattr(torch.optim, name, Fused(getattr(torch.optim, name)))
        patch.setattr(run_module, "updates", updates)
        yield


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SCRIPTS),
    ("train_vqgan", {"gan_weight": 0.1, "lecam_weight": 0.1, "grad_accum_steps": 2}),
    ("train_mulan", {"loss": "sigmoid", "grad_accum_steps": 2}),
    (
        "train_decoder",
        {"switches": ["self_cond", "coordinates"], "learned_variance": [0, 1], "random_crop_sizes": [0, 8]},
    ),
]


@pytest.mark.parametrize(("name", "flags"), VARIANTS, ids=lambda part: part if isinstance(part, str) else None)
def test_the_host_waits_for_nothing_within_an_update(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    made = []

    def updates(run: Any, feed: Any, evaluations: Any, preview: int) -> Iterator[tuple[int, Any]]:
        batch = feed.start(0)
        for step in range(4):
            with contextlib.ExitStack() as stack:
                if step:  # the first update copies constants to the device
                    stack.enter_context(NoMaker())
                    stack.enter_context(NoWait())
                yield step, batch
            run.advance()
            made.append(step)
            batch = feed.next()
        raise KilledError

    more = words({**flags, "log_every_n_steps": 1000, "max_steps": 1000})
    with _on_meta(updates), pytest.raises(KilledError):
        SCRIPTS[name].train(tmp_path / "run", *more)
    assert made == [0, 1, 2, 3]
