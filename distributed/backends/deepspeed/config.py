"""Merges a DeepSpeed JSON with the command line, and completes it to the configuration that DeepSpeed gets."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tandem.distributed.base import Options
from tandem.distributed.errors import UserMistake
from tandem.io.installed import find_shipped_file, similar_files
from tandem.io.reading import counted, parse_json, read_bytes

AUTO = "auto"
# DeepSpeed counts the elements of a bucket, whatever their type. In fp32 these are 25 MiB, reducer.py's BUCKET_BYTES.
BUCKET_ELEMENTS = 25 * 2**20 // 4
_MAX_BYTES = 1 << 20
_MAX_INT64 = 2**63 - 1  # every sensible number is far below it

# The keys that "DeepSpeed Configuration JSON" documents (deepspeed.ai, 2026).
SECTIONS = frozenset({
    "activation_checkpointing", "aio", "amp", "autotuning", "bf16", "checkpoint", "comet", "comms_logger",
    "communication_data_type", "compile", "compression_training", "csv_monitor", "curriculum_learning",
    "data_efficiency", "data_types", "dump_state", "elasticity", "flops_profiler", "fp16",
    "gradient_accumulation_steps", "gradient_clipping", "gradient_predivide_factor", "hybrid_engine",
    "memory_breakdown", "optimizer", "prescale_gradients", "progressive_layer_drop", "scheduler",
    "sparse_attention", "sparse_gradients", "steps_per_print", "tensor_parallel", "tensorboard", "timers",
    "torch_autocast",
    "train_batch_size", "train_micro_batch_size_per_gpu", "wall_clock_breakdown", "wandb",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
})  # fmt: skip

# Keys that may be "auto", by path: those that follow from flags, those that `complete_config` chooses for the model,
# and numbers and switches of zero_optimization that only tune, for which DeepSpeed has defaults. An object such as
# offload_optimizer may not: without its values, DeepSpeed would silently do something else.
_MAY_BE_AUTO = re.compile(
    "train_batch_size|train_micro_batch_size_per_gpu|gradient_accumulation_steps|gradient_clipping|steps_per_print|"
    "communication_data_type|(bf16|fp16|amp).enabled|amp.opt_level|optimizer.params.(lr|betas|eps|weight_decay)|"
    "scheduler.params.(warmup_min_lr|warmup_max_lr|warmup_num_steps|total_num_steps)|"
    "zero_optimization.(stage|overlap_comm|contiguous_gradients|reduce_scatter|allgather_partitions|"
    "round_robin_gradients|sub_group_size|(reduce|allgather)_bucket_size|(stage3_)?(prefetch_bucket_size|"
    "(param|model)_persistence_threshold|max_live_parameters|max_reuse_distance|"
    "gather_(16bit|fp16)_weights_on_model_save))"
)


def read_config(path: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        UserMistake: missing, unreadable, not JSON, not an object, or a key is given twice.
    """
    try:
        hooks = {"object_pairs_hook": _unique_dict, "parse_constant": _finite_float, "parse_float": _finite_float}
        config = parse_json(read_bytes(find_shipped_file(path), _MAX_BYTES), **hooks)
    except OSError as error:
        raise UserMistake(f"--deepspeed_config {path}: {error.strerror or error}{similar_files(path, error)}") from None
    except ValueError as error:
        raise UserMistake(f"--deepspeed_config {path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserMistake(f"--deepspeed_config {path} holds a {type(config).__name__}, not an object {{...}}")
    for key in config.keys() - SECTIONS:
        # DeepSpeed ignores unknown keys. A newer one may know more keys than SECTIONS, so refuse only likely typos.
        if similar := difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.8):
            raise UserMistake(f"{key} in {path} is not a key that DeepSpeed reads; did you mean {similar[0]}?")
    return config


@contextlib.contextmanager
def one_line_refusals(path: str | None) -> Iterator[None]:
    """Context that turns DeepSpeed's errors about the JSON in ``path`` into one line; None: it changes no error.

    Raises:
        UserMistake: DeepSpeed refuses the JSON; the text is the same on every process.
    """
    try:
        yield
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        if path is None:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if list_errors := getattr(error, "errors", None):  # the single errors inside a pydantic error
            text = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in list_errors())
        raise UserMistake(f"DeepSpeed refuses --deepspeed_config {path}: {text[:300]}") from error


def merge_config(args: argparse.Namespace, config: dict[str, Any], world_size: int) -> None:
    """Set flags in ``args`` from the JSON, except those set on the command line or by --config.

    Raises:
        UserMistake: a value is of the wrong kind, or two values disagree; the text names both.
    """
    path = args.deepspeed_config
    for key in _auto_paths(config):
        if not _MAY_BE_AUTO.fullmatch(key):
            raise UserMistake(f"{key} in {path} is auto, and no flag says what it is: give a value, or leave it out")
    explicit = set(getattr(args, "explicit", ()))
    origins = {flag: f"--{flag} {_format_flag(getattr(args, flag))}" for flag in explicit if hasattr(args, flag)}

    def set_flag(flag: str, key: str, value: Any) -> None:
        if value is None or not hasattr(args, flag):
            return
        if isinstance(getattr(args, flag), list):  # one value per model: the JSON's value is for all
            value = [value] * len(getattr(args, flag))
        text = f"{key}: {_format_flag(value)}"
        if flag in origins and getattr(args, flag) != value:
            raise UserMistake(f"{origins[flag]} contradicts {text} in {path}; say it once, or the same in both")
        origins.setdefault(flag, text)
        explicit.add(flag)
        setattr(args, flag, value)

    for flag, key in (("grad_accum_steps", "gradient_accumulation_steps"), ("batch_size", "train_batch_size")):
        set_flag(flag, key, _read_number(path, config, key, int, 1))
    micro_batch_size = _read_number(path, config, "train_micro_batch_size_per_gpu", int, 1)
    if micro_batch_size is not None:
        samples_per_step = micro_batch_size * world_size
        if "batch_size" in origins and "grad_accum_steps" not in origins and args.batch_size % samples_per_step == 0:
            args.grad_accum_steps = args.batch_size // samples_per_step
        product = f"{micro_batch_size} x {args.grad_accum_steps} x {counted(world_size, 'process')}"
        arithmetic = f"train_micro_batch_size_per_gpu ({product})"
        set_flag("batch_size", arithmetic, samples_per_step * args.grad_accum_steps)
    set_flag("max_grad_norm", "gradient_clipping", _read_number(path, config, "gradient_clipping", float, 0))

    enabled = []
    for name in ("bf16", "fp16"):
        value = _read_section(path, config, name).get("enabled")
        if value not in (None, AUTO) and not isinstance(value, bool):
            raise UserMistake(f"{name}.enabled in {path} is {value!r}, true or false was expected")
        if value is False and "precision" in origins and args.precision == name:
            raise UserMistake(f"{origins['precision']} contradicts {name}.enabled: false in {path}; say it once")
        enabled += [name] * (value is True)
    if len(enabled) > 1:
        raise UserMistake(f"bf16.enabled and fp16.enabled are both true in {path}; choose one")
    for name in enabled:
        set_flag("precision", f"{name}.enabled", name)

    _merge_optimizer(args, config, set_flag)
    zero = _read_section(path, config, "zero_optimization")
    stage = _read_number(path, zero, "stage", int, 0, "zero_optimization.stage")
    if zero.get("mics_shard_size") not in (None, -1):
        raise UserMistake(
            f"zero_optimization.mics_shard_size in {path}: weights that are sharded over some of the processes (MiCS) "
            "are not supported; leave it out"
        )
    if stage is not None and stage > 3:
        raise UserMistake(f"zero_optimization.stage {stage} in {path}: ZeRO has stages 0, 1, 2 and 3")
    if (reduce_precision := config.get("communication_data_type")) in ("fp32", "bf16"):
        set_flag("reduce_precision", "communication_data_type", reduce_precision)
    set_flag("zero_stage", "zero_optimization.stage", stage)
    args.explicit = frozenset(explicit)


def _merge_optimizer(
    args: argparse.Namespace, config: dict[str, Any], set_flag: Callable[[str, str, Any], None]
) -> None:
    """Set the flags that the sections optimizer and scheduler give."""
    path, optimizer = args.deepspeed_config, _read_section(args.deepspeed_config, config, "optimizer")
    if "optimizer" in config and not isinstance(optimizer.get("type"), str):
        raise UserMistake(f"optimizer in {path} names no type, such as AdamW")
    params = _read_section(path, optimizer, "params")
    schedule = _read_section(path, _read_section(path, config, "scheduler"), "params")
    lr, weight_decay = (
        _read_number(path, params, name, float, 0, f"optimizer.params.{name}") for name in ("lr", "weight_decay")
    )
    key = "scheduler.params.warmup_max_lr"
    peak_lr = _read_number(path, schedule, "warmup_max_lr", float, 0, key)  # overrules the optimizer's
    if peak_lr is None:
        key, peak_lr = "optimizer.params.lr", lr
    set_flag("learning_rate", key, peak_lr)
    set_flag("weight_decay", "optimizer.params.weight_decay", weight_decay)
    if (betas := params.get("betas")) not in (None, AUTO):
        if not isinstance(betas, list) or [type(beta) in (int, float) for beta in betas] != [True, True]:
            raise UserMistake(
                f"optimizer.params.betas in {path} is {repr(betas)[:40]}, a list of two numbers was expected"
            )
        set_flag("betas", "optimizer.params.betas", tuple(map(float, betas)))
    key = "scheduler.params.warmup_num_steps"
    set_flag("lr_warmup_steps", key, _read_number(path, schedule, "warmup_num_steps", int, 0, key))
    warmups = getattr(args, "lr_warmup_steps", 0)
    if schedule.get("warmup_num_steps") == AUTO and isinstance(warmups, list) and len(set(warmups)) > 1:
        raise UserMistake(
            f"{key} in {path} is auto, and --lr_warmup_steps {_format_flag(warmups)} are several: give one number in "
            "both"
        )


def _read_section(path: str, parent: dict[str, Any], name: str) -> dict[str, Any]:
    """The object under a key of the JSON in ``path``; empty if the key is missing."""
    section = parent.get(name, {})
    if not isinstance(section, dict):
        raise UserMistake(f"{name} in {path} is {section!r}, an object {{...}} was expected")
    return section


def _read_number(path: str, parent: dict[str, Any], key: str, kind: type, least: float, label: str = "") -> Any:
    """The number under a key of the JSON in ``path``; None if it is missing or "auto"."""
    value = parent.get(key)
    if value is None or value == AUTO:
        return None
    is_valid = not isinstance(value, bool) and isinstance(value, int if kind is int else (int, float))
    if not is_valid or not least <= value <= _MAX_INT64:
        expected = f"{'a whole number' if kind is int else 'a number'} from {least:g} to {_MAX_INT64:.1e}"
        raise UserMistake(f"{label or key} in {path} is {repr(value)[:40]}, {expected} was expected")
    return value


def check_batch_parts(config: dict[str, Any], precision: str, path: str) -> None:
    """With --batch_parts, check that the JSON asks for nothing that computes differently from the other backends.

    Raises:
        UserMistake: the JSON asks for an optimizer, weights of low precision, or state on another device.
    """
    zero = config.get("zero_optimization", {})
    causes = [f"the optimizer section of {path}"] * ("optimizer" in config)
    causes += [f"bf16.enabled in {path}"] * (config.get("bf16", {}).get("enabled") is True)
    causes += ["fp16"] * (precision == "fp16")
    causes += [f"{key} in {path}" for key in ("offload_optimizer", "offload_param", "cpu_offload") if zero.get(key)]
    if causes:
        raise UserMistake(
            f"--batch_parts gives the same bits on every backend, but with {causes[0]} DeepSpeed computes differently "
            "from the other backends; leave out one of the two"
        )


def complete_config(
    config: dict[str, Any], options: Options, *, zero_stage: int, max_grad_norm: float, learning_rate: float,
    sizes: Sequence[int], on_cpu: bool, auto: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The whole configuration that DeepSpeed gets. It contains no ``auto``, and sets options explicitly whose defaults
    have changed between versions of DeepSpeed.

    ZeroEngine accumulates gradients over any number of backward calls itself, so DeepSpeed sees one step per update.
    ``sizes`` are the numbers of elements of the model's parameters; ``auto`` holds the values of "auto" in the sections
    optimizer and scheduler, by path, such as "optimizer.params.betas".
    """
    full: dict[str, Any] = _replace_autos(config, auto)
    full.update(
        train_batch_size=options.plan.global_batch_size,
        train_micro_batch_size_per_gpu=options.plan.local_batch_size,
        gradient_accumulation_steps=1,
        managed_gradient_accumulation=False,
        gradient_clipping=max_grad_norm,
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
    )
    full.setdefault("steps_per_print", 2**31)
    # DeepSpeed's timer waits for the whole device several times per update, and its numbers are not used.
    full.setdefault("timers", {"throughput": {"enabled": False}})
    if options.reduce_precision != "fp32":
        full["communication_data_type"] = options.reduce_precision
    zero = full.setdefault("zero_optimization", {})
    zero["stage"] = zero_stage
    if zero_stage == 1:
        zero["overlap_comm"] = False  # no effect: gradients are reduced once, in step()
    elif zero_stage == 2:
        # On CPUs DeepSpeed reduces in the thread that computes, so nothing overlaps; the second bucket takes memory.
        # With an optimizer on the CPU, keep DeepSpeed's default, which overlaps nothing.
        zero.setdefault("overlap_comm", not on_cpu and "offload_optimizer" not in zero)
    if options.plan.batch_parts:
        # ZeRO 3 would replace F.linear in the whole process by one that sums a bias's gradient in another order.
        zero["memory_efficient_linear"] = False
    for name, elements in _bucket_sizes(zero_stage, sizes).items():
        if name.removeprefix("stage3_") not in zero:  # DeepSpeed reads both names
            zero.setdefault(name, elements)
    bf16, fp16 = full.setdefault("bf16", {}), full.setdefault("fp16", {})
    # --precision bf16 means autocast around fp32 weights, as on every backend; only the JSON can ask for bf16 weights.
    bf16.setdefault("enabled", False)
    bf16["check_grad_overflow"] = True  # a non-finite update is skipped in every precision
    fp16["enabled"] = options.precision == "fp16"
    if optimizer := full.get("optimizer"):
        params = optimizer.setdefault("params", {})
        params.setdefault("lr", learning_rate)
        if str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
            params.setdefault("adam_w_mode", True)
            params.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's kernel, not of PyTorch's
            if on_cpu:
                params.setdefault("torch_adam", True)  # DeepSpeed's fused kernel needs a GPU
    return full


def _bucket_sizes(zero_stage: int, sizes: Sequence[int]) -> dict[str, int]:
    """Numbers of elements that DeepSpeed sends or keeps at once, by option. Its defaults, 50 million to a billion,
    exceed many models: it would allocate buffers of that size, and ZeRO 3 would keep all gathered weights until the end
    of the backward pass."""
    bucket_size = min(BUCKET_ELEMENTS, sum(sizes))
    reduce_size = bucket_size
    if zero_stage == 2:
        # DeepSpeed reduces a gradient that exceeds the bucket in place, and frees its memory while the reduction still
        # overlaps with the backward pass: the bucket must hold the largest gradient.
        reduce_size = max([bucket_size, *sizes])
    buckets = {"reduce_bucket_size": reduce_size, "allgather_bucket_size": bucket_size}
    buckets = {name: math.ceil(size / 128) * 128 for name, size in buckets.items()}  # DeepSpeed expects them aligned
    if zero_stage == 3:
        # ZeRO 3 prefetches a bucket for each module that it enters, up to max_live_parameters gathered weights in all.
        buckets |= {"stage3_prefetch_bucket_size": bucket_size, "stage3_max_live_parameters": 2 * bucket_size,
                  "stage3_max_reuse_distance": bucket_size}  # fmt: skip
    return buckets


def _format_flag(value: Any) -> str:
    """The value of a flag, as the command line has it."""
    entries = value if isinstance(value, list) else [value]
    return " ".join(",".join(map(str, entry)) if isinstance(entry, tuple) else str(entry) for entry in entries)


def _auto_paths(value: Any, path: str = "") -> Iterator[str]:
    """The paths of the values that are ``auto``: "optimizer.params.lr", or in a list "optimizer.params.betas.0"."""
    if value == AUTO:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _auto_paths(child, f"{path}.{key}".lstrip("."))


def _replace_autos(value: Any, auto: Mapping[str, Any], path: str = "") -> Any:
    """A copy in which the values of ``auto`` by path replace "auto", and which has no other "auto", at any depth."""
    if isinstance(value, dict):
        children = {key: _replace_autos(child, auto, f"{path}.{key}".lstrip(".")) for key, child in value.items()}
        return {key: child for key, child in children.items() if child != AUTO}
    if isinstance(value, list):
        return [_replace_autos(child, {}) for child in value if child != AUTO]  # `auto` has no path into a list
    return auto.get(path, AUTO) if value == AUTO else value


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if duplicates := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"key {duplicates[0]!r} is there twice")
    return dict(pairs)
