"""The random generators of every process, as part of a checkpoint."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contracts import Processes


class RandomState:
    """States of Python's, NumPy's and PyTorch's generators (CPU, and this process's GPU), for all processes."""

    def __init__(self, processes: Processes) -> None:
        self._processes, self._device = processes, processes.device

    def state_dict(self) -> dict[str, Any]:
        """{"generators": {name: uint8 (processes, bytes)}}. Collective."""
        states = self._states()
        own = torch.from_numpy(np.frombuffer(b"".join(states.values()), np.uint8).copy())
        by_process = self._processes.gather(own[None].to(self._device)).cpu()
        parts = by_process.split([len(state) for state in states.values()], dim=1)
        return {"generators": {name: part.contiguous() for name, part in zip(states, parts, strict=True)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this process's generators. A generator keeps its seed if the checkpoint has no state for it,
        because the number of processes or the device has changed."""
        for name, setter in self._setters().items():
            states = state["generators"].get(name)
            if states is not None and states.shape[0] == self._processes.world_size:
                # A copy, because torch reads from the start of the storage.
                setter(states[self._processes.rank].clone())

    def _states(self) -> dict[str, bytes]:
        version, keys, gauss = random.getstate()
        python = np.array([version, *keys, gauss is not None], np.int64).tobytes() + _float_bytes(gauss)
        legacy: Any = np.random.get_state(legacy=True)  # noqa: NPY002 what other libraries draw from
        _, words, position, has_gauss, cached = legacy
        numpy = np.asarray(words, np.uint32).tobytes() + np.array([position, has_gauss], np.int64).tobytes()
        states = {"python": python, "numpy": numpy + _float_bytes(cached), "torch": _bytes(torch.get_rng_state())}
        if self._device.type == "cuda":
            states["cuda"] = _bytes(torch.cuda.get_rng_state(self._device))
        return states

    def _setters(self) -> dict[str, Callable[[Tensor], None]]:
        setters = {"python": _set_python, "numpy": _set_numpy, "torch": torch.set_rng_state}
        if self._device.type == "cuda":
            setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, self._device)
        return setters


def _bytes(state: Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _float_bytes(value: float | None) -> bytes:
    return np.array([value or 0.0], np.float64).tobytes()


def _set_python(state: Tensor) -> None:
    content = state.numpy().tobytes()
    version, *keys, has_gauss = np.frombuffer(content[:-8], np.int64).tolist()
    gauss = float(np.frombuffer(content[-8:], np.float64)[0])
    random.setstate((version, tuple(keys), gauss if has_gauss else None))


def _set_numpy(state: Tensor) -> None:
    content = state.numpy().tobytes()
    words = np.frombuffer(content[: 624 * 4], np.uint32)
    position, has_gauss = np.frombuffer(content[624 * 4 : -8], np.int64).tolist()
    cached = float(np.frombuffer(content[-8:], np.float64)[0])
    np.random.set_state(("MT19937", words, position, has_gauss, cached))  # noqa: NPY002
