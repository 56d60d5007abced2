"""Every contract of the distributed layer on toy models: what a backend measures, to be compared with one process."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tandem.distributed import Backend, ProcessGroup, UserMistake
from tandem.distributed.collectives import Communicator
from tandem.distributed.engines.base import Engine
from tandem.distributed.engines.optimizer_state import copy_to_cpu
from tandem.training.checkpoint.snapshot import Snapshot
from tandem.training.ema import make_ema

BATCH = 24  # divides by 1, 2, 3 and 4 processes with 1 or 2 accumulation steps
FLAGS = ["--batch_size", str(BATCH), "--max_skipped_updates", "4"]
UPDATES = 6


def mlp(sizes: list[int], seed: int) -> nn.Sequential:
    """An MLP of the given sizes. Callers choose odd sizes, which no number of processes divides."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)


def global_batch(update: int, width: int = 7) -> Tensor:
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(update))


def local(batch: Tensor, backend: Backend) -> Tensor:
    return batch.chunk(backend.processes.world_size)[backend.processes.rank]


def record(engine: Engine, updates: list[Any], losses: list[float]) -> dict[str, Any]:
    state = engine.state_dict()
    return {
        "losses": losses,
        "grad_norms": [float(update.grad_norm) for update in updates],
        "skipped": [bool(update.skipped) for update in updates],
        "weights": {name: tensor.flatten().tolist() for name, tensor in state["weights"].items()},
        "step": state["optimizer"]["step"],
        "moments": {
            slot: {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
            for slot, tensors in state["optimizer"]["moments"].items()
        },
    }


def plain(backend: Backend, name: str = "plain", *, spoil_update: int | None = None, **wrap: Any) -> dict[str, Any]:
    """Regression with accumulation; one update may hold a NaN on the last process."""
    model = mlp([7, 13, 5, 3], seed=1)
    engine = backend.wrap(model, adam(model), name=name, **wrap)
    updates, losses = [], []
    for update in range(UPDATES):
        inputs = global_batch(update)
        if update == spoil_update:
            inputs[-1, 0] = float("nan")
        total = torch.zeros((), dtype=torch.float64)
        for part in engine.micro_batches({"x": local(inputs, backend)}):
            loss = engine(part["x"]).square().mean()
            engine.backward(loss)
            total += loss.detach() / backend.options.plan.grad_accum_steps
        engine.lr = 1e-2 * 0.9**update
        updates.append(engine.step())
        losses.append(backend.processes.mean({"loss": total})["loss"])
    return record(engine, updates, losses)


def rounded_sums(backend: Backend) -> dict[str, Any]:
    """As `plain`, with gradients that are sent in bf16."""
    options = backend.options
    backend.options = replace(options, reduce_precision="bf16")
    try:
        return plain(backend, "rounded_sums")
    finally:
        backend.options = options


def small_buckets(backend: Backend) -> dict[str, Any]:
    """`plain` with buckets of 100 numbers, half of the model; ZeRO 3 keeps no weight whole."""
    sizes = [patch("tandem.distributed.engines.reducer.BUCKET_BYTES", 400)]
    if backend.name == "deepspeed":
        sizes.append(patch("tandem.distributed.backends.deepspeed.config.BUCKET_ELEMENTS", 100))
        sizes.append(patch.dict(backend.config, zero_optimization={"stage3_param_persistence_threshold": 0}))
    with contextlib.ExitStack() as stack:
        for size in sizes:
            stack.enter_context(size)
        return plain(backend, "small_buckets")


def several_backwards(backend: Backend) -> dict[str, Any]:
    """Two losses of one forward pass, then two of another: four backward calls for each input, none announced."""
    model = mlp([7, 11, 3], seed=2)
    engine = backend.wrap(model, adam(model), name="several")
    updates, message = [], ""
    for update in range(UPDATES):
        x = local(global_batch(update), backend).to(backend.processes.device)
        out = engine(x)
        try:
            engine.backward(out.square().mean(), retain_graph=True)
            engine.backward(out.abs().mean())
        except RuntimeError as error:
            message = str(error)
            engine.backward(out.square().mean() + out.abs().mean())
        engine.backward(engine(x * 0.5).abs().mean())
        engine.backward(engine(x + 1).mean())
        updates.append(engine.step())
    return {"numbers": record(engine, updates, []), "message": message}


def marks_of_a_pass(backend: Backend) -> dict[str, Any]:
    """What the watchdog is told in a forward pass: each phase, and whether weights are gathered meanwhile."""
    model = mlp([7, 3], seed=2)
    engine = backend.wrap(model, adam(model), name="marks")
    with patch.object(backend.processes, "heartbeat") as mark:
        engine(local(global_batch(0), backend))
    marks = [[call.args[0], call.kwargs.get("gathers", False)] for call in mark.call_args_list]
    return {"marks": marks, "is_sharded": engine.is_sharded}


def by_items(backend: Backend) -> dict[str, Any]:
    """Every process has a different number of items; the update is the mean over the items of all processes."""
    model = mlp([7, 11, 3], seed=3)
    engine = backend.wrap(model, adam(model), name="items")
    updates = []
    for update in range(UPDATES):
        kept = [row for row in range(BATCH) if row % 5 != update % 5 and row % 7 != 3]
        x = local(global_batch(update), backend)[local(torch.tensor([row in kept for row in range(BATCH)]), backend)]
        total = backend.processes.sum(torch.tensor(float(len(x)), device=backend.processes.device))
        engine.backward(engine(x.to(backend.processes.device)).square().mean(), items=len(x), total=total)
        updates.append(engine.step())
    return record(engine, updates, [])


def patience(processes: ProcessGroup) -> float:
    """The last process works in an agreement while the others have nothing to do. Returns by how many seconds one of
    them began to wait in a collective, which has a time limit, before that work was done."""
    entered, sum_scalars = [], Communicator.sum_scalars

    def noted(*args: Any) -> Any:
        entered.append(time.monotonic())
        return sum_scalars(*args)

    with patch.object(Communicator, "sum_scalars", noted), processes.raise_on_all_ranks():
        if processes.rank == processes.world_size - 1:
            time.sleep(0.5)
        worked_until = time.monotonic()
    times = processes.gather_objects([entered[0], worked_until])
    return max(0.0, max(worked for _, worked in times) - min(first for first, _ in times))


def seconds_of_waiting(processes: ProcessGroup) -> float:
    """The most processor time that a process used while it waited half a second for the last one."""
    processes.barrier()
    began = time.thread_time()
    if processes.rank == processes.world_size - 1:
        time.sleep(0.5)
    processes.sum({"any": 1.0})
    return max(processes.gather_objects(time.thread_time() - began))


def idle_parts(backend: Backend) -> dict[str, Any]:
    """Two heads, of which the second takes part in every other update; AdamW moves both in each. Every third update has
    a penalty on gradients."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.always, self.at_times = mlp([7, 9, 5], seed=9), mlp([5, 1], seed=10), mlp([5, 3], seed=11)

        def forward(self, x: Tensor, *, is_idle: bool) -> list[Tensor]:
            features = self.trunk(x)
            return [self.always(features)] if is_idle else [self.always(features), self.at_times(features)]

    model = Heads()
    engine = backend.wrap(model, adam(model), name="idle_parts")
    updates = []
    for update in range(UPDATES):
        for part in engine.micro_batches({"x": local(global_batch(update), backend)}):
            x, is_idle = part["x"].requires_grad_(), update % 2 == 1
            loss = sum(of_head.square().mean() for of_head in engine(x, is_idle=is_idle))
            if update % 3 == 0:
                with engine.twice_differentiable():
                    total = sum(of_head.sum() for of_head in engine(x, is_idle=is_idle))
                    loss = loss + torch.autograd.grad(total, x, create_graph=True)[0].square().mean()
            engine.backward(loss)
        updates.append(engine.step())
    return record(engine, updates, [])


def reloaded(backend: Backend) -> dict[str, Any]:
    """Halfway, the state is saved and loaded into a fresh engine, which must continue as if nothing had happened.
    Wrapping a model changes nothing."""
    model = mlp([7, 13, 5, 3], seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = backend.wrap(model, adam(model), name="first_half")
    wrapped = engine.state_dict()
    unchanged = all(torch.equal(wrapped["weights"][name], before[name]) for name in before)
    unchanged &= wrapped["optimizer"] == {"type": "Adam", "step": 0, "slots": [], "moments": {}}
    updates = []
    for update in range(UPDATES):
        if update == UPDATES // 2:
            state = engine.state_dict()
            other = mlp([7, 13, 5, 3], seed=99)
            engine = backend.wrap(other, adam(other), name="second_half")
            engine.load_state_dict(state)
            again = engine.state_dict()
            unchanged &= all(torch.equal(again["weights"][n], state["weights"][n]) for n in before)
            for slot, tensors in state["optimizer"]["moments"].items():
                unchanged &= all(torch.equal(again["optimizer"]["moments"][slot][n], t) for n, t in tensors.items())
        if update > UPDATES // 2:  # and into the engine itself, after an update that is not to be seen
            state = engine.state_dict()
            engine.backward(engine(local(global_batch(99), backend)).sum())
            engine.step()
            engine.load_state_dict(state)
        for part in engine.micro_batches({"x": local(global_batch(update), backend)}):
            engine.backward(engine(part["x"]).square().mean())
        engine.lr = 1e-2 * 0.9**update
        updates.append(engine.step())
    with engine.full_weights() as full:
        evaluated = full(global_batch(0).to(backend.processes.device)).square().mean().item()
    return {**record(engine, updates, [evaluated]), "unchanged": bool(unchanged)}


def average(backend: Backend) -> dict[str, Any]:
    """Whether an average has the bits of one of whole weights, in a save, in the averaged model and after a load; how
    many numbers this process holds of it, of how many, and in how many pieces; how many numbers have a row of each."""
    model = nn.Sequential(mlp([7, 13, 5], seed=1), nn.BatchNorm1d(5), mlp([5, 3], seed=2))
    model[2].requires_grad_(False)
    engine = backend.wrap(model, adam(model[:2]), name="averaged")
    ema, other = make_ema(engine, 0.9), make_ema(engine, 0.9)
    expected = engine.state_dict()["weights"]
    for update in range(1, UPDATES + 1):
        engine.backward(engine(local(global_batch(update), backend)).square().mean())
        engine.step()
        ema.update()
        for name, weight in engine.state_dict()["weights"].items():
            is_averaged = "running" not in name and "tracked" not in name
            expected[name] = (
                expected[name].lerp(weight, 1 - min(0.9, (1 + update) / (10 + update))) if is_averaged else weight
            )
    saved = copy_to_cpu(ema.state_dict())
    other.load_state_dict(saved)
    with other.averages()["ema"]() as averaged:
        found = [saved["weights"], dict(averaged.state_dict()), copy_to_cpu(other.state_dict())["weights"]]
        numbers = sum(parameter.numel() for parameter in averaged.parameters())
        rows = sum(parameter[0].numel() for parameter in averaged.parameters())
    same = [
        state.keys() == expected.keys() and all(torch.equal(state[n], expected[n]) for n in state) for state in found
    ]
    parts = ema._averages["ema"]._shards  # private: a script asks for whole weights; a machine's memory has these
    held = sum(tensor.numel() for tensor in parts.values())
    return {
        "same": same, "held": held, "numbers": numbers, "pieces": len(parts), "rows": rows,
        "is_sharded": engine.is_sharded,
    }  # fmt: skip


def saved_bytes(backend: Backend) -> dict[str, list[int]]:
    """By rank, the bytes that a process copies to the host for a checkpoint, before it copies what it keeps and in
    doing so; the root alone keeps them."""
    model = nn.Sequential(mlp([7, 13], seed=1), nn.BatchNorm1d(13), mlp([13, 3], seed=2))
    model[2].requires_grad_(False)
    engine = backend.wrap(model, adam(model[:2]), name="saved")
    engine.backward(engine(local(global_batch(0), backend)).square().mean())
    engine.step()
    sent: list[int] = []

    def counted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(tensor: Tensor, *args: Any, **more: Any) -> Tensor:
            found = original(tensor, *args, **more)
            if found.device.type == "cpu" and found is not tensor:
                sent.append(found.nbytes)
            return found

        return call

    with patch.multiple(Tensor, to=counted(Tensor.to), cpu=counted(Tensor.cpu)):
        snapshot = Snapshot({"engine": engine.live_state()}, keep=backend.processes.is_root)
        snapshot.finish()
    kept = sum(tensor.nbytes for tensor in snapshot.tensors["engine"].values())
    numbers = sum(tensor.nbytes for tensor in tensors_of(engine.state_dict()))
    return {
        "sent": backend.processes.gather_objects(sum(sent)),
        "kept": backend.processes.gather_objects(kept),
        "state": [numbers],
    }


def sums_per_update(backend: Backend) -> dict[str, float]:
    """How often this process calls each of its own collectives in an update that logs nothing, by name."""
    model = mlp([7, 13, 3], seed=1)
    engine = backend.wrap(model, adam(model), name="counted")
    calls: list[str] = []

    def counted(original: Callable[..., Any], name: str = "") -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any) -> Any:
            calls.append(name or args[0])
            return original(tensor, *args)

        return call

    comm = backend.processes.comm
    backend.processes.stop_requested()  # what an engine before this one has carried is not counted
    with patch.multiple(comm, all_reduce_=counted(comm.all_reduce_), all_gather=counted(comm.all_gather, "all_gather")):
        for update in range(UPDATES):
            for part in engine.micro_batches({"x": local(global_batch(update), backend)}):
                engine.backward(engine(part["x"]).square().mean())
            engine.step()
            backend.processes.stop_requested()
    return {name: calls.count(name) / UPDATES for name in sorted(set(calls))}


def tensors_of(tree: dict[str, Any]) -> Iterator[Tensor]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from tensors_of(value)
        elif isinstance(value, Tensor):
            yield value


def collectives(processes: ProcessGroup) -> dict[str, Any]:
    """Whether the results of the collectives equal closed forms that hold for any number of processes."""
    world, rank, device = processes.world_size, processes.rank, processes.device
    few = torch.arange(3 * (rank == 0), dtype=torch.uint8, device=device)  # as a preview, which the first ones have
    gathered = processes.gather(torch.full((rank + 1, 2), float(rank), device=device))
    numbers = processes.sum({"a": rank, "b": torch.tensor(2.0, device=device)})
    integers = processes.sum(torch.tensor([2**40 + rank], device=device))
    half = processes.sum(torch.full((3,), 1.5, dtype=torch.bfloat16, device=device))
    mean = processes.mean(torch.tensor([rank], device=device)).item()
    return {
        "sum": numbers == {"a": world * (world - 1) / 2, "b": 2.0 * world},
        "mean": processes.mean({"a": rank})["a"] == (world - 1) / 2,
        "integers": integers.tolist() == [2**40 * world + world * (world - 1) // 2],
        "half": half.tolist() == [1.5 * world] * 3,
        "mean_of_integers": abs(mean - (world - 1) / 2) < 1e-6,
        "gather": gathered[:, 0].tolist() == [other for other in range(world) for _ in range(other + 1)],
        "gather_of_few": processes.gather(few).tolist() == [0, 1, 2],
        "objects": processes.gather_objects({"rank": rank}) == [{"rank": other} for other in range(world)],
        "broadcast": processes.broadcast_object(f"from {rank}") == "from 0",
        "lack_of_memory": lack_of_memory(processes),
    }


def lack_of_memory(processes: ProcessGroup) -> bool:
    """Whether all processes end with one message if the last one alone asks for more memory than there is."""
    last = processes.world_size - 1
    try:
        with processes.raise_on_all_ranks():
            if processes.rank == last:
                torch.empty(1 << 60)
    except UserMistake as mistake:
        text = str(mistake)
        return text.startswith("not enough memory: ") and text.endswith(f" (on rank {last})" if last else "memory)")
    return False


def measure(args: argparse.Namespace, backend: Backend) -> None:
    """Measure every contract and write the results to result.json."""
    measures = [plain, small_buckets, several_backwards, by_items, idle_parts, reloaded, average, marks_of_a_pass,
                saved_bytes, sums_per_update]  # fmt: skip
    if backend.name != "horovod":
        measures.append(rounded_sums)
    result: dict[str, Any] = {measure.__name__: measure(backend) for measure in measures}
    result |= {each.__name__: each(backend.processes) for each in (collectives, patience, seconds_of_waiting)}
    result["skipped"] = plain(backend, "skipped", spoil_update=3)
    by_rank = backend.processes.gather_objects(result["plain"]["grad_norms"])
    result["same_norms_on_all_ranks"] = all(norms == by_rank[0] for norms in by_rank)
    if backend.processes.is_root:
        (Path(args.output_dir) / "result.json").write_text(json.dumps({**result, "description": backend.describe()}))
