"""Whether a metric is better high or low, and whether it is a cost, by its name: for model cards and reports."""

from __future__ import annotations

import re

TIMES = ("samples_per_second", "seconds", "time")
EVALUATION_SECONDS = "evaluation_seconds"
"""Seconds of validations and pictures after an update; only their line of metrics has it."""
COSTS = (
    *TIMES, "gflop_per_sample", "tflops_per_second", "mfu", "data_seconds", "communication_seconds", "save_seconds",
    EVALUATION_SECONDS, "peak_host_memory_gb", "peak_device_memory_gb", "peak_device_memory_reserved_gb",
)  # fmt: skip
"""The metrics that differ between two runs whose losses are the same."""

FAULTS = ("skipped_updates", "bad_samples")
"""Metrics that count faults since the beginning of the run."""

# Patterns of the last part of a metric's name.
_HIGHER_IS_BETTER = re.compile(
    r"psnr\w*|ssim\w*|r[0-9]+|recall\w*|map10|top[0-9]+|accuracy|explained_variance|inception_score|clip_\w+"
)
_LOWER_IS_BETTER = re.compile(r"(\w+_)?(loss|error|nll|m[as]e|lpips|l1|l2)|r?fid|r?fvd|kid|median_rank")
# A discriminator's loss falls if the generator fails.
_NEITHER = re.compile(r"(discr|gan|lecam)_loss")


def better_direction(metric: str) -> str:
    """ "high" or "low": which values of this metric are better; "" if that is not known."""
    name = metric.split("/")[-1].lower()
    if _NEITHER.fullmatch(name):
        return ""
    return "high" if _HIGHER_IS_BETTER.fullmatch(name) else "low" if _LOWER_IS_BETTER.fullmatch(name) else ""
