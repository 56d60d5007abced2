"""Says when a contrastive run has collapsed: when its embeddings no longer tell anything apart."""

from __future__ import annotations

import math

from torch import Tensor

# A collapsed loss is flat: a few looks in a row tell it from one that falls through the value.
_LOOKS = 5
_NEAR, _AWAY = 0.01, 0.02  # of the value
_LEAST_SPREAD, _RECOVERED_SPREAD = 1e-3, 2e-3

_FORMULAS = {"softmax": "ln {n}", "decoupled": "ln({n} - 1)", "sigmoid": "{n} H(1/{n})"}


def collapsed_loss(kind: str, batch_size: int, heads: int = 1) -> float:
    """The loss, in nats, where every clip is equally near to every caption: s_ij = s for all i and j.

    - softmax: -s + logsum_j s = ln B;
    - decoupled, without the pair itself in the denominator: ln(B - 1). 512 give the 6.236 at which runs get stuck;
    - sigmoid: -log sigmoid(x) - (B - 1) log sigmoid(-x) with x = s + b, which is least where sigmoid(x) = 1 / B, the
      share of right pairs: ln B + (B - 1) ln(B / (B - 1)) = B H(1 / B), with the entropy H of a coin. About ln B + 1.
      The bias b finds that x by itself.

    Args:
        kind: "softmax", "decoupled" or "sigmoid".
        batch_size: B, over all processes, at least 2.
        heads: Losses that are added: 1 + the number of hierarchical layers.

    Raises:
        ValueError: an unknown kind, or a batch without a negative.
    """
    if kind not in _FORMULAS:
        raise ValueError(f"there is no contrastive loss {kind!r}: choose {', '.join(_FORMULAS)}")
    if batch_size < 2:
        raise ValueError(f"a batch of {batch_size} has no negatives: a contrastive loss needs at least 2")
    if kind == "softmax":
        return heads * math.log(batch_size)
    if kind == "decoupled":
        return heads * math.log(batch_size - 1)
    return heads * (math.log(batch_size) + (batch_size - 1) * math.log(batch_size / (batch_size - 1)))


def embedding_spread(vectors: Tensor) -> Tensor:
    """1 - |mean|^2 of unit vectors (n, d), which is their variance: 0-d float64, from 0 (all equal) to 1."""
    return 1 - vectors.detach().double().mean(0).square().sum()


class CollapseAlarm:
    """Watches a loss and how far the embeddings spread.

    Args:
        kind: "softmax", "decoupled" or "sigmoid".
        batch_size: Samples in the denominators: of the whole batch, over all processes.
        after_steps: Nothing is said up to this step: every run begins there. The warm-up.
        heads: Losses that are added: 1 + the number of hierarchical layers.

    Raises:
        ValueError: of `collapsed_loss`.
    """

    def __init__(self, kind: str, batch_size: int, after_steps: int, heads: int = 1) -> None:
        self._value = collapsed_loss(kind, batch_size, heads)
        self._formula = ("" if heads == 1 else f"{heads} x ") + _FORMULAS[kind].format(n=batch_size)
        self._after_steps = after_steps
        self._loss = _Condition(_LOOKS)
        self._spreads = {side: _Condition(1) for side in ("audio", "text")}

    def look(self, step: int, loss: float, spread_audio: float, spread_text: float) -> str | None:
        """A warning in one line the first time that something is wrong, and again only after it had recovered.

        Args:
            step: Completed updates.
            loss: Of the step, all heads together, without other terms.
            spread_audio: `embedding_spread` of the batch's clips.
            spread_text: Of its captions.
        """
        if step <= self._after_steps:
            return None
        distance = abs(loss - self._value)
        stuck = self._loss.begins(distance <= _NEAR * self._value, distance > _AWAY * self._value)
        flat = [
            (side, spread)
            for side, spread in (("audio", spread_audio), ("text", spread_text))
            if self._spreads[side].begins(spread < _LEAST_SPREAD, spread >= _RECOVERED_SPREAD)
        ]
        warnings = [self._of_spread(side, spread) for side, spread in flat] + ([self._of_loss(loss)] if stuck else [])
        return "; ".join(warnings) or None

    def _of_loss(self, loss: float) -> str:
        return (
            f"warning: the loss {loss:.4g} has not left {self._value:.4g} = {self._formula} for {_LOOKS} looks, the "
            "value at which every clip is equally near to every caption: nothing is learned. Check that captions "
            "belong to their clips and clips are not silent; try a smaller --lr, a longer warm-up or a larger batch"
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
