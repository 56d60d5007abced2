"""The contract Engine: one model spread over the processes, and the optimizer that steps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..options import Update

if TYPE_CHECKING:  # `--help` must not import PyTorch
    from torch import Tensor, nn


class Engine(ABC):
    """One model spread over the processes, and the optimizer that steps it.

    Several engines live side by side. In a GAN, the generator's step runs inside ``discriminator.frozen()`` and calls
    ``discriminator.module(...)``; the discriminator's step calls ``discriminator(...)`` on detached images.
    """

    module: nn.Module
    """The bare model: for its attributes, for train()/eval(), and to be called while frozen."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass, under the chosen precision."""

    @abstractmethod
    def micro_batches(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """This process's batch in ``grad_accum_steps`` equal parts, tensors on the device. The loop body runs
        forward and backward on each; backward divides the loss by their number.

        Raises:
            ValueError: a value's first dimension is not the local batch size.
        """

    @abstractmethod
    def backward(
        self,
        loss: Tensor,
        *,
        items: int | Tensor | None = None,
        total: int | Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Add the gradients of ``loss`` (0-d) to this update's. Any number of calls per update. Other engines' models
        are to be frozen: what else a loss reaches depends on the backend and on ``--batch_parts``.

        Without ``items`` each micro-batch counts the same. With them, ``loss`` is a mean over ``items`` things here
        and the update is the mean over the ``total`` things of all processes and micro-batches.

        Raises:
            RuntimeError: the engine is frozen, or cannot keep the graph (``retain_graph`` at ZeRO 3).
        """

    @abstractmethod
    def step(self) -> Update:
        """Reduce, unscale, agree on finiteness, clip, update the weights, and forget the gradients.

        Raises:
            TrainingStopped: too many updates in a row were not finite.
        """

    @abstractmethod
    def frozen(self) -> AbstractContextManager[None]:
        """No gradient reaches this model's parameters; calls must go through ``module``."""

    @abstractmethod
    def twice_differentiable(self) -> AbstractContextManager[None]:
        """Calls inside run in fp32 and uncompiled, and their weights stay whole until the update, so that gradients of
        gradients can be taken: for a penalty. (ZeRO 3 with weights of low precision computes in these.)"""

    @abstractmethod
    def gathered(self) -> AbstractContextManager[Any]:
        """A plain module with the full weights on every process, to read and evaluate, not to change. Collective."""

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate that the optimizer will really use (of its first parameter group)."""

    @lr.setter
    @abstractmethod
    def lr(self, value: float) -> None: ...

    @property
    @abstractmethod
    def skipped_updates(self) -> int:
        """Updates skipped so far because of non-finite values."""

    @abstractmethod
    def live_state(self) -> dict[str, Any]:
        """Collective, backend-neutral: ``weights`` (fp32, by name), ``optimizer`` (``step`` and ``moments`` by slot and
        parameter name), ``scaler``, ``updates``, ``skipped_updates``.

        For checkpoints: without copies. A tensor may change with the next update (``Backend.before_update``); where it
        is sharded a function stands for it, which every process calls in the same order, and which gives a full
        tensor that nobody else will change."""

    def state_dict(self) -> dict[str, Any]:
        """``live_state`` as plain tensors on the CPU that nobody else will change, on every process. Collective."""
        from .optimizer_state import owned

        return owned(self.live_state())

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Collective: the full state on every process, whatever backend wrote it.

        Raises:
            ValueError: a weight or a moment is missing, unexpected or of another shape.
        """
