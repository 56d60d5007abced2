"""Weights of which one process holds everything, for the tests of averages."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


class Whole:
    """An engine's part in an average, around a bare module, which may be replaced by another one."""

    is_sharded = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def empty_copy(self) -> Any:
        return copy.deepcopy(self.module).float().requires_grad_(False)

    def local_shards(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())

    def unshard(self, name: str, held: Tensor) -> Tensor:
        return held

    def shard(self, name: str, whole: Tensor) -> Tensor:
        return whole
