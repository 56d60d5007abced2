"""The engine for FSDP2. PyTorch gathers the weights of a block for its passes and sums its gradients; Tandem clips,
skips non-finite updates, saves the state, and steps the optimizer on this process's shards.

A process holds rows rank x n to (rank + 1) x n of each weight, where n is the number of rows divided by the number of
processes, rounded up. The last processes may hold fewer rows, or none. A 0-d weight is whole on every process.
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

from tandem.distributed.devices import available_threads, cpu_threads
from tandem.distributed.engines.arithmetic import DTYPES, LossScaler, gradient_norm
from tandem.distributed.engines.optimizer_state import (
    check_moments,
    check_names,
    read_optimizer,
    unfuse,
    write_optimizer,
)
from tandem.distributed.engines.ordered_sum import OrderedSum
from tandem.distributed.engines.reducer import GradientReducer
from tandem.distributed.engines.replicated import ReplicatedEngine
from tandem.distributed.errors import UserMistake

_SMALL_BLOCK_DIVISOR = 100  # blocks below 1/100 of the model are sharded together with the rest of the model ...
_LARGE_BLOCK_SIZE = 2**20  # ... unless they have this many weights
_END_BACKWARD = "_register_root_post_backward_final_callback"  # private, of FSDP's state

if TYPE_CHECKING:
    from tandem.distributed.base import Options
    from tandem.distributed.process_group import ProcessGroup


class FSDPEngine(ReplicatedEngine):
    """A process holds a shard of each weight, gradient and moment, and whole weights only while a block computes."""

    is_sharded = _lacks_weights = True

    blocks: list[str]
    """Names of the blocks whose weights are gathered one block at a time."""

    def __init__(
        self, processes: ProcessGroup, options: Options, model: nn.Module, optimizer: torch.optim.Optimizer, *,
        offload: bool, reshard_after_forward: bool, name: str, max_grad_norm: float | None,
    ) -> None:  # fmt: skip
        self._offload, self._reshard_after_forward = offload, reshard_after_forward
        self._is_kept_unsharded = False
        super().__init__(processes, options, model, optimizer, name=name, max_grad_norm=max_grad_norm)

    def _set_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        processes, options = self._processes, self._options
        self._scaler = LossScaler(options.precision == "fp16", processes.device)
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        names = {parameter: name for name, parameter in model.named_parameters()}
        if options.compile:
            # Before offloading: the `compile` of a model may make constants on the device of its weights.
            model.compile()
        self._apply_fsdp(model)
        full_parameters = self._full_parameters() if self._plan.batch_parts else {}
        tensors = model.state_dict(keep_vars=True)
        self._sharded_parameters: dict[str, Any] = {name: t for name, t in tensors.items() if isinstance(t, DTensor)}
        self._local_parameters: dict[str, nn.Parameter] = {
            name: nn.Parameter(p.to_local().detach(), p.requires_grad) if isinstance(p, DTensor) else p
            for name, p in model.named_parameters()
        }
        for group in optimizer.param_groups:
            group["params"] = [self._local_parameters[names[parameter]] for parameter in group["params"]]
        self._names = {local: name for name, local in self._local_parameters.items() if local.requires_grad}
        scalars = [local for local, name in self._names.items() if name not in self._sharded_parameters]  # 0-d weights
        self._ordered_sum: OrderedSum | None = None
        if self._plan.batch_parts:
            ordered = [full_parameters.get(name, local) for local, name in self._names.items()]
            self._ordered_sum = OrderedSum(ordered, processes.comm, self._plan.grad_accum_steps)
            unfuse(optimizer)
        else:
            self._scalar_reducer = GradientReducer(scalars, processes.comm, self.name)
        # torchrun sets one CPU thread, in which an optimizer on the CPU would hold up the GPU.
        self._optimizer_threads = available_threads(processes.gather_objects) if self._offload else None
        if self._offload:
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # its scale is on the GPU

    def _apply_fsdp(self, model: nn.Module) -> None:
        device, options = self._processes.device, self._options
        # With --batch_parts, gradients are added in fp32, as on the other backends.
        compute_dtype = torch.float32 if self._plan.batch_parts else DTYPES[options.precision]
        blocks = repeated_blocks(model)
        self.blocks = list(blocks)
        self._are_weights_cast = bool(blocks) and compute_dtype != torch.float32
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        reduce_dtype = torch.bfloat16 if options.reduce_precision == "bf16" else None  # None: the weights' dtype
        shard = partial(
            fully_shard,
            mesh=DeviceMesh.from_group(dist.group.WORLD, device.type),  # type: ignore[arg-type]
            offload_policy=CPUOffloadPolicy(device.type != "cpu") if self._offload else OffloadPolicy(),
            ignored_params={parameter for parameter in model.parameters() if parameter.ndim == 0},
        )
        # Autocast casts what an operation needs, so inputs are not cast.
        block_policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        if self._are_weights_cast:
            block_policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype or torch.float32, cast_forward_inputs=False)
        for block in blocks.values():
            shard(block, reshard_after_forward=self._reshard_after_forward, mp_policy=block_policy)
        # Weights outside of blocks stay fp32: codebooks, temperatures and latents are fp32 under autocast, too.
        shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False))
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._fsdp_modules:
            module.set_gradient_divide_factor(1.0)  # an update is a sum, not a mean
            module.set_force_sum_reduction_for_comms(True)  # Gloo knows only sums
            cast(nn.Module, module).register_forward_pre_hook(_fix_input_strides, with_kwargs=True)
        if not hasattr(cast(FSDPModule, model)._get_fsdp_state(), _END_BACKWARD):
            raise UserMistake(
                f"FSDP of PyTorch {torch.__version__} has no {_END_BACKWARD}: it differs from that of the versions "
                "which pyproject.toml allows; install one of those, or leave --distributed_backend fsdp out"
            )

    def _graph_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._full_parameters().items()

    def _full_parameters(self) -> dict[str, nn.Parameter]:
        """The whole parameters that passes compute with, by name; FSDP empties them when it reshards."""
        parameters = {}
        for module in self._fsdp_modules:
            module.unshard()
            parameters.update({name: p for name, p in self.module.named_parameters() if not isinstance(p, DTensor)})
            module.reshard()
        return {name: parameters[name] for name, _ in self.module.named_parameters()}

    def _eager_forward(self, *args: Any, **kwargs: Any) -> Any:
        # In fp32, although FSDP's hooks may cast the weights: then they are gathered here, and cast back. Otherwise the
        # module is called, not its `forward`, because the hooks that gather the weights run only in a call.
        eager = torch.compiler.set_stance("force_eager") if self._options.compile else nullcontext()
        with eager:
            if not self._are_weights_cast:
                return self.module(*args, **kwargs)
            for module in self._fsdp_modules:
                module.unshard()
            weights = {name: parameter.float() for name, parameter in self.module.named_parameters()}
            return torch.func.functional_call(self.module, weights, args, kwargs)

    def _add_gradients(self, loss: Tensor, weight: float | Tensor, retain_graph: bool) -> None:
        loss = self._guard.weighted_loss(loss, weight * self._loss_scale())
        if self._ordered_sum is not None:
            self._ordered_sum.backward(loss, self._micro_batch, retain_graph)
            return
        # This runs the whole backward pass, in which FSDP sums the gradients of the sharded weights.
        self._scalar_reducer.backward(loss, None, retain_graph)
        if self._is_kept_unsharded:
            self._reduce_late_gradients()

    def _reduce_late_gradients(self) -> None:
        """Let FSDP sum the gradients that it has missed: those that were computed after their block was summed, and
        those of a backward pass that passes through no output of the model, as that of a gradient penalty may do."""
        # FSDP accepts its last callback only during a backward pass, so this runs an empty one.
        end_backward = getattr(cast(FSDPModule, self.module)._get_fsdp_state(), _END_BACKWARD)
        trigger = torch.zeros((), requires_grad=True) * 1
        trigger.register_hook(lambda _: end_backward())
        trigger.backward()

    def _update(self, with_norm: bool) -> tuple[Tensor, Tensor]:
        self._reshard()
        with cpu_threads(self._optimizer_threads):
            return super()._update(with_norm)

    @torch.no_grad()
    def _reduce_gradients(self, with_norm: bool) -> tuple[list[Tensor], Tensor]:
        if self._ordered_sum is not None:
            self._ordered_sum.finish()
            gradients = self._ordered_sum.by_parameter
            for (local, name), parameter in zip(self._names.items(), self._ordered_sum.parameters, strict=True):
                local.grad = self.shard(name, gradients[parameter]).to(local.device)
            return self._gradients(), gradient_norm(self._ordered_sum.gradients)
        self._scalar_reducer.finish()
        for local, name in self._names.items():
            if name in self._sharded_parameters:
                gradient = self._sharded_parameters[name].grad
                local.grad = torch.zeros_like(local) if gradient is None else gradient.to_local()
        return self._gradients(), self._norm()

    def _gradients(self) -> list[Tensor]:
        # Offloaded gradients come first: `ReplicatedEngine` divides all by one tensor on the device of the first one.
        ordered = sorted(self._names, key=lambda local: self._names[local] not in self._sharded_parameters)
        return [local.grad for local in ordered if local.grad is not None]

    def _norm(self) -> Tensor:
        """The norm of the whole model's gradients. The stop flag is summed with it."""
        processes, device = self._processes, self._processes.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        sharded = [local for local, name in self._names.items() if name in self._sharded_parameters]
        if gradients := [local.grad for local in sharded if local.grad is not None]:
            sums[0] = gradient_norm(gradients).square()
        if processes.world_size > 1:
            sums[1].fill_(float(processes.stop.contribute_flag()))
            processes.comm.all_reduce_(sums, f"{self.name}.norm").wait()
            processes.stop.read_sum(sums[1])
        if self._scalar_reducer.gradients:
            sums[0] += gradient_norm(self._scalar_reducer.gradients).square()
        return sums[0].sqrt()

    def _clear_gradients(self) -> None:
        for local, name in self._names.items():
            if name in self._sharded_parameters:
                self._sharded_parameters[name].grad = local.grad = None
        if self._ordered_sum is not None:
            self._ordered_sum.zero_()
        elif self._scalar_reducer.gradients:
            self._scalar_reducer.zero_()

    def _reshard(self) -> None:
        """Free whole weights, which the next pass gathers again."""
        if self._is_kept_unsharded:
            self._keep_unsharded(False)
        for module in self._fsdp_modules:
            module.reshard()

    def _keep_unsharded(self, keep: bool) -> None:
        """Keep whole weights until the update, or free them after each pass."""
        self._is_kept_unsharded = keep
        for module in self._fsdp_modules:
            is_freed = self._reshard_after_forward and module is not self.module and not keep
            module.set_reshard_after_forward(is_freed, recurse=False)
            module.set_reshard_after_backward(not keep, recurse=False)

    @contextmanager
    def twice_differentiable(self) -> Iterator[None]:
        self._keep_unsharded(True)  # FSDP frees weights after the first pass
        with super().twice_differentiable():
            yield

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self._reshard()  # FSDP reads requires_grad of the sharded parameters
        with super().frozen():
            try:
                yield
            finally:
                self._reshard()

    def local_shards(self) -> dict[str, Tensor]:
        tensors = {**dict(self.module.named_buffers()), **self._local_parameters}
        return {name: tensors[name].detach() for name in self._shapes}

    def unshard(self, name: str, local: Tensor) -> Tensor:
        if name not in self._sharded_parameters:
            return local
        rows, *row_shape = self._shapes[name]
        # On the device, because an offloaded shard is on the CPU.
        padded = local.new_zeros(self._rows(name), *row_shape, device=self._processes.device)
        padded[: len(local)] = local
        flat = padded.new_empty(self._processes.world_size * padded.numel())
        dist.all_gather_into_tensor(flat, padded.view(-1))
        return flat.view(-1, *row_shape)[:rows]

    def _getters(self, local: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
        """By name, functions that return the whole tensor of each shard in ``local``, as `local_shards` has them."""
        return {name: partial(self.unshard, name, tensor) for name, tensor in local.items()}

    def shard(self, name: str, full: Tensor) -> Tensor:
        if full.shape != self._shapes[name]:
            raise ValueError(f"the shape {tuple(full.shape)} is not the model's {tuple(self._shapes[name])}")
        if name not in self._sharded_parameters:
            return full
        rows = self._rows(name)
        return full[self._processes.rank * rows : (self._processes.rank + 1) * rows]

    def _rows(self, name: str) -> int:
        """The number of rows of a weight that the first process holds; no process holds more."""
        return math.ceil(self._shapes[name][0] / self._processes.world_size)

    def _read_state(self) -> dict[str, Any]:
        optimizer = read_optimizer(self._optimizer, self._names)
        optimizer["moments"] = {slot: self._getters(tensors) for slot, tensors in optimizer["moments"].items()}
        weights = self._getters(self.local_shards())
        return {"weights": weights, "optimizer": optimizer, "scaler": self._scaler.state_dict()}

    @torch.no_grad()
    def _write_state(self, state: Mapping[str, Any]) -> None:
        self._reshard()
        check_names("weight", state["weights"], self._shapes)
        for name, local in self.local_shards().items():
            local.copy_(self.shard(name, state["weights"][name]))
        optimizer = state["optimizer"]
        check_moments(self._optimizer, optimizer, {name: self._shapes[name] for name in self._names.values()})
        moments = {
            slot: {name: self.shard(name, tensor) for name, tensor in tensors.items()}
            for slot, tensors in optimizer["moments"].items()
        }
        write_optimizer(self._optimizer, self._names, {**optimizer, "moments": moments})
        self._scaler.load_state_dict(state["scaler"])


def _fix_input_strides(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Forward pre-hook. FSDP passes inputs through an autograd function, which returns views. A view of a single
    channels-last sample has another batch stride, with which a convolution treats it as contiguous and rounds
    differently."""
    inputs: tuple[Any, Any] = tree_map_only(Tensor, _fix_batch_stride, (args, kwargs))
    return inputs


def _fix_batch_stride(x: Tensor) -> Tensor:
    if x.ndim not in (4, 5) or len(x) != 1 or x.stride(0) == x.numel() or x.is_contiguous():
        return x
    channels_last = x.movedim(1, -1)
    return channels_last.view(channels_last.shape).movedim(-1, 1) if channels_last.is_contiguous() else x


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks that a model repeats, by name: modules in a list or a sequence (``nn.ModuleList``, ``nn.Sequential``)
    with a forward pass and submodules, whose class occurs there several times. No block lies in another one."""
    candidates = {
        name: block
        for name, block in model.named_modules()
        if name and isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList | nn.Sequential)
    }
    repeats = Counter(type(block) for block in candidates.values())
    threshold = min(_size(model) // _SMALL_BLOCK_DIVISOR, _LARGE_BLOCK_SIZE)
    blocks: dict[str, nn.Module] = {}
    for name, block in candidates.items():  # outer modules come before those inside them
        is_inside = any(name.startswith(f"{outer}.") for outer in blocks)
        if not is_inside and repeats[type(block)] > 1 and _can_be_block(block) and _size(block) > threshold:
            blocks[name] = block
    return blocks


def _can_be_block(module: nn.Module) -> bool:
    """Whether a module has a forward pass and submodules. A ModuleList has no forward pass. A single layer is no block:
    models read the dtype of its weights before they call it."""
    return type(module).forward is not nn.Module.forward and any(True for _ in module.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
