"""The communicator over Horovod."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
from torch import Tensor

from .collectives import Communicator


class HorovodCommunicator(Communicator):
    """Collectives of Horovod. All-reduces are sums, because Horovod's averages truncate integers."""

    def __init__(self) -> None:
        self.rank, self.world_size = hvd.rank(), hvd.size()

    def all_reduce_(self, tensor: Tensor, name: str) -> _HorovodHandle:
        return _HorovodHandle(hvd.allreduce_async_(tensor, name=name, op=hvd.Sum), tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        handle = hvd.allgather_async(tensor.contiguous().unsqueeze(0), name="all_gather")
        return list(_HorovodHandle(handle, tensor).wait().unbind(0))


class _HorovodHandle:
    def __init__(self, handle: int, tensor: Tensor) -> None:
        self._is_on_cpu = tensor.device.type == "cpu"
        self._handle: int | None = handle
        self._result: Any = None

    def wait(self) -> Any:
        """The collective's result. Horovod's own wait never sleeps; on CPUs it would take time from the processes that
        it waits for, and from loader workers."""
        if self._handle is not None:
            pause = 1e-4  # seconds
            while self._is_on_cpu and not hvd.poll(self._handle):
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
            self._result, self._handle = hvd.synchronize(self._handle), None
        return self._result
