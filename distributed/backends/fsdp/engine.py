"""The engine for FSDP2. PyTorch gathers the weights of a block for its passes and sums its gradients; Tandem clips,
skips non-finite updates, saves the state, and steps the optimizer on what this process holds.

A process holds some rows of each weight: rows rank x n to (rank + 1) x n, where n is the number of rows divided by that
of processes, rounded up. The last processes may hold fewer rows, or none. Every process holds a weight without
dimensions whole.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tandem.distributed.devices import cpu_threads, own_threads
from tandem.distributed.engines.arithmetic import DTYPES, LossScaler, gradient_norm
from tandem.distributed.engines.optimizer_state import (
    check_moments,
    check_names,
    read_optimizer,
    unfuse,
    write_optimizer,
)
from tandem.distributed.engines.parts import GradientParts
from tandem.distributed.engines.reducer import GradientReducer
from tandem.distributed.engines.replicated import ReplicatedEngine
from tandem.distributed.errors import UserMistake

_PART_OF_A_MODEL = 100  # smaller blocks are gathered with what surrounds them ...
_ALWAYS_WORTH_IT = 2**20  # ... unless they have as many weights as this
_END_OF_BACKWARD = "_register_root_post_backward_final_callback"  # private, of FSDP's state

if TYPE_CHECKING:
    from . import FSDPBackend


class FSDPEngine(ReplicatedEngine):
    """A process holds a part of each weight, gradient and moment, and whole weights only while a block computes."""

    _backend: FSDPBackend
    is_sharded = _lacks_weights = True

    def _set_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        backend, options = self._backend, self._backend.options
        self._scaler = LossScaler(options.precision == "fp16", backend.device)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        names = {parameter: name for name, parameter in model.named_parameters()}
        if options.compile:
            model.compile()  # before weights are offloaded: a model may prepare constants where they are
        self._shard(model)
        gathered = self._gathered_once() if self._plan.batch_parts else {}
        tensors = model.state_dict(keep_vars=True)
        self._spread: dict[str, Any] = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
        self._held: dict[str, nn.Parameter] = {
            name: nn.Parameter(p.to_local().detach(), p.requires_grad) if isinstance(p, DTensor) else p
            for name, p in model.named_parameters()
        }
        for group in optimizer.param_groups:
            group["params"] = [self._held[names[parameter]] for parameter in group["params"]]
        self._names = {held: name for name, held in self._held.items() if held.requires_grad}
        whole = [held for held, name in self._names.items() if name not in self._spread]
        self._parts: GradientParts | None = None
        if self._plan.batch_parts:
            full = [gathered.get(name, held) for held, name in self._names.items()]
            self._parts = GradientParts(full, backend.comm, self._plan.grad_accum_steps)
            unfuse(optimizer)
        else:
            self._whole = GradientReducer(whole, backend.comm, self.name)
        # In one thread, which is what torchrun sets, an optimizer on the CPU would hold up the GPU.
        self._optimizer_threads = own_threads(backend.gather_objects) if backend.offload else None
        if backend.offload:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # its scale is on the GPU

    def _shard(self, model: nn.Module) -> None:
        backend, options = self._backend, self._backend.options
        # With --batch_parts, gradients are added in fp32, as on the other backends.
        low = torch.float32 if self._plan.batch_parts else DTYPES[options.precision]
        blocks = repeated_blocks(model)
        backend.blocks[self.name] = list(blocks)
        self._weights_are_cast = bool(blocks) and low != torch.float32
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        rounded = torch.bfloat16 if options.reduce_precision == "bf16" else None  # None: as the weights are
        shard = partial(
            fully_shard,
            mesh=DeviceMesh.from_group(dist.group.WORLD, backend.device.type),  # type: ignore[arg-type]
            offload_policy=CPUOffloadPolicy(backend.device.type != "cpu") if backend.offload else OffloadPolicy(),
            ignored_params={parameter for parameter in model.parameters() if parameter.ndim == 0},
        )
        # Autocast casts what an operation needs, so inputs are not cast.
        of_blocks = MixedPrecisionPolicy(reduce_dtype=rounded, cast_forward_inputs=False)
        if self._weights_are_cast:
            of_blocks = MixedPrecisionPolicy(low, rounded or torch.float32, cast_forward_inputs=False)
        for block in blocks.values():
            shard(block, reshard_after_forward=backend.reshard_after_forward, mp_policy=of_blocks)
        # What is in no block stays fp32: codebooks, temperatures and latents are computed in fp32 under autocast too.
        shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=rounded, cast_forward_inputs=False))
        self._root = model
        self._gathered = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._gathered:
            module.set_gradient_divide_factor(1.0)  # an update is a sum, not a mean
            module.set_force_sum_reduction_for_comms(True)  # Gloo knows only sums
            cast(nn.Module, module).register_forward_pre_hook(_with_strides_of_one_sample, with_kwargs=True)
        if not hasattr(module._get_fsdp_state(), _END_OF_BACKWARD):
            raise UserMistake(
                f"FSDP of PyTorch {torch.__version__} has no {_END_OF_BACKWARD}: it differs from that of the versions "
                "which pyproject.toml allows; install one of those, or leave --distributed_backend fsdp out"
            )

    def _watched(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._gathered_once().items()

    def _gathered_once(self) -> dict[str, nn.Parameter]:
        """The whole parameters that the passes compute with, by name; they are empty whenever they are not gathered."""
        found = {}
        for module in self._gathered:
            module.unshard()
            found.update({name: p for name, p in self.module.named_parameters() if not isinstance(p, DTensor)})
            module.reshard()
        return {name: found[name] for name, _ in self.module.named_parameters()}

    def _plain_forward(self, *args: Any, **kwargs: Any) -> Any:
        # The module is called, because only then it gathers its weights.
        eager = torch.compiler.set_stance("force_eager") if self._backend.options.compile else nullcontext()
        with eager:
            if not self._weights_are_cast:
                return self.module(*args, **kwargs)
            for module in self._gathered:
                module.unshard()
            weights = {name: parameter.float() for name, parameter in self.module.named_parameters()}
            return torch.func.functional_call(self.module, weights, args, kwargs)

    def _add_gradients(self, loss: Tensor, weight: float | Tensor, retain_graph: bool) -> None:
        gradient = self._guard.poison(loss, weight * self._loss_scale())
        if self._parts is not None:
            self._parts.backward(loss, gradient, self._micro_batch, retain_graph)
            return
        self._whole.backward(loss, gradient, None, retain_graph)
        if self._keeps_gathered:
            self._send_rest()

    def _send_rest(self) -> None:
        """Sum the gradients that came after FSDP has summed those of a block, or where it did not see a backward pass
        end: in the second pass through a gradient, no output of the model may lie on the way."""
        end = getattr(cast(FSDPModule, self._root)._get_fsdp_state(), _END_OF_BACKWARD)
        last = torch.zeros((), requires_grad=True) * 1
        last.register_hook(lambda _: end())
        last.backward()

    def _update(self) -> tuple[Tensor, Tensor]:
        self._let_go()
        with cpu_threads(self._optimizer_threads):
            return super()._update()

    @torch.no_grad()
    def _reduced(self) -> tuple[list[Tensor], Tensor]:
        if self._parts is not None:
            self._parts.finish()
            gradients = self._parts.by_parameter
            for (held, name), parameter in zip(self._names.items(), self._parts.parameters, strict=True):
                held.grad = self.held_part(name, gradients[parameter]).to(held.device)
            return self._gradients(), gradient_norm(self._parts.gradients)
        self._whole.finish()
        for held, name in self._names.items():
            if name in self._spread:
                gradient = self._spread[name].grad
                held.grad = torch.zeros_like(held) if gradient is None else gradient.to_local()
        return self._gradients(), self._norm()

    def _gradients(self) -> list[Tensor]:
        # Offloaded ones first: what divides them has to be where the first one is.
        ordered = sorted(self._names, key=lambda held: self._names[held] not in self._spread)
        return [held.grad for held in ordered if held.grad is not None]

    def _norm(self) -> Tensor:
        """Of the gradients of all processes. A request to stop travels with it."""
        backend, device = self._backend, self._backend.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        if spread := [
            held.grad for held, name in self._names.items() if name in self._spread and held.grad is not None
        ]:
            sums[0] = gradient_norm(spread).square()
        if backend.world_size > 1:
            sums[1].fill_(float(backend.stop.depart()))
            backend.comm.all_reduce_(sums, f"{self.name}.norm").wait()
            backend.stop.arrive(sums[1])
        if self._whole.gradients:
            sums[0] += gradient_norm(self._whole.gradients).square()
        return sums[0].sqrt()

    def _forget(self) -> None:
        for held, name in self._names.items():
            if name in self._spread:
                self._spread[name].grad = held.grad = None
        if self._parts is not None:
            self._parts.zero_()
        elif self._whole.gradients:
            self._whole.zero_()

    def _let_go(self) -> None:
        """Free whole weights, which the next pass gathers again."""
        if self._keeps_gathered:
            self._keep_gathered(False)
        for module in self._gathered:
            module.reshard()

    _keeps_gathered = False

    def _keep_gathered(self, keeps: bool) -> None:
        """Whether whole weights stay until the update."""
        self._keeps_gathered = keeps
        for module in self._gathered:
            is_freed = self._backend.reshard_after_forward and module is not self._root and not keeps
            module.set_reshard_after_forward(is_freed, recurse=False)
            module.set_reshard_after_backward(not keeps, recurse=False)

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        self._keep_gathered(True)  # FSDP frees weights after the first pass
        with super().twice_differentiable():
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self._let_go()  # so that the parameters are those that FSDP asks whether they are trained
        with super().frozen():
            try:
                yield
            finally:
                self._let_go()

    def held_weights(self) -> dict[str, Tensor]:
        own = {**dict(self.module.named_buffers()), **self._held}
        return {name: own[name].detach() for name in self._shapes}

    def whole_weight(self, name: str, held: Tensor) -> Tensor:
        if name not in self._spread:
            return held
        rows, *rest = self._shapes[name]
        padded = held.new_zeros(self._rows(name), *rest, device=self._backend.device)  # offloaded ones are on the CPU
        padded[: len(held)] = held
        gathered = padded.new_empty(self._backend.world_size * padded.numel())
        dist.all_gather_into_tensor(gathered, padded.view(-1))
        return gathered.view(-1, *rest)[:rows]

    def _fetches(self, held: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
        """By name, functions that return ``whole_weight`` of tensors like ``held_weights()``."""
        return {name: partial(self.whole_weight, name, tensor) for name, tensor in held.items()}

    def held_part(self, name: str, whole: Tensor) -> Tensor:
        if whole.shape != self._shapes[name]:
            raise ValueError(f"the shape {tuple(whole.shape)} is not the model's {tuple(self._shapes[name])}")
        if name not in self._spread:
            return whole
        rows = self._rows(name)
        return whole[self._backend.rank * rows : (self._backend.rank + 1) * rows]

    def _rows(self, name: str) -> int:
        """Rows of a weight that the first process holds: no process holds more."""
        return math.ceil(self._shapes[name][0] / self._backend.world_size)

    def _read_state(self) -> dict[str, Any]:
        optimizer = read_optimizer(self._optimizer, self._names)
        optimizer["moments"] = {slot: self._fetches(tensors) for slot, tensors in optimizer["moments"].items()}
        weights = self._fetches(self.held_weights())
        return {"weights": weights, "optimizer": optimizer, "scaler": self._scaler.state_dict()}

    @torch.no_grad()
    def _write_state(self, state: Mapping[str, Any]) -> None:
        self._let_go()
        check_names("weight", state["weights"], self._shapes)
        for name, held in self.held_weights().items():
            held.copy_(self.held_part(name, state["weights"][name]))
        optimizer = state["optimizer"]
        check_moments(self._optimizer, optimizer, {name: self._shapes[name] for name in self._names.values()})
        moments = {
            slot: {name: self.held_part(name, tensor) for name, tensor in tensors.items()}
            for slot, tensors in optimizer["moments"].items()
        }
        write_optimizer(self._optimizer, self._names, {**optimizer, "moments": moments})
        self._scaler.load_state_dict(state["scaler"])


def _with_strides_of_one_sample(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """FSDP passes inputs through a function of autograd, which returns views. A view of one sample in channels last has
    another stride along the batch, by which a convolution takes it for contiguous and rounds differently."""
    result: tuple[Any, Any] = tree_map_only(Tensor, _with_stride_along_the_batch, (args, kwargs))
    return result


def _with_stride_along_the_batch(x: Tensor) -> Tensor:
    if x.ndim not in (4, 5) or len(x) != 1 or x.stride(0) == x.numel() or x.is_contiguous():
        return x
    last = x.movedim(1, -1)
    return last.view(last.shape).movedim(-1, 1) if last.is_contiguous() else x


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that a model repeats, by name: modules in a list or a sequence (``nn.ModuleList``, ``nn.Sequential``)
    that are called, of a class of which there are several in such places. None lies in another one."""
    candidates = {
        name: block
        for name, block in model.named_modules()
        if name and isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList | nn.Sequential)
    }
    repeats = Counter(type(block) for block in candidates.values())
    enough = min(_size(model) // _PART_OF_A_MODEL, _ALWAYS_WORTH_IT)
    chosen: dict[str, nn.Module] = {}
    for name, block in candidates.items():  # outer modules come before those inside them
        is_inside = any(name.startswith(f"{outer}.") for outer in chosen)
        if not is_inside and repeats[type(block)] > 1 and _is_called(block) and _size(block) > enough:
            chosen[name] = block
    return chosen


def _is_called(module: nn.Module) -> bool:
    """Whether it computes something with modules of its own. A list only holds modules that another one calls. A single
    layer is no block: models look at the type of its weights before they call it."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
