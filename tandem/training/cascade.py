"""A decoder whose trained Unets have an engine each, behind the interface of a single engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from tandem.models import Decoder


class Cascade:
    """A decoder of which some Unets are trained by engines. The others keep their weights, without gradients.

    It has the methods of an engine that `Evaluation` and `make_ema` need; names of weights begin with their Unet, as
    "unets.1.to_out.weight". Its state is a part of the checkpoint: the weights of the Unets that are not trained.

    Args:
        decoder: The decoder before its Unets are wrapped.
        engines: The engines of the trained Unets, by the index of the Unet, from 0.
    """

    def __init__(self, decoder: Decoder, engines: Mapping[int, Any]) -> None:
        self._decoder, self._engines = decoder, dict(engines)

    @contextmanager
    def full_weights(self) -> Iterator[Any]:
        """The decoder with the full weights on every process, to read and evaluate, not to change. Collective."""
        with ExitStack() as stack:
            unets = {index: stack.enter_context(engine.full_weights()) for index, engine in self._engines.items()}
            yield self._replace_unets(unets)

    @property
    def prefixes(self) -> list[str]:
        """For each engine, the prefix of the names of the weights that it updates."""
        return [f"unets.{index}." for index in self._engines]

    @property
    def is_sharded(self) -> bool:
        return any(engine.is_sharded for engine in self._engines.values())

    def empty_copy(self) -> Any:
        unets = {index: engine.empty_copy() for index, engine in self._engines.items()}
        return copy.deepcopy(self._replace_unets(unets)).float().requires_grad_(False)

    def _replace_unets(self, unets: Mapping[int, Any]) -> Decoder:
        """The decoder with `unets`, by index, in the place of its own."""
        return self._decoder.with_unets([unets.get(index, unet) for index, unet in enumerate(self._decoder.unets)])

    def local_shards(self) -> dict[str, Tensor]:
        weights = {name: tensor.detach() for name, tensor in self._decoder.state_dict().items()}
        for index, engine in self._engines.items():
            weights |= {f"unets.{index}.{name}": tensor for name, tensor in engine.local_shards().items()}
        return weights

    def unshard(self, name: str, local: Tensor) -> Tensor:
        engine, unet_name = self._owner(name)
        return engine.unshard(unet_name, local) if engine else local

    def shard(self, name: str, full: Tensor) -> Tensor:
        engine, unet_name = self._owner(name)
        return engine.shard(unet_name, full) if engine else full

    def _owner(self, name: str) -> tuple[Any, str]:
        """The engine that trains a weight of the decoder, or None, and the weight's name in its Unet."""
        _, index, unet_name = name.split(".", 2)
        return self._engines.get(int(index)), unet_name

    def state_dict(self) -> dict[str, Any]:
        """{"weights": the weights of Unets that are not trained, by name, such as "1.to_out.weight"}."""
        return {"weights": self._frozen_weights()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weights."""
        for name, tensor in self._frozen_weights().items():
            tensor.copy_(state["weights"][name])

    def _frozen_weights(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": tensor.detach()
            for index, unet in enumerate(self._decoder.unets)
            if index not in self._engines
            for name, tensor in unet.state_dict().items()
        }
