"""The groups of metrics on the page."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from tandem.training.metrics.directions import COSTS, better_direction

_OPTIMISATION_WORDS = ("lr", "learning_rate", "grad_norm", "weight", "temperature", "scale", "skipped_updates", "bias",
                       "bad_samples")  # fmt: skip
NAMES = ("Validation", "Validation of the whole split", "Losses", "Other values", "Optimisation", "Costs")
ALWAYS_ZERO = "Always 0"


def metric_group(metric: str) -> str:
    """The group of a metric by its name, one of `NAMES`."""
    first, last = metric.split("/")[0], metric.split("/")[-1]
    if first.startswith("valid") and "/" in metric:
        return NAMES[first == "valid_whole"]
    if metric in COSTS:
        return "Costs"
    if any(last == word or last.endswith(f"_{word}") for word in _OPTIMISATION_WORDS):
        return "Optimisation"
    if better_direction(metric) == "low" or last.endswith("_loss") or last in ("kl", "commitment", "entropy"):
        return "Losses"
    return "Other values"


def groups(metrics: Iterable[str], zero_metrics: Container[str] = ()) -> list[dict[str, object]]:
    """[{"name", "metrics", "is_folded"}] of all metrics, in the given order within a group, without empty groups. The
    last group, folded on the page, holds `zero_metrics`, whose values are all 0, such as counts of faults."""
    members: Mapping[str, list[str]] = {name: [] for name in (*NAMES, ALWAYS_ZERO)}
    for metric in dict.fromkeys(metrics):
        members[ALWAYS_ZERO if metric in zero_metrics else metric_group(metric)].append(metric)
    return [
        {"name": name, "metrics": members[name], "is_folded": name == ALWAYS_ZERO} for name in members if members[name]
    ]
