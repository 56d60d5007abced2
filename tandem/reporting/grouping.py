"""The groups of metrics on the page."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from tandem.training.metrics.directions import COSTS, better_direction

_OPTIMISATION_WORDS = ("lr", "learning_rate", "grad_norm", "weight", "temperature", "scale", "skipped_updates", "bias",
                       "bad_samples")  # fmt: skip
NAMES = ("Validation", "Validation of the whole split", "Losses", "Other values", "Optimisation", "Costs")
ZERO = "Always 0"


def group_of(metric: str) -> str:
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


def groups(metrics: Iterable[str], zero: Container[str] = ()) -> list[dict[str, object]]:
    """[{"name", "metrics", "is_folded"}] of all metrics, each group in the order in which they were met, without empty
    ones. Those that are `zero` throughout, such as counts of faults, come last, folded."""
    members: Mapping[str, list[str]] = {name: [] for name in (*NAMES, ZERO)}
    for metric in dict.fromkeys(metrics):
        members[ZERO if metric in zero else group_of(metric)].append(metric)
    return [{"name": name, "metrics": members[name], "is_folded": name == ZERO} for name in members if members[name]]
