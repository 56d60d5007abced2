"""The Unets of a cascade, some of which are trained: each has its own engine, and together they are one decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn


class Decoder(Protocol):
    """What a cascade has to offer: its Unets, and itself with others in their place."""

    unets: nn.ModuleList

    def with_unets(self, unets: list[nn.Module]) -> Any: ...


class Cascade:
    """A decoder of which some Unets are trained by engines. The others keep their weights, without gradients.

    It has the interface of an engine that `training.run.loop.Evaluation` needs, and its state is a part of the
    checkpoint: the weights of the Unets that are not trained.

    Args:
        decoder: The decoder before its Unets are wrapped.
        engines: Index of a Unet, from 0, -> its engine.
    """

    def __init__(self, decoder: Decoder, engines: Mapping[int, Any]) -> None:
        self._decoder, self._engines = decoder, dict(engines)

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """The decoder with the full weights on every process, to read and evaluate, not to change. Collective."""
        with ExitStack() as stack:
            unets = [
                _network(stack.enter_context(self._engines[index].gathered())) if index in self._engines else unet
                for index, unet in enumerate(self._decoder.unets)
            ]
            yield self._decoder.with_unets(unets)

    def state_dict(self) -> dict[str, Any]:
        """{"weights"}: those of the Unets that are not trained, by name, such as "1.to_out.weight"."""
        return {"weights": self._frozen()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the weights. Raises ValueError if they are those of other Unets."""
        ours, theirs = self._frozen(), state["weights"]
        if ours.keys() != theirs.keys():
            numbers = sorted({int(name.partition(".")[0]) + 1 for name in theirs})
            raise ValueError(
                f"the run trains other Unets than --train_unets says: it keeps the Unets {numbers or 'none'} as they "
                "are; give the same flag, or start another run with --init_from"
            )
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])

    def _frozen(self) -> dict[str, Tensor]:
        return {
            f"{index}.{name}": tensor.detach()
            for index, unet in enumerate(self._decoder.unets)
            if index not in self._engines
            for name, tensor in unet.state_dict().items()
        }


def _network(module: Any) -> Any:
    """The Unet itself, without the learned weight of its loss (`models.diffusion.WithLearnedWeight`)."""
    return getattr(module, "network", module)
