"""The metrics of the five scripts stand in groups, with the better end where it is known."""

from __future__ import annotations

import pytest

from tandem.reporting.page import metric_group
from tandem.training.metrics.directions import better_direction as direction


@pytest.mark.parametrize(
    ("metric", "group", "better"),
    [
        ("valid/ema_0.05/psnr", "Validation", "high"),
        ("valid_whole/text_to_audio/r10", "Validation of the whole split", "high"),
        ("valid/codes_used", "Validation", ""),
        ("unet2/fid", "Losses", "low"),
        ("unet2/grad_norm", "Optimisation", ""),
        ("codes_used", "Other values", ""),
        ("samples_per_second", "Costs", ""),
    ],
)
def test_a_metric_has_its_group_and_its_better_end(metric: str, group: str, better: str) -> None:
    assert metric_group(metric) == group
    assert group in ("Optimisation", "Costs") or direction(metric) == better
