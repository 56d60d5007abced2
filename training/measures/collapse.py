"""Warns when a contrastive run has collapsed: when its embeddings no longer tell anything apart."""

from __future__ import annotations

# A collapsed loss stays the same. Several checks in a row distinguish it from a falling loss that passes this value.
_CHECKS = 5
_NEAR, _AWAY = 0.01, 0.02  # relative distance from the collapsed loss
_LEAST_VARIANCE, _RECOVERED_VARIANCE = 1e-3, 2e-3


class CollapseAlarm:
    """Watches the loss and the variance of the embeddings. It ignores the first `after_steps` updates, because
    embeddings are nearly equal at the start of every run."""

    def __init__(self, after_steps: int) -> None:
        self._after_steps = after_steps
        self._loss = _Condition(_CHECKS)
        self._variances = {side: _Condition(1) for side in ("audio", "text")}

    def check(
        self, step: int, loss: float, collapsed: float, audio_variance: float, text_variance: float
    ) -> str | None:
        """A warning in one line when a collapse is first seen, and again only after the run had recovered.

        Args:
            collapsed: Value of the loss if all clips are equally near to all captions (`ContrastiveResult.collapsed`).
            audio_variance: Variance of the batch's audio embeddings, 1 - |mean unit vector|^2.
            text_variance: Variance of the batch's text embeddings.
        """
        if step <= self._after_steps:
            return None
        warnings = [
            f"warning: the {side} embeddings are almost one and the same vector (variance {variance:.2g} of at most "
            f"1): the {side} side has collapsed. Check that its inputs differ; try a smaller --lr, a longer warm-up, "
            "or an earlier checkpoint"
            for side, variance in (("audio", audio_variance), ("text", text_variance))
            if self._variances[side].begins(variance < _LEAST_VARIANCE, variance >= _RECOVERED_VARIANCE)
        ]
        distance = abs(loss - collapsed)
        if self._loss.begins(distance <= _NEAR * collapsed, distance > _AWAY * collapsed):
            warnings.append(
                f"warning: the loss {loss:.4g} has stayed for {_CHECKS} checks at {collapsed:.4g}, its value if every "
                "clip is equally near to every caption: nothing is learned. Check that captions belong to their clips "
                "and that clips are not silent; try a smaller --lr, a longer warm-up or a larger batch"
            )
        return "; ".join(warnings) or None


class _Condition:
    """Begins after a number of bad checks in a row, and ends at the first good one."""

    def __init__(self, checks: int) -> None:
        self._checks, self._in_a_row, self._has_begun = checks, 0, False

    def begins(self, bad: bool, good: bool) -> bool:
        self._in_a_row = self._in_a_row + 1 if bad else 0
        if good:
            self._has_begun = False
        begins = not self._has_begun and self._in_a_row >= self._checks
        self._has_begun |= begins
        return begins
