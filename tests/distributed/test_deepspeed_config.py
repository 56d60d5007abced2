"""A DeepSpeed JSON and the command line: what fills what, what contradicts what, and what DeepSpeed is given."""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed import UserMistake
from distributed.backends.deepspeed.config import check_for_parts, merge, read_config, refusals, resolve

Parsed = Callable[..., argparse.Namespace]
Json = dict[str, Any]


@pytest.fixture
def merged(parsed: Parsed) -> Callable[..., argparse.Namespace]:
    """Arguments after ``config`` was merged in; ``said`` was said on the command line."""

    def merge_into(config: Json, *, world_size: int = 2, **said: Any) -> argparse.Namespace:
        args = parsed("--deepspeed_config", "ds.json", **said, explicit=frozenset(said))
        merge(args, config, world_size)
        return args

    return merge_into


def resolved(config: Json, **overrides: Any) -> Json:
    values: dict[str, Any] = {
        "world_size": 2, "global_batch_size": 24, "zero_stage": 2, "precision": "fp32", "max_grad_norm": 0.5,
        "learning_rate": 0.125, "parameter_count": 1000, "on_cpu": True,
    }  # fmt: skip
    return resolve(config, **{**values, **overrides})


# A JSON fills what the command line leaves at its default.


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_batch_size": 32}, {"batch_size": 32, "grad_accum_steps": 1}),
        ({"train_micro_batch_size_per_gpu": 4}, {"batch_size": 8, "grad_accum_steps": 1}),
        ({"gradient_accumulation_steps": 3}, {"batch_size": 12, "grad_accum_steps": 3}),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            {"batch_size": 24, "grad_accum_steps": 3},
        ),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            {"batch_size": 24, "grad_accum_steps": 3},
        ),
        ({"gradient_clipping": 0.25}, {"max_grad_norm": 0.25}),
        ({"gradient_clipping": 1}, {"max_grad_norm": 1}),
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {"precision": "fp16"}),
        ({"fp16": {"enabled": False}}, {"precision": "fp32"}),
        ({"optimizer": {"type": "Adam", "params": {"lr": 0.02}}}, {"learning_rate": 0.02}),
        ({"zero_optimization": {"stage": 3}}, {"zero_stage": 3}),
        ({"zero_optimization": {"overlap_comm": True}}, {"zero_stage": 0}),
        ({}, {"batch_size": 12, "grad_accum_steps": 1, "max_grad_norm": 0.0, "precision": "fp32", "zero_stage": 0}),
    ],
    ids=json.dumps,
)
def test_the_json_fills_what_was_left_at_its_default(config: Json, expected: Json, merged: Any) -> None:
    args = merged(config)
    assert {flag: getattr(args, flag) for flag in expected} == expected


def test_accumulation_follows_from_batch_size_and_micro_batch_size_as_in_deepspeed(merged: Any) -> None:
    config = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    assert merged(config).grad_accum_steps == 4  # 32 / (4 x 2 processes)
    args = merged({"train_micro_batch_size_per_gpu": 4}, batch_size=24)
    assert (args.batch_size, args.grad_accum_steps) == (24, 3)


AUTO: Json = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "steps_per_print": "auto", "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale_window": "auto"}, "amp": {"enabled": "auto", "opt_level": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": 0.01}},
    "zero_optimization": {
        "stage": "auto", "reduce_bucket_size": "auto", "allgather_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "offload_optimizer": {"device": "none", "pin_memory": "auto"},
    },
}  # fmt: skip


def test_auto_says_nothing(merged: Any, parsed: Parsed) -> None:
    before = parsed("--deepspeed_config", "ds.json")
    assert vars(merged(AUTO)) == vars(before)
    said = {"batch_size": 6, "grad_accum_steps": 3, "max_grad_norm": 0.5, "precision": "fp16", "zero_stage": 1}
    args = merged(AUTO, **said)
    assert {flag: getattr(args, flag) for flag in said} == said


def test_the_same_value_in_both_places_is_no_contradiction(merged: Any) -> None:
    config = {
        "train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
    }  # fmt: skip
    said = {"batch_size": 24, "grad_accum_steps": 3, "max_grad_norm": 0.5, "precision": "bf16", "zero_stage": 1}
    args = merged(config, **said, learning_rate=0.02)
    assert {flag: getattr(args, flag) for flag in said} == said


# Both were said and disagree: one line that names both.


@pytest.mark.parametrize(
    ("said", "config", "names"),
    [
        ({"batch_size": 8}, {"train_batch_size": 16}, ["--batch_size 8", "train_batch_size: 16"]),
        (
            {"batch_size": 8},
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            ["--batch_size 8", "train_micro_batch_size_per_gpu", "4 x 2 x 2 processes", "16"],
        ),
        (
            {"batch_size": 8, "grad_accum_steps": 1},
            {"train_micro_batch_size_per_gpu": 2},
            ["--batch_size 8", "train_micro_batch_size_per_gpu", "2 x 1 x 2 processes", "4"],
        ),
        (
            {"batch_size": 8},
            {"train_micro_batch_size_per_gpu": 3},
            ["--batch_size 8", "train_micro_batch_size_per_gpu"],
        ),
        (
            {"grad_accum_steps": 2},
            {"gradient_accumulation_steps": 4},
            ["--grad_accum_steps 2", "gradient_accumulation_steps: 4"],
        ),
        ({"max_grad_norm": 0.5}, {"gradient_clipping": 1.0}, ["--max_grad_norm 0.5", "gradient_clipping: 1.0"]),
        ({"max_grad_norm": 0.5}, {"gradient_clipping": 0}, ["--max_grad_norm 0.5", "gradient_clipping: 0"]),
        ({"precision": "bf16"}, {"fp16": {"enabled": True}}, ["--precision bf16", "fp16.enabled"]),
        ({"precision": "fp32"}, {"bf16": {"enabled": True}}, ["--precision fp32", "bf16.enabled"]),
        ({"precision": "fp16"}, {"fp16": {"enabled": False}}, ["--precision fp16", "fp16.enabled"]),
        ({}, {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16.enabled", "bf16.enabled"]),
        (
            {"learning_rate": 0.001},
            {"optimizer": {"type": "Adam", "params": {"lr": 0.02}}},
            ["--learning_rate 0.001", "optimizer.params.lr: 0.02"],
        ),
        ({"zero_stage": 1}, {"zero_optimization": {"stage": 2}}, ["--zero_stage 1", "zero_optimization.stage: 2"]),
        (
            {},
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            ["train_batch_size: 32", "train_micro_batch_size_per_gpu", "4 x 2 x 2 processes", "16"],
        ),
    ],
    ids=str,
)
def test_a_contradiction_is_one_line_that_names_both(said: Json, config: Json, names: list[str], merged: Any) -> None:
    with pytest.raises(UserMistake) as raised:
        merged(config, **said)
    text = str(raised.value)
    assert all(name in text for name in [*names, "ds.json"]), text
    assert "\n" not in text


# What is no configuration at all.


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"train_batch_size": "8"}, "train_batch_size"),
        ({"train_batch_size": 8.5}, "train_batch_size"),
        ({"train_batch_size": True}, "train_batch_size"),
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"train_batch_size": [8]}, "train_batch_size"),
        ({"train_micro_batch_size_per_gpu": "4"}, "train_micro_batch_size_per_gpu"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping"),
        ({"gradient_clipping": -1.0}, "gradient_clipping"),
        ({"gradient_clipping": True}, "gradient_clipping"),
        ({"bf16": {"enabled": "true"}}, "bf16.enabled"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, "optimizer.params.lr"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 1.5}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage"),
        ({"zero_optimization": 2}, "zero_optimization"),
        ({"bf16": True}, "bf16"),
        ({"fp16": []}, "fp16"),
        ({"optimizer": "Adam"}, "optimizer"),
        ({"optimizer": {"type": "Adam", "params": 1e-3}}, "params"),
        ({"optimizer": {}}, "optimizer"),
        ({"scheduler": "WarmupLR"}, "scheduler"),
    ],
    ids=json.dumps,
)
def test_a_value_of_the_wrong_kind_is_one_line_that_names_it(config: Json, key: str, merged: Any) -> None:
    with pytest.raises(UserMistake) as raised:
        merged(config)
    assert key in str(raised.value) and "ds.json" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not JSON"),
        (b"{]", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"gradient_clipping": NaN}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "holds a list"),
        (b"null", "NoneType"),
        (b'{"train_batch_size": 8, "train_batch_size": 16}', "'train_batch_size' is there twice"),
        (b'{"bf16": {"enabled": true, "enabled": false}}', "'enabled' is there twice"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused_in_one_line(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(UserMistake) as raised:
        read_config(str(path))
    assert expected in str(raised.value) and str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match="No such file"):
        read_config(str(tmp_path / "nowhere.json"))
    with pytest.raises(UserMistake, match="directory"):
        read_config(str(tmp_path))


# What DeepSpeed is given.


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("on_cpu", [True, False])
def test_no_auto_is_left_at_any_depth(on_cpu: bool) -> None:
    assert "auto" not in strings(resolved(AUTO, on_cpu=on_cpu))


def test_the_callers_config_stays_as_it_is() -> None:
    config = copy.deepcopy(AUTO)
    resolved(config)
    assert config == AUTO


def test_deepspeed_makes_one_step_per_update_and_never_accumulates() -> None:
    full = resolved({"gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 4})
    assert full["train_batch_size"] == 24
    assert full["train_micro_batch_size_per_gpu"] == 12
    assert full["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
def test_clipping_is_always_explicit(max_grad_norm: float) -> None:
    assert resolved({}, max_grad_norm=max_grad_norm)["gradient_clipping"] == max_grad_norm


@pytest.mark.parametrize("type_", ["Adam", "AdamW", "adamw"])
@pytest.mark.parametrize("params", [{}, {"params": {"lr": 0.1}}, {"params": {"adam_w_mode": False}}], ids=str)
def test_adam_w_mode_is_always_explicit(type_: str, params: Json) -> None:
    given = params.get("params", {})
    for on_cpu in (True, False):
        used = resolved({"optimizer": {"type": type_, **params}}, on_cpu=on_cpu)["optimizer"]["params"]
        assert used["adam_w_mode"] == given.get("adam_w_mode", True)
        assert used["lr"] == given.get("lr", 0.125)  # the script's, where the JSON names none


@pytest.mark.parametrize("type_", ["Adam", "AdamW"])
def test_weight_decay_is_explicit_because_deepspeeds_kernel_and_torchs_have_other_defaults(type_: str) -> None:
    for on_cpu in (True, False):
        assert resolved({"optimizer": {"type": type_}}, on_cpu=on_cpu)["optimizer"]["params"]["weight_decay"] == 0.0
        said = {"optimizer": {"type": type_, "params": {"weight_decay": 0.1}}}
        assert resolved(said, on_cpu=on_cpu)["optimizer"]["params"]["weight_decay"] == 0.1


def test_other_optimizers_get_no_adam_switches() -> None:
    assert resolved({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})["optimizer"]["params"] == {"lr": 0.1}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_stage_is_the_merged_one(stage: int) -> None:
    assert resolved({"zero_optimization": {"stage": "auto"}}, zero_stage=stage)["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize(("count", "expected"), [(1, 128), (128, 128), (129, 256), (10**10, 500_000_000)])
def test_buckets_are_no_larger_than_the_model_and_aligned(count: int, expected: int) -> None:
    zero = resolved({}, parameter_count=count)["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == expected
    assert expected % 128 == 0


def test_buckets_and_other_settings_that_were_said_are_kept() -> None:
    config = {
        "zero_optimization": {"reduce_bucket_size": 777, "round_robin_gradients": True},
        "wall_clock_breakdown": True,
    }
    full = resolved(config)
    assert full["zero_optimization"]["reduce_bucket_size"] == 777
    assert full["zero_optimization"]["round_robin_gradients"] is True
    assert full["wall_clock_breakdown"] is True


@pytest.mark.parametrize(("precision", "fp16"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_fp16_weights_follow_the_precision_and_bf16_weights_the_json(precision: str, fp16: bool) -> None:
    full = resolved({}, precision=precision)
    assert full["fp16"]["enabled"] is fp16 and full["bf16"]["enabled"] is False
    assert resolved({"bf16": {"enabled": True}}, precision="bf16")["bf16"]["enabled"] is True


def test_the_configurations_in_the_repository_are_complete_and_fit_together(merged: Any) -> None:
    folder = Path(__file__).resolve().parents[2] / "configs" / "deepspeed"
    stages = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero2_offload": 2, "bf16": 2}
    assert {path.stem for path in folder.glob("*.json")} == set(stages)
    for name, stage in stages.items():
        config = read_config(str(folder / f"{name}.json"))
        args = merged(config)
        assert args.zero_stage == stage
        assert args.precision == ("bf16" if name == "bf16" else "fp32")
        assert "auto" not in strings(resolved(config, zero_stage=stage, precision=args.precision))


@pytest.mark.parametrize(
    ("config", "precision", "named"),
    [
        ({"optimizer": {"type": "AdamW"}}, "fp32", "the optimizer section of ds.json"),
        ({"bf16": {"enabled": True}}, "bf16", "bf16.enabled in ds.json"),
        ({}, "fp16", "with fp16"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "fp32", "offload_optimizer in ds.json"),
    ],
)
def test_what_would_compute_otherwise_is_no_company_for_batch_parts(config: Json, precision: str, named: str) -> None:
    with pytest.raises(UserMistake, match=re.escape(named)):
        check_for_parts(config, precision, "ds.json")


@pytest.mark.parametrize("config", [{}, {"zero_optimization": {"stage": 3}}, {"bf16": {"enabled": False}}])
def test_batch_parts_goes_with_any_stage_and_with_bf16_around_fp32_weights(config: Json) -> None:
    check_for_parts(config, "fp32", "ds.json")
    check_for_parts(config, "bf16", "ds.json")


# What DeepSpeed itself would pass over, or meet with a page of text.


@pytest.mark.parametrize(
    ("key", "meant"), [("zero_optimizatoin", "zero_optimization"), ("bfloat16", ""), ("fp 16", "fp16")]
)
def test_a_key_that_is_nearly_right_is_refused_and_another_is_left_to_deepspeed(
    key: str, meant: str, tmp_path: Path
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({key: {}, "of_the_future": 1}))
    if meant:
        with pytest.raises(UserMistake, match=f"^{key} in {path} is not a key .* did you mean {meant}\\?$"):
            read_config(str(path))
    else:
        assert read_config(str(path)) == {key: {}, "of_the_future": 1}


@pytest.mark.parametrize("path", sorted(Path("configs/deepspeed").glob("*.json")), ids=lambda path: path.name)
def test_every_key_of_the_published_files_is_known(path: Path) -> None:
    read_config(str(path))


def test_what_deepspeed_refuses_in_a_json_is_one_line_and_without_one_an_error_of_ours() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    said = r"^DeepSpeed refuses --deepspeed_config ds\.json: stagee: Extra inputs"
    with pytest.raises(UserMistake, match=said), refusals("ds.json"):
        DeepSpeedZeroConfig(stagee=1)
    with pytest.raises(AssertionError, match="Foo"), refusals(None):
        raise AssertionError("Foo is not an optimizer")
