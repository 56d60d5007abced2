"""The arithmetic of an update that all engines share: the precision of passes, parts of a batch, weights of losses, the
norm of gradients, and updates that are skipped because of non-finite values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem.devices import has_pinned_memory, start_copy_to_host, sum_dtype
from tandem.distributed.batch import BatchPlan
from tandem.distributed.errors import TrainingStopped
from tandem.io.reading import counted

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GROWTH_INTERVAL = 2000  # updates
_PIECE_SIZE = 2**17  # elements of a piece, of which the fp64 copy fits into a CPU's cache


@contextmanager
def autocast(precision: str, device: torch.device) -> Iterator[None]:
    """The context of a forward pass: matrix products and convolutions in ``precision``, weights and losses in fp32.
    It can also decorate a function."""
    dtype = DTYPES[precision]
    if dtype == torch.float32:
        yield
    else:
        with torch.autocast(device.type, dtype=dtype):
            yield


def split_batch(batch: Mapping[str, Any], plan: BatchPlan) -> list[dict[str, Any]]:
    """The ``grad_accum_steps`` micro-batches of a local batch. Tensors and lists are cut, and every micro-batch gets
    all other values unchanged. With ``batch_parts`` (--batch_parts, the same bits on any number of processes), tensors
    are copied: a slice begins at an address that depends on the number of processes, and matrix products may round
    differently at another address.

    Raises:
        ValueError: a tensor or list does not hold ``local_batch_size`` entries.
    """
    size = plan.micro_batch_size
    for key, value in batch.items():
        if isinstance(value, Tensor | list) and len(value) != plan.local_batch_size:
            raise ValueError(
                f"batch[{key!r}] holds {len(value)} samples, this process was to get {plan.local_batch_size}"
            )

    def cut(value: Any, start: int) -> Any:
        if isinstance(value, Tensor):
            samples = value[start : start + size]
            return samples.clone() if plan.batch_parts else samples
        return value[start : start + size] if isinstance(value, list) else value

    return [{key: cut(value, index * size) for key, value in batch.items()} for index in range(plan.grad_accum_steps)]


def backward_weight(items: int | Tensor | None, total: int | Tensor | None, plan: BatchPlan) -> float | Tensor:
    """The factor of a loss with which the losses of all backward calls of all processes add up to the loss of the
    update, however the micro-batches are spread over the processes. ``items``: of how many items this loss is a mean;
    ``total``: how many the update has; None for both: all losses count the same."""
    if (items is None) != (total is None):
        raise ValueError("backward(loss, items=..., total=...) needs both or neither")
    if items is None or total is None:
        return 1.0 / (plan.grad_accum_steps * plan.world_size)
    return items / total


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """L2 norm over all tensors, 0-d, fp64 if the device has that: in fp32 the fifth digit would depend on the order of
    summation."""
    flat = [gradient.flatten() for gradient in gradients]
    # On a CPU PyTorch first copies each tensor to fp64, so cut it into pieces. An accelerator makes no copy, and more
    # tensors would cost the host time.
    pieces = [piece for grad in flat for piece in (grad.split(_PIECE_SIZE) if grad.device.type == "cpu" else [grad])]
    dtype = sum_dtype(gradients[0].device)
    return torch.stack(torch._foreach_norm(pieces, dtype=dtype)).square().sum().sqrt()


def all_finite(gradients: list[Tensor]) -> Tensor:
    """Whether all numbers are finite, 0-d bool. Takes half the time of the norm, which is finite in the same cases:
    squares of finite fp32 numbers do not overflow fp64."""
    return torch.isfinite(torch.stack([extreme for gradient in gradients for extreme in torch.aminmax(gradient)])).all()


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Gradients of norm ``norm`` divided by this have at most norm ``max_norm`` (0: no limit); 0-d fp64, >= 1."""
    return ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)


class LossScaler:
    """Keeps small fp16 gradients above zero: multiplies losses by a scale and divides the gradients by it.

    The scale halves after a non-finite update and doubles after ``GROWTH_INTERVAL`` finite ones (Micikevicius et
    al. 2018, section 3.2). It stays on the device, so that the host need not wait. With ``enabled=False`` the scale is
    always 1.
    """

    def __init__(self, enabled: bool, device: torch.device) -> None:
        self.enabled, self.scale = enabled, torch.tensor(2.0**16 if enabled else 1.0, device=device)
        self._finite_in_a_row = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, finite: Tensor) -> None:
        """Adapt the scale after an update; ``finite`` (0-d bool on the device): the update was not skipped."""
        if not self.enabled:
            return
        self._finite_in_a_row = torch.where(finite, self._finite_in_a_row + 1, 0)
        grows = self._finite_in_a_row >= GROWTH_INTERVAL
        self._finite_in_a_row = torch.where(grows, 0, self._finite_in_a_row)
        factor = torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.scale = (self.scale * factor).clamp(1.0, 2.0**24)

    def state_dict(self) -> dict[str, float]:
        return {"scale": float(self.scale), "finite_in_a_row": int(self._finite_in_a_row)} if self.enabled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.enabled and state:
            self.scale.fill_(state["scale"])
            self._finite_in_a_row.fill_(int(state.get("finite_in_a_row", 0)))


class SkipGuard:
    """Counts skipped updates and stops the run after ``limit`` in a row, naming rank and tensor.

    The gradient norm decides: it is non-finite on every process as soon as one process has one non-finite gradient (a
    non-finite loss makes its gradients NaN), so all processes agree without another message. On an accelerator the
    count is read one update late, so that the host never waits for it.
    """

    def __init__(
        self, parameters: Callable[[], Iterable[tuple[str, Any]]], limit: int, device: torch.device,
        gather_objects: Callable[[Any], list[Any]],
    ) -> None:  # fmt: skip
        self._parameters, self._limit, self._device = parameters, limit, device
        self._gather_objects = gather_objects
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        self._pending_count: tuple[Tensor, Any] | None = None  # a copy to the host, and its event
        # Texts such as "the gradient of NAME holds", with tensors on the device: those numbers may be non-finite.
        self._suspects: list[tuple[str, Tensor]] = []
        self._hooks: list[Any] = []
        if limit <= 1:
            self._add_hooks()

    def weighted_loss(self, loss: Tensor, factor: Tensor | float) -> Tensor:
        """``loss`` (0-d) x ``factor``, with gradients of NaN if the loss is not finite.

        A product, because PyTorch imports sympy, for over a second, if `backward` gets an initial gradient.
        """
        if self._hooks:
            self._suspects.insert(0, ("the loss is", loss.detach().float().mean()))
        if not isinstance(factor, Tensor):
            factor = torch.full((), factor, device=loss.device)  # filled on the device: no copy, no wait
        return loss * torch.where(torch.isfinite(loss.detach()), factor.to(loss.dtype), torch.nan)

    def after_update(self, finite: Tensor, update: int) -> None:
        """Count update number ``update``; ``finite`` is a bool tensor, the same on every process.

        Raises:
            TrainingStopped: ``limit`` updates in a row were skipped.
        """
        self._in_a_row = torch.where(finite, 0, self._in_a_row + 1)
        self.total += ~finite
        in_a_row = self._read_count()
        if in_a_row >= max(self._limit, 1):
            self._raise_stopped(in_a_row, update)
        if in_a_row and not self._hooks:
            self._add_hooks()
        elif not in_a_row and self._limit > 1:
            self._remove_hooks()
        self._suspects = []

    def _read_count(self) -> int:
        # After a skipped update the exact count matters more than speed.
        if self._hooks or not has_pinned_memory(self._device):
            return int(self._in_a_row)
        count = 0
        if self._pending_count is not None:
            copy, event = self._pending_count
            # The copy began an update ago, so this hardly waits. All processes read the same update's count.
            event.synchronize()
            count = int(copy)
        self._pending_count = start_copy_to_host(self._in_a_row)
        return count

    def _add_hooks(self) -> None:
        """From now on record each local gradient before the processes' gradients are summed."""
        self._pending_count = None
        for name, parameter in self._parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(partial(self._record_gradient, name)))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _record_gradient(self, name: str, grad: Tensor) -> None:
        if grad.numel():  # the smallest and the largest number are NaN if one is
            self._suspects.append((f"the gradient of {name} holds", torch.stack(torch.aminmax(grad.detach()))))

    def _first_problem(self) -> str | None:
        """The first non-finite value on this process: the loss, or the first gradient in backward order, which is
        nearest to the cause. Waits for the device."""
        for text, numbers in self._suspects:
            if not bool(torch.isfinite(numbers).all()):
                kind = "nan" if bool(torch.isnan(numbers).any()) else "inf"
                return f"{text} {numbers.item() if numbers.ndim == 0 else kind}"
        return None

    def _raise_stopped(self, in_a_row: int, update: int) -> None:
        problems = [
            f"rank {rank}: {text}" for rank, text in enumerate(self._gather_objects(self._first_problem())) if text
        ]
        raise TrainingStopped(
            f"{counted(in_a_row, 'update')} in a row skipped because of non-finite values, the last at update "
            f"{update}: {'; '.join(problems) or 'only the sum over the processes is not finite'}. The weights are "
            "those of the last good update; try a lower learning rate, --max_grad_norm, or fp32"
        )
