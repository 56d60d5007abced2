"""Says when a contrastive run has collapsed: when its embeddings no longer tell anything apart."""

from __future__ import annotations

# A collapsed loss is flat: a few looks in a row tell it from one that falls through the value.
_LOOKS = 5
_NEAR, _AWAY = 0.01, 0.02  # of the value
_LEAST_SPREAD, _RECOVERED_SPREAD = 1e-3, 2e-3


class CollapseAlarm:
    """Watches a loss and how far the embeddings spread.

    Args:
        after_steps: Nothing is said up to this step: every run begins there. The warm-up.
    """

    def __init__(self, after_steps: int) -> None:
        self._after_steps = after_steps
        self._loss = _Condition(_LOOKS)
        self._spreads = {side: _Condition(1) for side in ("audio", "text")}

    def look(self, step: int, loss: float, collapsed: float, spread_audio: float, spread_text: float) -> str | None:
        """A warning in one line the first time that something is wrong, and again only after it had recovered.

        Args:
            step: Completed updates.
            loss: Of the step.
            collapsed: What that loss would be where every clip is equally near to every caption
                (`ContrastiveResult.collapsed`).
            spread_audio: Variance of the batch's clips, 1 - |mean unit vector|^2.
            spread_text: Of its captions.
        """
        if step <= self._after_steps:
            return None
        distance = abs(loss - collapsed)
        stuck = self._loss.begins(distance <= _NEAR * collapsed, distance > _AWAY * collapsed)
        flat = [
            (side, spread)
            for side, spread in (("audio", spread_audio), ("text", spread_text))
            if self._spreads[side].begins(spread < _LEAST_SPREAD, spread >= _RECOVERED_SPREAD)
        ]
        warnings = [self._of_spread(side, spread) for side, spread in flat]
        return "; ".join(warnings + ([self._of_loss(loss, collapsed)] if stuck else [])) or None

    @staticmethod
    def _of_loss(loss: float, collapsed: float) -> str:
        return (
            f"warning: the loss {loss:.4g} has not left {collapsed:.4g} for {_LOOKS} looks, the value at which every "
            "clip is equally near to every caption: nothing is learned. Check that captions belong to their clips and "
            "clips are not silent; try a smaller --lr, a longer warm-up or a larger batch"
        )

    @staticmethod
    def _of_spread(side: str, spread: float) -> str:
        return (
            f"warning: the {side} embeddings are almost one and the same vector (variance {spread:.2g} of at most 1), "
            f"so nothing can be told apart: the {side} side has collapsed. Check that its inputs differ; try a smaller "
            "--lr, a longer warm-up, or an earlier checkpoint"
        )


class _Condition:
    """Something that is wrong after so many bad looks in a row, and over at the first good one."""

    def __init__(self, looks: int) -> None:
        self._looks, self._in_a_row, self._said = looks, 0, False

    def begins(self, bad: bool, good: bool) -> bool:
        self._in_a_row = self._in_a_row + 1 if bad else 0
        if good:
            self._said = False
        is_news = not self._said and self._in_a_row >= self._looks
        self._said |= is_news
        return is_news
