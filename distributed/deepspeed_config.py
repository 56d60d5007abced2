"""A DeepSpeed JSON meets the command line: it fills what was left at its default, and never contradicts silently."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .errors import UserMistake

AUTO = "auto"


def read_config(path: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        UserMistake: missing, unreadable, not JSON, not an object, or a key said twice.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise UserMistake(f"--deepspeed_config {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise UserMistake(f"--deepspeed_config {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserMistake(f"--deepspeed_config {path} holds a {type(config).__name__}, not an object {{...}}")
    return config


def merge(args: argparse.Namespace, config: dict[str, Any], world_size: int) -> None:
    """Fill ``args`` from the JSON where the command line said nothing.

    Raises:
        UserMistake: both said something, and it differs; the line names both.
    """
    path = args.deepspeed_config

    def fill(key: str, value: Any, flag: str) -> None:
        if value is None or value == AUTO or not hasattr(args, flag):
            return
        present = getattr(args, flag)
        if flag in getattr(args, "explicit", frozenset()) and present != value:
            raise UserMistake(
                f"--{flag} {present} contradicts {key}: {value} in {path}; say it in one place, or the same in both"
            )
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise UserMistake(f"{key} in {path} is {value!r}, a number was expected")
        setattr(args, flag, value)
        args.explicit = getattr(args, "explicit", frozenset()) | {flag}

    micro, accumulation = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
    fill("gradient_accumulation_steps", accumulation, "grad_accum_steps")
    fill("train_batch_size", config.get("train_batch_size"), "batch_size")
    if micro not in (None, AUTO):
        if not isinstance(micro, int) or isinstance(micro, bool):
            raise UserMistake(f"train_micro_batch_size_per_gpu in {path} is {micro!r}, a number was expected")
        total = micro * args.grad_accum_steps * world_size
        arithmetic = f"train_micro_batch_size_per_gpu ({micro} x {args.grad_accum_steps} x {world_size} processes)"
        fill(arithmetic, total, "batch_size")
    fill("gradient_clipping", config.get("gradient_clipping"), "max_grad_norm")
    enabled = [name for name in ("bf16", "fp16") if _section(config, name, path).get("enabled") is True]
    if enabled:
        fill(f"{enabled[0]}.enabled", enabled[0], "precision")
    fill(
        "optimizer.params.lr", _section(_section(config, "optimizer", path), "params", path).get("lr"), "learning_rate"
    )
    fill("zero_optimization.stage", _section(config, "zero_optimization", path).get("stage"), "zero_stage")
    if args.zero_stage not in (0, 1, 2, 3):
        raise UserMistake(f"zero_optimization.stage {args.zero_stage} in {path}: ZeRO has stages 0, 1, 2 and 3")


def resolve(
    config: dict[str, Any],
    *,
    world_size: int,
    global_batch_size: int,
    zero_stage: int,
    precision: str,
    max_grad_norm: float,
    parameter_count: int,
    on_cpu: bool,
) -> dict[str, Any]:
    """The whole configuration that DeepSpeed gets: no ``auto``, and nothing left to a default that has changed before.

    Accumulation stays with our engine (any number of backward calls add up), so DeepSpeed sees one step per update.
    """
    full = json.loads(json.dumps(config))
    full.update(
        train_batch_size=global_batch_size,
        train_micro_batch_size_per_gpu=global_batch_size // world_size,
        gradient_accumulation_steps=1,
        managed_gradient_accumulation=False,
        gradient_clipping=max_grad_norm,
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
    )
    full.setdefault("steps_per_print", 2**31)
    zero = full.setdefault("zero_optimization", {})
    zero["stage"] = zero_stage
    if zero_stage == 1:
        zero["overlap_comm"] = False  # gradients leave once, in step()
    for bucket in ("reduce_bucket_size", "allgather_bucket_size"):
        # DeepSpeed's default buffers hold 500 million elements, however small the model is.
        if zero.get(bucket, AUTO) == AUTO:
            zero[bucket] = min(500_000_000, -(-parameter_count // 128) * 128)  # DeepSpeed wants it aligned
    for key in [key for key, value in zero.items() if value == AUTO]:
        del zero[key]
    bf16, fp16 = full.setdefault("bf16", {}), full.setdefault("fp16", {})
    for section in (bf16, fp16):
        for key in [key for key, value in section.items() if value == AUTO]:
            del section[key]
    # --precision bf16 alone is autocast around fp32 weights, as on every backend; the JSON may ask for bf16 weights.
    bf16.setdefault("enabled", False)
    bf16["check_grad_overflow"] = True  # a non-finite update is skipped in every precision
    fp16["enabled"] = precision == "fp16"
    if optimizer := full.get("optimizer"):
        params = optimizer.setdefault("params", {})
        for key in [key for key, value in params.items() if value == AUTO]:
            del params[key]
        if str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
            params.setdefault("adam_w_mode", True)
            if on_cpu:
                params.setdefault("torch_adam", True)  # DeepSpeed's fused kernel needs a GPU
    return dict(full)


def _section(config: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, dict):
        raise UserMistake(f"{name} in {path} is {section!r}, an object {{...}} was expected")
    return section


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} stands twice")
        result[key] = value
    return result
