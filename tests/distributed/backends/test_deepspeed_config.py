"""Merging a DeepSpeed JSON with the command line, contradictions, and the configuration that DeepSpeed gets."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.distributed import UserMistake
from tandem.distributed.backends.deepspeed.config import (
    check_batch_parts,
    complete_config,
    merge_config,
    one_line_refusals,
    read_config,
)
from tandem.distributed.base import Options
from tandem.distributed.batch import BatchPlan
from tests.data.helpers import one_line
from tests.processes import parsed

Json = dict[str, Any]
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


def merged(config: Json, **said: Any) -> argparse.Namespace:
    """Arguments after ``config`` was merged in; ``said`` are flags of the command line."""
    args = parsed("--deepspeed_config", "ds.json", **said, explicit=frozenset(said))
    merge_config(args, config, world_size=2)
    return args


def resolved(config: Json, *, precision: str = "fp32", reduce_precision: str = "fp32", **overrides: Any) -> Json:
    values = {
        "zero_stage": 2, "max_grad_norm": 0.5, "learning_rate": 0.125, "sizes": [1000], "on_cpu": True, "auto": {},
    }  # fmt: skip
    options = Options(BatchPlan(24, 2, 2, 2), precision, reduce_precision=reduce_precision)
    return complete_config(config, options, **{**values, **overrides})


SAID = {"batch_size": 24, "grad_accum_steps": 3, "max_grad_norm": 0.5, "precision": "bf16", "zero_stage": 1,
        "learning_rate": 0.02}  # fmt: skip


AUTO: Json = {
    "train_batch_size": "auto", MICRO: "auto", ACCUMULATION: "auto",
    "gradient_clipping": "auto", "steps_per_print": "auto", "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "amp": {"enabled": "auto", "opt_level": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(
        ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
    )},
    "zero_optimization": {
        "stage": "auto", "reduce_bucket_size": "auto", "allgather_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto", "offload_optimizer": {"device": "none"},
    },
}  # fmt: skip


def with_params(section: str, **params: Any) -> Json:
    return {section: {"type": {"optimizer": "AdamW", "scheduler": "WarmupLR"}[section], "params": params}}


@pytest.mark.parametrize(
    ("config", "said", "expected"),
    [
        ({"train_batch_size": 32}, {}, {"batch_size": 32, "grad_accum_steps": 1}),
        ({MICRO: 4, ACCUMULATION: 3}, {}, {"batch_size": 24, "grad_accum_steps": 3}),
        ({"train_batch_size": 24, MICRO: 4, ACCUMULATION: 3}, {}, {"batch_size": 24, "grad_accum_steps": 3}),
        # 32 / (4 x 2 processes), as in DeepSpeed
        ({"train_batch_size": 32, MICRO: 4}, {}, {"batch_size": 32, "grad_accum_steps": 4}),
        ({MICRO: 4}, {"batch_size": 24}, {"batch_size": 24, "grad_accum_steps": 3}),
        ({"gradient_clipping": 0.25}, {}, {"max_grad_norm": 0.25}),
        ({"bf16": {"enabled": True}}, {}, {"precision": "bf16"}),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {}, {"precision": "fp16"}),
        ({"communication_data_type": "bf16"}, {}, {"reduce_precision": "bf16"}),
        ({"communication_data_type": "fp16"}, {}, {"reduce_precision": "fp32"}),  # left to DeepSpeed
        ({"optimizer": {"type": "Adam", "params": {"lr": 0.02}}}, {}, {"learning_rate": 0.02}),
        ({"zero_optimization": {"stage": 3}}, {}, {"zero_stage": 3}),
        ({"zero_optimization": {"overlap_comm": True}}, {}, {"zero_stage": 0}),
        ({}, {}, {"batch_size": 12, "grad_accum_steps": 1, "max_grad_norm": 0.0, "precision": "fp32", "zero_stage": 0}),
        # The same in both places is no contradiction.
        ({"train_batch_size": 24, MICRO: 4, ACCUMULATION: 3, "gradient_clipping": 0.5, "bf16": {"enabled": True},
          "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": {"lr": 0.02}}}, SAID, SAID),
        (AUTO, SAID | {"precision": "fp16"}, SAID | {"precision": "fp16"}),
        # A warm-up that is auto is that of all models.
        (with_params("scheduler", warmup_num_steps="auto"), {"lr_warmup_steps": [3, 3]}, {"lr_warmup_steps": [3, 3]}),
    ],
    ids=str,
)  # fmt: skip
def test_the_json_fills_what_was_left_at_its_default(config: Json, said: Json, expected: Json) -> None:
    args = vars(merged(config, **said))
    assert {flag: args[flag] for flag in expected} == expected


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (with_params("optimizer", betas=["auto", 0.9]), "optimizer.params.betas.0"),
        (with_params("optimizer", amsgrad="auto"), "optimizer.params.amsgrad"),
        ({"optimizer": {"type": "auto"}}, "optimizer.type"),
        (with_params("scheduler", warmup_type="auto"), "scheduler.params.warmup_type"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": "auto"}}}, "scheduler.params.cycle_max_lr"),
        ({"fp16": {"enabled": True, "loss_scale": "auto"}}, "fp16.loss_scale"),
        ({"zero_optimization": {"offload_param": {"device": "auto"}}}, "zero_optimization.offload_param.device"),
        *(({"zero_optimization": {key: "auto"}}, f"zero_optimization.{key}")
          for key in ("offload_optimizer", "offload_param", "zenflow", "leaf_module", "cpu_offload", "mics_shard_size",
                      "reduce_buckt_size")),
        *(({key: "auto"}, key) for key in ("optimizer", "scheduler", "zero_optimization", "bf16", "timers")),
        ({"optimizer": {"type": "AdamW", "params": "auto"}}, "optimizer.params"),
        ({"tensorboard": {"output_path": "auto"}}, "tensorboard.output_path"),
        ({"of_the_future": "auto"}, "of_the_future"),
    ],
    ids=str,
)  # fmt: skip
def test_auto_where_no_flag_says_it_is_one_line_that_names_the_key(config: Json, where: str) -> None:
    assert one_line(merged, config, kind=UserMistake).startswith(f"{where} in ds.json is auto")


def test_auto_of_optimizer_and_scheduler_is_what_it_is_said_to_mean() -> None:
    meant = {"optimizer.params.lr": 0.5, "optimizer.params.betas": [0.7, 0.8], "scheduler.params.warmup_num_steps": 3,
             "scheduler.params.total_num_steps": 9}  # fmt: skip
    full = resolved(AUTO, auto=meant)
    assert {name: full["optimizer"]["params"][name] for name in ("lr", "betas")} == {"lr": 0.5, "betas": [0.7, 0.8]}
    assert full["scheduler"]["params"] == {"warmup_num_steps": 3, "total_num_steps": 9}
    explicit = with_params("optimizer", betas=[0.1, 0.2], lr="auto")
    assert resolved(explicit, auto=meant)["optimizer"]["params"]["betas"] == [0.1, 0.2]


def test_auto_sets_no_flag() -> None:
    assert vars(merged(AUTO)) == vars(parsed("--deepspeed_config", "ds.json"))


@pytest.mark.parametrize(
    ("said", "config", "names"),
    [
        ({"batch_size": 8}, {"train_batch_size": 16}, ["--batch_size 8", "train_batch_size: 16"]),
        ({"batch_size": 8}, {MICRO: 4, ACCUMULATION: 2}, ["--batch_size 8", MICRO, "4 x 2 x 2 processes", "16"]),
        ({"batch_size": 8, "grad_accum_steps": 1}, {MICRO: 2}, ["--batch_size 8", MICRO, "2 x 1 x 2 processes", "4"]),
        ({"grad_accum_steps": 2}, {ACCUMULATION: 4}, ["--grad_accum_steps 2", f"{ACCUMULATION}: 4"]),
        ({"max_grad_norm": 0.5}, {"gradient_clipping": 1.0}, ["--max_grad_norm 0.5", "gradient_clipping: 1.0"]),
        ({"precision": "bf16"}, {"fp16": {"enabled": True}}, ["--precision bf16", "fp16.enabled"]),
        ({"precision": "fp16"}, {"fp16": {"enabled": False}}, ["--precision fp16", "fp16.enabled"]),
        ({"reduce_precision": "fp32"}, {"communication_data_type": "bf16"},
         ["--reduce_precision fp32", "communication_data_type: bf16"]),
        ({}, {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16.enabled", "bf16.enabled"]),
        ({"learning_rate": 0.001}, {"optimizer": {"type": "Adam", "params": {"lr": 0.02}}},
         ["--learning_rate 0.001", "optimizer.params.lr: 0.02"]),
        ({"learning_rate": 0.001}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}}},
         ["--learning_rate 0.001", "scheduler.params.warmup_max_lr: 0.02"]),
        ({"lr_warmup_steps": 5}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}},
         ["--lr_warmup_steps 5", "scheduler.params.warmup_num_steps: 9"]),
        ({"weight_decay": 0.1}, {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.2}}},
         ["--weight_decay 0.1", "optimizer.params.weight_decay: 0.2"]),
        ({"betas": (0.9, 0.99)}, {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
         ["--betas 0.9,0.99", "optimizer.params.betas: 0.9,0.95"]),
        ({"zero_stage": 1}, {"zero_optimization": {"stage": 2}}, ["--zero_stage 1", "zero_optimization.stage: 2"]),
        ({}, {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, ["zero_optimization.mics_shard_size", "MiCS"]),
        ({}, {"train_batch_size": 32, MICRO: 4, ACCUMULATION: 2},
         ["train_batch_size: 32", MICRO, "4 x 2 x 2 processes", "16"]),
        ({"lr_warmup_steps": [3, 4]}, with_params("scheduler", warmup_num_steps="auto"), ["--lr_warmup_steps 3 4"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_contradiction_is_one_line_that_names_both(said: Json, config: Json, names: list[str]) -> None:
    text = one_line(merged, config, **said, kind=UserMistake)
    assert all(name in text for name in [*names, "ds.json"]), text


WRONG_VALUES: dict[str, list[Any]] = {
    "train_batch_size": ["8", 8.5, True, 0, [8], 10**30], MICRO: ["4", 0], ACCUMULATION: [0, 1.5],
    "gradient_clipping": ["1.0", -1.0, True, 1e30, 10**30, 10**400], "bf16": [True], "bf16.enabled": ["true"],
    "fp16": [[]], "fp16.enabled": [1], "optimizer": ["Adam", {}], "optimizer.params": [1e-3],
    "optimizer.params.lr": ["1e-3"], "optimizer.params.betas": [0.9, [0.9], [0.9, "0.99"]],
    "optimizer.params.weight_decay": [-1, "0"], "scheduler.params.warmup_num_steps": [0.5, -1],
    "scheduler.params.warmup_max_lr": ["1e-3"], "scheduler": ["WarmupLR"], "zero_optimization": [2],
    "zero_optimization.stage": [4, "2", 1.5, True],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_VALUES.items() for value in values])
def test_a_value_of_the_wrong_kind_is_one_line_that_names_it(key: str, value: Any) -> None:
    first, *inner = key.split(".")
    for name in reversed(inner):
        value = {name: value}
    if key.startswith("optimizer."):
        value["type"] = "Adam"
    text = one_line(merged, {first: value}, kind=UserMistake)
    assert (key if key != "optimizer.params" else "params") in text and "ds.json" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        *((text, "not JSON") for text in (b"", b"{]", b"\xff\xfe", b'{"gradient_clipping": NaN}', b"[" * 100_000)),
        (b'{"zero_optimization": {"reduce_bucket_size": 1e999}}', "1e999"),
        (b'{"zero_optimization": ' + b" " * (1 << 20) + b"{}}", "1048576 bytes"),
        (b"[1, 2]", "holds a list"), (b"null", "NoneType"),
        (b'{"train_batch_size": 8, "train_batch_size": 16}', "'train_batch_size'"),
        (b'{"bf16": {"enabled": true, "enabled": false}}', "'enabled'"),
        (b'{"zero_optimizatoin": {}}', "zero_optimization?"), (None, "No such file"), ("a folder", "directory"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_configuration_is_refused_in_one_line(content: Any, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "a folder":
        path.mkdir()
    text = one_line(read_config, str(path), kind=UserMistake)
    assert expected in text and str(path) in text


def test_keys_of_a_newer_deepspeed_are_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"bfloat16": {}, "of_the_future": 1}')
    assert read_config(str(path)) == {"bfloat16": {}, "of_the_future": 1}


# The configuration that DeepSpeed gets.


def part_of(full: Any, expected: Any) -> Any:
    """``full`` without the keys that ``expected`` does not have."""
    return (
        {key: part_of(full.get(key), value) for key, value in expected.items()} if isinstance(expected, dict) else full
    )


BUCKETS = {"reduce_bucket_size": 777, "round_robin_gradients": True}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        # One step per update, and no accumulation of its own.
        ({ACCUMULATION: 3, MICRO: 4}, {}, {"train_batch_size": 24, MICRO: 12, ACCUMULATION: 1}),
        *(({"zero_optimization": {"stage": "auto"}}, {"zero_stage": stage, "max_grad_norm": stage / 10},
           {"zero_optimization": {"stage": stage}, "gradient_clipping": stage / 10}) for stage in range(4)),
        # Buckets have 25 MiB of fp32, are no larger than the model, and are aligned to 128.
        *(({}, {"sizes": sizes, "zero_stage": stage}, {"zero_optimization": {"reduce_bucket_size": size,
                                                                              "allgather_bucket_size": size}})
          for sizes, size in (([1], 128), ([100, 28], 128), ([128, 1], 256), ([10**5] * 10**3, 6_553_600))
          for stage in range(4)),
        # At ZeRO 2 every gradient fits into one.
        *(({}, {"sizes": [10**7, 10**7], "zero_stage": stage},
           {"zero_optimization": {"reduce_bucket_size": size, "allgather_bucket_size": 6_553_600}})
          for stage, size in ((0, 6_553_600), (1, 6_553_600), (2, 10_000_000), (3, 6_553_600))),
        # ZeRO 3 gathers one bucket ahead, and keeps two.
        ({}, {"sizes": [10**7, 10**7], "zero_stage": 3},
         {"zero_optimization": {"stage3_prefetch_bucket_size": 6_553_600, "stage3_max_live_parameters": 13_107_200,
                                "stage3_max_reuse_distance": 6_553_600}}),
        ({"zero_optimization": {"stage3_max_live_parameters": 7, "max_reuse_distance": 8}}, {"zero_stage": 3},
         {"zero_optimization": {"stage3_max_live_parameters": 7, "max_reuse_distance": 8}}),
        # On a GPU the reduction overlaps with the backward pass.
        *(({}, {"zero_stage": stage, "on_cpu": on_cpu}, {"zero_optimization": {"overlap_comm": overlaps}})
          for stage, on_cpu, overlaps in ((1, False, False), (2, False, True), (2, True, False))),
        *(({"zero_optimization": said}, {"on_cpu": False}, {"zero_optimization": {"overlap_comm": False}})
          for said in ({"overlap_comm": False}, {"offload_optimizer": {"device": "cpu"}})),
        ({"zero_optimization": BUCKETS, "wall_clock_breakdown": True}, {},
         {"zero_optimization": BUCKETS, "wall_clock_breakdown": True}),
        *(({}, {"reduce_precision": name}, {"communication_data_type": sent})
          for name, sent in (("fp32", None), ("bf16", "bf16"))),
        # DeepSpeed's timer, which waits for the device, runs only where it was asked for.
        ({}, {}, {"timers": {"throughput": {"enabled": False}}}),
        ({"timers": {"throughput": {"enabled": True}}}, {}, {"timers": {"throughput": {"enabled": True}}}),
        # Weights of fp16 follow --precision, those of bf16 the JSON.
        *(({}, {"precision": name}, {"fp16": {"enabled": name == "fp16"}, "bf16": {"enabled": False}})
          for name in ("fp32", "bf16", "fp16")),
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}, {"bf16": {"enabled": True, "check_grad_overflow": True}}),
        # A size of the JSON is not set a second time by its other name.
        ({"zero_optimization": {"max_reuse_distance": 8}}, {"zero_stage": 3},
         {"zero_optimization": {"max_reuse_distance": 8, "stage3_max_reuse_distance": None}}),
        # Settings of Adam are explicit, because defaults differ between kernels; others have no such switches.
        *(({"optimizer": {"type": kind, **({"params": said} if said else {})}}, {"on_cpu": on_cpu},
           {"optimizer": {"params": {"adam_w_mode": True, "weight_decay": 0.0, "lr": 0.125, **said}}})
          for kind in ("Adam", "AdamW", "adamw") for on_cpu in (True, False)
          for said in ({}, {"lr": 0.1}, {"adam_w_mode": False}, {"weight_decay": 0.1})),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, {},
         {"optimizer": {"params": {"lr": 0.1, "adam_w_mode": None, "weight_decay": None}}}),
    ],
    ids=str,
)  # fmt: skip
def test_deepspeed_gets_the_merged_settings(config: Json, overrides: Json, expected: Json) -> None:
    assert part_of(resolved(config, **overrides), expected) == expected


@pytest.mark.parametrize("on_cpu", [True, False])
def test_no_auto_is_left_at_any_depth_and_the_callers_config_stays_as_it_is(on_cpu: bool) -> None:
    config = copy.deepcopy(AUTO)
    assert '"auto"' not in json.dumps(resolved(config, on_cpu=on_cpu))
    assert config == AUTO


def test_the_configurations_in_the_repository_are_complete_and_fit_together() -> None:
    folder = Path(__file__).resolve().parents[3] / "configs" / "deepspeed"
    stages = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero2_offload": 2, "bf16": 2}
    assert {path.stem for path in folder.glob("*.json")} == set(stages)
    for name, stage in stages.items():
        config = read_config(str(folder / f"{name}.json"))
        args = merged(config)
        assert (args.zero_stage, args.precision) == (stage, "bf16" if name == "bf16" else "fp32")
        assert '"auto"' not in json.dumps(resolved(config, zero_stage=stage, precision=args.precision))


@pytest.mark.parametrize(
    ("config", "precision", "named"),
    [
        ({"optimizer": {"type": "AdamW"}}, "fp32", "the optimizer section of ds.json"),
        ({"bf16": {"enabled": True}}, "bf16", "bf16.enabled in ds.json"),
        ({}, "fp16", "with fp16"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "fp32", "offload_optimizer in ds.json"),
        ({}, "bf16", None), ({"bf16": {"enabled": False}}, "fp32", None), ({"bf16": {"enabled": "auto"}}, "fp32", None),
    ],
)  # fmt: skip
def test_batch_parts_excludes_what_computes_differently_from_other_backends_and_nothing_else(
    config: Json, precision: str, named: str | None
) -> None:
    if named:
        assert named in one_line(check_batch_parts, config, precision, "ds.json", kind=UserMistake)
    else:
        check_batch_parts(config, precision, "ds.json")


def test_what_deepspeed_refuses_in_a_json_is_one_line_and_without_one_an_error_of_ours() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    with (
        pytest.raises(UserMistake, match=r"--deepspeed_config ds\.json: stagee: ") as raised,
        one_line_refusals("ds.json"),
    ):
        DeepSpeedZeroConfig(stagee=1)
    assert "\n" not in str(raised.value)
    with pytest.raises(AssertionError, match="Foo"), one_line_refusals(None):
        raise AssertionError("Foo is not an optimizer")
