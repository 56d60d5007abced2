"""Warns when a run has collapsed: when its embeddings, its reconstructions or its codes no longer differ."""

from __future__ import annotations

import math
from collections.abc import Mapping

# The loss of a collapsed model stays at one value. A healthy loss may fall past that value: only several checks in a
# row tell the two apart.
_CHECKS = 5
_NEAR, _AWAY = 0.01, 0.02  # relative distance from the collapsed loss
_LEAST_VARIANCE, _RECOVERED_VARIANCE = 1e-3, 2e-3

# Every run starts with almost equal reconstructions. They may differ only after a certain sum of the learning rates,
# because Adam changes a weight by at most about the learning rate per update.
_LEAST_UPDATES, _LEAST_SUM_OF_RATES = 150, 0.05
_COLLAPSED_SHARE, _RECOVERED_SHARE = 0.01, 0.05  # variance of the reconstructions / variance of the samples
_ALIKE_PSNR = 20.0  # dB: with a higher PSNR, equal reconstructions may be right, because the samples are alike
_RISE = 1.0  # dB above the PSNR of the first validation
_FALL, _RECOVERED_FALL = 6.0, 3.0  # dB below the highest PSNR; 6 dB are four times the squared error
_FEW_CODES, _MANY_CODES = 0.05, 0.2  # fractions of the largest number of codes that a batch has used
_DISCR_WINS, _DISCR_ERRS = 0.02, 0.2  # losses of the discriminator; one that guesses has 2 (hinge) or 1.4 (bce)


class CollapseAlarm:
    """Checks the loss and the variance of the embeddings. The first `after_steps` updates are not checked, because
    embeddings are nearly equal at the start of every run."""

    def __init__(self, after_steps: int) -> None:
        self._after_steps = after_steps
        self._loss = _Fault(_CHECKS)
        self._variances = {side: _Fault(1) for side in ("audio", "text")}

    def check(self, step: int, line: Mapping[str, float]) -> list[str]:
        """Warnings, in one line each, when a collapse begins; the next one only after the run had recovered.

        Args:
            step: Completed updates.
            line: Metrics by name (`contrastive.ContrastiveResult`): `loss`, `collapsed_loss`, `audio_variance` and
                `text_variance`.
        """
        if step <= self._after_steps or "collapsed_loss" not in line:  # a line that has only a validation
            return []
        loss, collapsed = line["loss"], line["collapsed_loss"]
        warnings = []
        for side, fault in self._variances.items():
            variance = line[f"{side}_variance"]
            if fault.begins(variance < _LEAST_VARIANCE, variance >= _RECOVERED_VARIANCE):
                warnings.append(
                    f"warning: the {side} embeddings are almost one and the same vector (variance {variance:.2g} of at "
                    f"most 1): the {side} side has collapsed. Check that its inputs differ; try a smaller "
                    "--learning_rate, a longer warm-up, or an earlier checkpoint"
                )
        distance = abs(loss - collapsed)
        if self._loss.begins(distance <= _NEAR * collapsed, distance > _AWAY * collapsed):
            warnings.append(
                f"warning: the loss {loss:.4g} has stayed for {_CHECKS} checks at {collapsed:.4g}, its value if every "
                "clip is equally near to every caption: nothing is learned. Check that captions belong to their clips "
                "and that clips are not silent; try a smaller --learning_rate, a longer warm-up or a larger batch"
            )
        return warnings


class ReconstructionAlarm:
    """Checks the lines of metrics of an autoencoder's training. It has only the lines since the start of the process,
    so after a resume it may repeat a warning once.

    Args:
        remedy: The advice if reconstructions are alike or poor and there is no discriminator.
        codes_remedy: The advice if only a few codes are used.
    """

    def __init__(
        self,
        remedy: str = "a higher or a lower --learning_rate",
        codes_remedy: str = "another --quantizer, a larger --entropy_loss_weight or a smaller --learning_rate",
    ) -> None:
        self._remedy, self._codes_remedy = remedy, codes_remedy
        self._step, self._updates, self._rate, self._sum_of_rates = 0, 0, 0.0, 0.0
        self._first_psnr, self._best_psnr, self._has_discriminator = math.nan, -math.inf, False
        self._codes_metric, self._most_codes = "valid/codes_used", 0.0
        self._alike, self._poor = _Fault(2), _Fault(_CHECKS)  # validations are fewer than lines
        self._few, self._discriminator = _Fault(2 * _CHECKS), _Fault(4 * _CHECKS)

    def check(self, step: int, line: Mapping[str, float]) -> list[str]:
        """Warnings, in one line each, when a fault begins; the next one only after the run had recovered from it.

        Args:
            step: Completed updates.
            line: Metrics of all processes by name: `lr`, `codes_used` of a batch, `discr_loss`, and of the validation
                split `valid/psnr` in dB, `valid/codes_used`, and `valid/variance_kept` and `valid/explained_variance`
                (`tandem.training.metrics.reconstruction.ReconstructedVariance`). Missing metrics are not checked.
        """
        updates = step - self._step if self._step else 0  # the first line may be that of a resumed run
        self._step, self._updates, self._rate = step, self._updates + updates, line.get("lr", self._rate)
        self._sum_of_rates += updates * self._rate
        self._has_discriminator |= "discr_loss" in line
        has_had_time = self._updates >= _LEAST_UPDATES and self._sum_of_rates >= _LEAST_SUM_OF_RATES
        checks = (self._check_validation, self._check_codes, self._check_discriminator)
        return [f"warning: {text}" for check in checks for text in check(line, has_had_time)]

    def _check_validation(self, line: Mapping[str, float], has_had_time: bool) -> list[str]:
        if "valid/psnr" not in line:
            return []
        names = ("psnr", "variance_kept", "explained_variance")
        psnr, variance_kept, explained = (line[f"valid/{name}"] for name in names)
        self._first_psnr = psnr if math.isnan(self._first_psnr) else self._first_psnr
        self._best_psnr = max(self._best_psnr, psnr)
        fall, samples_differ, warnings = self._best_psnr - psnr, psnr < _ALIKE_PSNR, []
        remedy = "a smaller --gan_weight_scale or --penalty_weight" if self._has_discriminator else self._remedy
        are_alike = variance_kept < _COLLAPSED_SHARE and samples_differ
        if self._alike.begins(are_alike, variance_kept >= _RECOVERED_SHARE or not samples_differ, has_had_time):
            warnings.append(
                f"all samples get almost the same reconstruction ({psnr:.1f} dB, {100 * variance_kept:.2g}% of the "
                f"samples' variance): the model has collapsed. Try {remedy}"
            )
        # A low PSNR that rises is no collapse, nor is a high one that no longer rises, as at the end of a long run.
        has_risen = psnr >= self._first_psnr + _RISE
        is_poor = not are_alike and ((explained <= 0 and samples_differ and not has_risen) or fall > _FALL)
        if self._poor.begins(is_poor, (explained > 0 or has_risen) and fall < _RECOVERED_FALL, has_had_time):
            note = f"{fall:.1f} dB below its best" if fall > _FALL else "no better than one mean picture of all samples"
            warnings.append(f"the PSNR of {_CHECKS} validations does not rise: {psnr:.1f} dB, {note}. Try {remedy}")
        return warnings

    def _check_codes(self, line: Mapping[str, float], has_had_time: bool) -> list[str]:
        if "codes_used" in line and self._codes_metric != "codes_used":
            # If a script logs the codes of batches, count those: they have more lines.
            self._codes_metric, self._most_codes = "codes_used", 0.0
        if self._codes_metric not in line:
            return []
        is_of_batch = self._codes_metric == "codes_used"
        codes, subject = line[self._codes_metric], "a batch" if is_of_batch else "the validation split"
        self._most_codes = max(self._most_codes, codes)
        low, high = max(1, _FEW_CODES * self._most_codes), max(2, _MANY_CODES * self._most_codes)
        if not self._few.begins(codes <= low, codes > high, has_had_time):
            return []
        text = f"{subject} uses {codes:.0f} different codes, of {self._most_codes:.0f} at most before"
        return [f"{text}: the codes have collapsed. Try {self._codes_remedy}"]

    def _check_discriminator(self, line: Mapping[str, float], has_had_time: bool) -> list[str]:
        loss = line.get("discr_loss")
        if loss is None or not self._discriminator.begins(loss < _DISCR_WINS, loss > _DISCR_ERRS, has_had_time):
            return []
        text = f"the discriminator always wins (its loss is {loss:.2g}), and the generator learns little from it"
        return [f"{text}. Try a smaller --discr_learning_rate, or a larger --penalty_weight or --lecam_weight"]


class _Fault:
    """A fault that begins with the last of `checks` bad checks in a row, and ends at the first good one. A check may be
    neither."""

    def __init__(self, checks: int) -> None:
        self._checks, self._in_a_row, self._has_begun = checks, 0, False

    def begins(self, is_bad: bool, is_good: bool, may_begin: bool = True) -> bool:
        """Record a check; returns whether the fault begins with it."""
        self._in_a_row = self._in_a_row + 1 if is_bad else 0
        if is_good:
            self._has_begun = False
        begins = may_begin and not self._has_begun and self._in_a_row >= self._checks
        self._has_begun |= begins
        return begins
