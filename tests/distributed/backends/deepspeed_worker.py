"""DeepSpeed on one process and the CPU, with JSON files that bring their own optimizer or scheduler.

    python tests/distributed/backends/deepspeed_worker.py --folder <where the results go, a JSON file per case that ran>

It runs in a process of its own, because DeepSpeed takes seconds to import and changes global state.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tandem import distributed
from tandem.distributed import Backend, UserMistake
from tandem.distributed.engines.base import Engine
from tandem.distributed.engines.optimizer_state import copy_to_cpu
from tandem.training.ema import make_ema
from tests.processes import parsed

UPDATES = 6
SCRIPT_RATE = 0.125  # which no JSON here has
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
PLAIN_SGD = {"type": "SGD", "params": {"lr": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {
    "warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"
}}  # fmt: skip
AUTO = {
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear", **dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    )}},
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "auto zero0": AUTO,
    "auto zero3": {**AUTO, "zero_optimization": {"stage": 3}},
    "adamw": {"optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}},
    "adam without decay": {"optimizer": {"type": "Adam", "params": {"lr": 0.05}}},
    "auto lr": {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
    **{f"sgd zero{stage}": {"optimizer": SGD, "zero_optimization": {"stage": stage}} for stage in range(4)},
    "scheduler zero0": {"optimizer": PLAIN_SGD, "scheduler": WARMUP},
    "scheduler zero2": {"optimizer": PLAIN_SGD, "scheduler": WARMUP, "zero_optimization": {"stage": 2}},
    "scheduler alone": {"scheduler": WARMUP},
    **{
        f"offload zero{stage}": {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
        for stage in (2, 3)
    },
    **{f"bf16 zero{stage}": {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}} for stage in (0, 3)},
}


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(update: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(update))


def script_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """What a script would use."""
    return torch.optim.SGD(model.parameters(), lr=SCRIPT_RATE)


def decaying_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """What a script would use whose biases do not decay."""
    matrices, biases = ([p for p in model.parameters() if p.ndim == dimensions] for dimensions in (2, 1))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=SCRIPT_RATE, betas=(0.7, 0.8), eps=1e-3)


def train(engine: Engine, updates: range, config: dict[str, Any]) -> dict[str, list[float]]:
    """Losses, and of each update the rate that the engine announces, its gradient, how far the weights went, and the
    threads of the optimizer."""
    record: dict[str, list[float]] = {"loss": [], "lr": [], "moved": [], "grad_norm": [], "threads": []}
    hook = register_optimizer_step_pre_hook(lambda *_: record["threads"].append(torch.get_num_threads()))
    for update in updates:
        before = flat(engine)
        loss = engine(batch(update)).square().mean()
        engine.backward(loss)
        if "scheduler" in config:
            engine.lr = SCRIPT_RATE  # as scripts do before every update; the scheduler wins
        record["lr"].append(engine.lr)
        record["grad_norm"].append(float(engine.step().grad_norm))
        record["loss"].append(loss.item())
        record["moved"].append((flat(engine) - before).norm().item())
    hook.remove()
    return record


def flat(engine: Engine) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in engine.state_dict()["weights"].values()])


def measure(backend: Backend, args: argparse.Namespace, config: dict[str, Any]) -> dict[str, Any]:
    def engine(name: str, seed: int = 0) -> Engine:
        model = make_model(seed)
        has_moments = config.get("scheduler") is AUTO["scheduler"] or "bf16" in config
        of_script = decaying_optimizer if has_moments else script_optimizer
        return backend.wrap(model, of_script(model), name=name)

    whole, first, second = engine("whole"), engine("first"), engine("second", seed=99)
    record = train(whole, range(UPDATES), config)
    train(first, range(UPDATES // 2), config)
    second.load_state_dict(first.state_dict())
    continued = train(second, range(UPDATES // 2, UPDATES), config)
    averages = make_ema(whole, 0.0, [0.1])
    averages.update()
    average, weights = copy_to_cpu(averages.state_dict())["powers"]["0.1"]["weights"], whole.state_dict()["weights"]
    return {
        **record,
        "continued": continued,
        "weights": flat(whole).tolist(),
        "averaged": all(torch.equal(average[name], weight) for name, weight in weights.items()),
        "learning_rate": args.learning_rate,
        "threads_outside": torch.get_num_threads(),
        "summary": backend.summary(),
        "resolved": backend.describe()["deepspeed"]["whole"],
    }


def run(name: str, folder: Path) -> None:
    """One case, into ``<name>.json``."""
    path = folder / "ds.json"
    path.write_text(json.dumps(CONFIGS[name]))
    args = parsed("--deepspeed_config", str(path), batch_size=8, learning_rate=SCRIPT_RATE, lr_warmup_steps=2)
    with distributed.from_args(args) as backend:
        backend.total_updates = UPDATES
        (folder / f"{name}.json").write_text(json.dumps(measure(backend, args, CONFIGS[name])))


def run_released(folder: Path) -> None:
    """ZeRO 3 with weights that it does not keep whole, in buckets smaller than the model, into ``released.json``."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    from tandem.distributed.backends.deepspeed import config

    def deep_model() -> nn.Module:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.Tanh())]
        return nn.Sequential(*layers)

    config.BUCKET_ELEMENTS = 300
    path = folder / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    with distributed.from_args(parsed("--deepspeed_config", str(path), batch_size=8)) as backend:
        model, plain = deep_model(), deep_model()
        optimizer = torch.optim.SGD(plain.parameters(), lr=SCRIPT_RATE)
        engine = backend.wrap(model, script_optimizer(model))
        whole: list[int] = []
        for layer in model:
            layer.register_forward_pre_hook(
                lambda *_: whole.append(
                    sum(p.ds_numel for p in model.parameters() if p.ds_status == ZeroParamStatus.AVAILABLE)
                )
            )
        found: dict[str, Any] = {"loss": [], "expected": []}
        for update in range(UPDATES):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(update))
            for losses, forward, backward in (
                (found["loss"], engine, engine.backward), (found["expected"], plain, torch.autograd.backward)
            ):  # fmt: skip
                loss = forward(x).square().mean()
                backward(loss)
                losses.append(loss.item())
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        found["most_gathered"] = max(whole[len(whole) // 2 :])  # in the first updates it looks at the order of layers
        (folder / "released.json").write_text(json.dumps(found))


def run_renamed(folder: Path) -> None:
    """What is said if DeepSpeed has other names inside, into ``renamed.json``."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    del DeepSpeedEngine._backward_prologue, DeepSpeedZeroOptimizer.update_lp_params
    try:
        run("sgd zero2", folder / "renamed")
    except UserMistake as mistake:
        (folder / "renamed.json").write_text(json.dumps(str(mistake)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    # DeepSpeed connects once per process. Forked, the cases share the imports, which are what takes time: those of
    # DeepSpeed, of ZeRO's first look at an optimizer, and of PyTorch's first optimizer.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    script_optimizer(make_model())
    cases = {name: partial(run, name) for name in CONFIGS}
    for case in (*cases.values(), run_released):
        child = os.fork()
        if child == 0:
            case(folder)
            os._exit(0)
        os.waitpid(child, 0)  # a case that fails leaves no file
    (folder / "renamed").mkdir()
    run_renamed(folder)


if __name__ == "__main__":
    main()
