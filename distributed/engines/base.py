"""The interface Engine: one model spread over the processes, and the optimizer that updates it."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import _GeneratorContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tandem.distributed.errors import TrainingStopped, first_line, is_out_of_memory
from tandem.io.renamed import with_added_statistics

from .arithmetic import SkipGuard, autocast, backward_weight, split_batch
from .optimizer_state import copy_to_cpu
from .replicas import check_replicas

if TYPE_CHECKING:
    from tandem.distributed.base import Options
    from tandem.distributed.process_group import ProcessGroup


@dataclass(frozen=True)
class Update:
    """The result of one ``Engine.step``. Its tensors are on the device: the host waits when it reads them."""

    grad_norm: Tensor
    """L2 norm of the mean gradient before clipping, 0-d; the same on every process. NaN where an engine leaves it out,
    because it clips nothing and nobody asks for the norm."""
    skipped: Tensor
    """0-d bool: a gradient was not finite, so nothing was changed."""
    lr: float
    """The learning rate that was used; not the script's if the backend's configuration overrules it."""


class Engine(ABC):
    """One model spread over the processes, and the optimizer that updates it.

    Several engines live side by side. In a GAN, the generator's step runs inside ``discriminator.frozen()`` and calls
    ``discriminator.module(...)``; the discriminator's step calls ``discriminator(...)`` on detached images.

    This class holds what all engines have in common. A new engine defines ``_set_up``, ``_add_gradients``, ``_update``,
    ``_read_state`` and ``_write_state``.
    """

    module: nn.Module
    """The bare model: for its attributes, for train()/eval(), and to be called while frozen."""

    is_sharded = False
    """Whether each process holds only a part of each weight (ZeRO 3, FSDP), so that there are no copies to compare."""
    _lacks_weights = False
    """Whether the module does not hold the full fp32 weights."""
    _sets_own_lr = False
    """Whether a scheduler of the backend sets the learning rate, so that the script's is ignored."""

    def __init__(
        self, processes: ProcessGroup, options: Options, model: nn.Module, optimizer: Optimizer, *, name: str,
        max_grad_norm: float | None,
    ) -> None:  # fmt: skip
        check_replicas(model, "before training", processes.gather_objects)
        self.module, self.name, self._processes = model, name, processes
        self._options, self._plan = options, options.plan
        #: Number of weights of the whole model, trained or not.
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._optimizer: Any = optimizer
        self._max_grad_norm = options.max_grad_norm if max_grad_norm is None else max_grad_norm
        self._is_frozen = self._is_eager = False
        self._micro_batch: int | None = None
        self._updates = 0
        self._empty_module = _copy_without_weights(model)
        self._set_up(model, optimizer)
        self._guard = SkipGuard(
            self._graph_parameters, options.max_skipped_updates, processes.device, processes.gather_objects
        )

    @abstractmethod
    def _set_up(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Spread the model over the processes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass, under the chosen precision."""
        if self._is_frozen:
            raise RuntimeError("this engine is frozen: call engine.module(...), which takes no part in an update")
        self._processes.heartbeat("forward", update=self._updates, gathers=self.is_sharded)
        with contextlib.nullcontext() if self._is_eager else self.autocast():
            output = (self._eager_forward if self._is_eager else self.module)(*args, **kwargs)
        if self.is_sharded:
            self._processes.heartbeat("computing")  # no more weights are gathered
        return output

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches per update of this process."""
        return self._plan.grad_accum_steps

    def autocast(self) -> _GeneratorContextManager[None]:
        """The precision of the forward pass, for calls of ``module``."""
        return autocast(self._options.precision, self._processes.device)

    def _graph_parameters(self) -> Iterable[tuple[str, Any]]:
        """Names and parameters of the autograd graph, whose gradients are inspected after a non-finite update."""
        return self.module.named_parameters()

    def _eager_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass in fp32 and uncompiled."""
        return self.module.forward(*args, **kwargs)

    def micro_batches(self, batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """This process's batch in ``grad_accum_steps`` equal parts. The loop body runs forward and backward on each.
        `backward` divides the loss by their number on all processes, so that the sum of all gradients is the mean.

        Raises:
            ValueError: a value's first dimension is not the local batch size.
        """
        for index, part in enumerate(split_batch(batch, self._plan)):
            self._micro_batch = index
            yield part
        self._micro_batch = None

    def backward(
        self, loss: Tensor, *, items: int | Tensor | None = None, total: int | Tensor | None = None,
        retain_graph: bool = False,
    ) -> None:  # fmt: skip
        """Add the gradients of ``loss`` (0-d) to this update's. Any number of calls per update. Freeze all other
        engines first: not every backend keeps a loss from adding gradients to their models.

        Without ``items`` every micro-batch has the same weight. With ``items``, ``loss`` is a mean over that many
        elements, and the update's loss is the mean over the ``total`` elements of all processes and micro-batches.

        Raises:
            RuntimeError: the engine is frozen, or cannot keep the graph (``retain_graph`` at ZeRO 3).
        """
        if self._is_frozen:
            raise RuntimeError("this engine is frozen: call backward outside of frozen()")
        self._processes.heartbeat("backward", update=self._updates, gathers=self.is_sharded)
        self._add_gradients(loss, backward_weight(items, total, self._plan), retain_graph)
        self._processes.heartbeat("computing")

    @abstractmethod
    def _add_gradients(self, loss: Tensor, weight: float | Tensor, retain_graph: bool) -> None:
        """Add the gradients of ``weight`` x ``loss``; the update is their sum over all calls and processes."""

    def step(self, *, with_norm: bool = True) -> Update:
        """Reduce, unscale and clip the gradients, update the weights unless a gradient is not finite, and clear the
        gradients. Without ``with_norm``, `Update.grad_norm` may be left out.

        Raises:
            TrainingStopped: too many updates in a row were not finite, or the processes' copies of the model differ.
        """
        self._processes.heartbeat("reducing gradients", update=self._updates, collective=True)
        learning_rate = self.lr  # read before the backend's own scheduler advances it
        norm, finite = self._update(with_norm)
        self._updates += 1
        # On a GPU `after_update` waits for the reduction of the update before.
        self._processes.heartbeat("waiting for the sums of gradients", update=self._updates, collective=True)
        self._guard.after_update(finite, self._updates)
        self._processes.heartbeat("computing", update=self._updates)
        interval = self._options.check_replicas_every_n_steps
        if self._processes.world_size > 1 and not self.is_sharded and interval > 0 and self._updates % interval == 0:
            when = f"after update {self._updates} of {self.name}"
            check_replicas(self.module, when, self._processes.gather_objects)
        return Update(norm, ~finite, learning_rate)

    @abstractmethod
    def _update(self, with_norm: bool) -> tuple[Tensor, Tensor]:
        """Make one optimizer step, or none if a gradient is not finite, and clear the gradients. Calls the
        processes' ``about_to_update`` first. Returns `Update.grad_norm`, and whether the step was made (0-d bool)."""

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No gradient reaches this model's parameters; calls must go through ``module``."""
        trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in trainable:
            parameter.requires_grad_(False)
        self._is_frozen = True
        try:
            yield
        finally:
            self._is_frozen = False
            for parameter in trainable:
                parameter.requires_grad_(True)

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        """For a penalty on gradients: calls inside run in fp32 and uncompiled, and ZeRO 3 and FSDP keep weights, once
        gathered, until the update. ZeRO 3 with weights of low precision computes in that precision."""
        self._is_eager = True
        try:
            yield
        finally:
            self._is_eager = False

    @contextmanager
    def full_weights(self) -> Iterator[Any]:
        """A plain module with the full weights on every process, to read and evaluate, not to change. Collective."""
        if not self._lacks_weights:
            yield self.module
            return
        local_weights = self.local_shards()
        for name, parameter in self._empty_module.named_parameters():
            parameter.data = self.unshard(name, local_weights[name])
        for name, buffer in self._empty_module.named_buffers():
            if name in local_weights:
                buffer.copy_(local_weights[name])
        self._empty_module.train(self.module.training)
        try:
            yield self._empty_module
        finally:
            for parameter in self._empty_module.parameters():
                parameter.data = parameter.data.new_empty(0)

    def empty_copy(self) -> Any:
        """A copy of the module as it was wrapped, in fp32, whose parameters are frozen and empty."""
        return copy.deepcopy(self._empty_module).float().requires_grad_(False)

    def local_shards(self) -> dict[str, Tensor]:
        """The fp32 weights and the persistent buffers by name, as this process holds them: whole; at ZeRO 3 a slice of
        each weight, 1-d; with FSDP some rows of each. To read before the next update, as for an average of the weights,
        not to change. Collective."""
        return dict(self.module.state_dict())

    def unshard(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor, on every process, of which each process passes its shard ``local``: the weight ``name``
        from ``local_shards()[name]``, or a tensor of the same shapes. Collective."""
        return local

    def shard(self, name: str, full: Tensor) -> Tensor:
        """This process's shard of a whole tensor that has the shape of the weight ``name``; the inverse of ``unshard``.

        Raises:
            ValueError: where weights are sharded, if the tensor has another shape than the weight.
        """
        return full

    @property
    def lr(self) -> float:
        """The learning rate of the next update (of the first parameter group)."""
        return float(self._optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        if not self._sets_own_lr:
            for group in self._optimizer.param_groups:
                group["lr"] = value

    @property
    def skipped_updates(self) -> int:
        """Updates skipped so far because of non-finite values."""
        return int(self._guard.total)

    def live_state(self) -> dict[str, Any]:
        """The same for all backends: ``weights`` (fp32, by name), ``optimizer`` (``step`` and ``moments`` by slot and
        parameter name), ``scaler``, ``updates``, ``skipped_updates``. Collective.

        For checkpoints: references, not copies. Finish copies before the next update (`ProcessGroup.before_update`). In
        the place of a tensor that is sharded, or that a forward pass may change, stands a function that returns it
        whole, on the device: a process that needs it copies it at once. All processes call these functions in the same
        order."""
        return {**self._read_state(), "updates": self._updates, "skipped_updates": self.skipped_updates}

    @abstractmethod
    def _read_state(self) -> dict[str, Any]:
        """The ``weights``, ``optimizer`` and ``scaler`` of ``live_state``."""

    def state_dict(self) -> dict[str, Any]:
        """A copy of ``live_state`` with whole tensors on the CPU, on every process. Collective."""
        return copy_to_cpu(self.live_state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the whole state, which every process passes, whatever backend wrote it. Collective.

        Raises:
            UserMistake: on any process a weight or a moment is missing, unexpected or of another shape, or cannot be
                read.
            TrainingStopped: this process alone has too little memory to exchange the weights.
        """
        self._processes.finish_copies()
        with self._processes.raise_on_all_ranks():
            try:
                self._write_state({**state, "weights": with_added_statistics(state["weights"], self.module)})
            except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
                raise ValueError(f"the state is not what was written: {type(error).__name__}: {error}") from error
        try:
            self._share_weights()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # The others wait in a collective, so this process cannot agree with them on the error.
            text = f"rank {self._processes.rank}: not enough memory to exchange the weights: {first_line(error)}"
            raise TrainingStopped(text, on_one_rank=True) from error
        self._updates = state["updates"]
        self._guard.total.fill_(state["skipped_updates"])

    @abstractmethod
    def _write_state(self, state: Mapping[str, Any]) -> None:
        """Restore what this process holds of ``weights``, ``optimizer`` and ``scaler``. No collective, because it may
        fail on one process alone."""

    def _share_weights(self) -> None:
        """After ``_write_state`` on all processes, fetch weights that this one needs and others hold. Collective."""
        return


def _copy_without_weights(model: nn.Module) -> nn.Module:
    """A copy of the model with its buffers and with empty parameters, which take no memory."""
    empty = {
        id(parameter): nn.Parameter(parameter.detach().new_empty(0), parameter.requires_grad)
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, empty)  # deepcopy's memo, from which it takes the copies of parameters
