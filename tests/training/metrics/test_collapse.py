"""The alarm rings for a collapsed run, once, and for no other."""

import math

import pytest

from tandem.training.metrics.collapse import CollapseAlarm, ReconstructionAlarm


def said(alarm: CollapseAlarm, losses: list[float], value: float, first_step: int = 1001, **variances: float) -> list:
    others = {"collapsed_loss": value, "audio_variance": 0.6, "text_variance": 0.5, **variances}
    lines = enumerate({"loss": loss, **others} for loss in losses)
    return [text for i, line in lines for text in alarm.check(first_step + 10 * i, line)]


def test_loss_stuck_at_6_236_is_told():
    # musiclm-pytorch, issue 68: 512 pairs, ln 511
    (warning,) = said(CollapseAlarm(after_steps=1000), [6.236] * 20, math.log(511))
    assert "6.236" in warning and "nothing is learned" in warning and "--learning_rate" in warning
    assert "\n" not in warning


def test_a_healthy_run_whose_loss_falls_through_the_value_is_not_warned():
    value = math.log(63)
    losses = [1.3 * value * math.exp(-step / 80) + 0.3 + 0.02 * math.sin(7 * step) for step in range(400)]
    assert min(abs(loss - value) for loss in losses) < 0.01 * value
    assert not said(CollapseAlarm(after_steps=0), losses, value)


def test_a_loss_that_swings_about_the_value_or_is_no_number_is_no_collapse():
    value = math.log(63)
    assert not said(CollapseAlarm(after_steps=0), [value * (1 + 0.03 * (-1) ** i) for i in range(50)], value)
    assert not said(CollapseAlarm(after_steps=0), [value, value, value, value, value * 0.97] * 10, value)
    nothing = {"audio_variance": math.nan, "text_variance": math.nan}
    assert not said(CollapseAlarm(after_steps=0), [math.nan] * 10, value, **nothing)


def test_nothing_is_said_during_the_warm_up():
    alarm = CollapseAlarm(after_steps=1000)
    assert not said(alarm, [math.log(64)] * 100, math.log(64), first_step=1, audio_variance=0.0)
    assert not said(alarm, [math.log(64)] * 3, math.log(64), first_step=1001), "earlier checks do not count"
    assert len(said(alarm, [math.log(64)] * 30, math.log(64), first_step=1031)) == 1


def test_it_is_said_once_and_again_only_after_it_recovered():
    alarm, value = CollapseAlarm(after_steps=0), math.log(64)
    assert len(said(alarm, [value] * 100, value)) == 1
    assert not said(alarm, [value * 0.985] + [value] * 100, value), "just outside is no recovery"
    assert not said(alarm, [math.nan] + [value] * 100, value)
    assert not said(alarm, [value / 2], value)
    assert len(said(alarm, [value] * 100, value)) == 1


@pytest.mark.parametrize("side", ["audio", "text"])
def test_embeddings_that_are_all_the_same_are_said_of_their_side(side):
    alarm = CollapseAlarm(after_steps=0)
    (warning,) = said(alarm, [1.0] * 10, 4.0, **{f"{side}_variance": 1e-5})
    other = {"audio": "text", "text": "audio"}[side]
    assert f"the {side} side has collapsed" in warning and f"the {other} side" not in warning and "1e-05" in warning
    assert not said(alarm, [1.0], 4.0, **{f"{side}_variance": 1.5e-3})
    assert not said(alarm, [1.0], 4.0, **{f"{side}_variance": 1e-5}), "it had not recovered"
    assert not said(alarm, [1.0], 4.0)
    assert len(said(alarm, [1.0], 4.0, **{f"{side}_variance": 1e-5})) == 1
    assert len(said(alarm, [1.0], 4.0, **{f"{other}_variance": 1e-5})) == 1


# Reconstructions.


def validation(psnr: float = 15.0, kept: float = 0.7, explained: float = 0.5, **more: float) -> dict[str, float]:
    of_validation = {"psnr": psnr, "variance_kept": kept, "explained_variance": explained, **more}
    return {f"valid/{name}": value for name, value in of_validation.items()}


def told(
    lines: list[dict[str, float]], every: int = 100, lr: float = 3e-4, alarm: ReconstructionAlarm | None = None,
    first_step: int = 0,
) -> list[tuple[int, str]]:  # fmt: skip
    """Warnings and their updates. There is one of the lines every so many updates, and one of `lr` every ten."""
    alarm, found = alarm or ReconstructionAlarm(), []
    for step in range(1, len(lines) * every + 1):
        line = {"lr": lr} if step % 10 == 0 else {}
        line |= lines[step // every - 1] if step % every == 0 else {}
        if line:
            found += [(first_step + step, text) for text in alarm.check(first_step + step, line)]
    return found


COLLAPSED = validation(9.4, 4e-5, -1.2)
CRITIC = {"discr_loss": 2.4}


def test_one_reconstruction_of_all_samples_is_told_once_with_what_to_try():
    ((step, warning),) = told([COLLAPSED | CRITIC] * 30)
    assert step == 200, "after two validations"
    assert warning.startswith("warning: ") and "(9.4 dB, 0.004% of" in warning
    assert "--gan_weight_scale" in warning and "\n" not in warning
    ((_, warning),) = told([COLLAPSED] * 30)
    assert "--learning_rate" in warning and "--gan_weight_scale" not in warning, "there is no discriminator yet"
    ((_, warning),) = told([COLLAPSED] * 30, alarm=ReconstructionAlarm("a smaller --kl_loss_weight"))
    assert "a smaller --kl_loss_weight" in warning


def test_a_run_that_starts_with_one_reconstruction_and_then_learns_is_not_warned():
    # 4 codes per image of photographs, every 25 updates; with a discriminator from the fifth on, without, and at a rate
    # so small that 3000 updates are as many as 300.
    kept, explained = (0, 0, 2e-5, 0.0075, 0.21, 0.36, 0.57, 0.52), (-2.3, -0.3, -0.1, 0.04, 0.29, 0.25, 0.49, 0.45)
    lines = [validation(9 + n, k, e) for n, (k, e) in enumerate(zip(kept, explained, strict=True))]
    for more in ({}, {"discr_loss": 1.0}):
        assert not told([line | more for line in lines], every=25)
    assert not told([line for line in lines for _ in range(10)], every=25, lr=3e-5)


def test_nothing_is_said_before_150_updates_or_before_the_learning_rates_add_up():
    dead = COLLAPSED | {"codes_used": 1.0, "discr_loss": 0.0}
    assert not told([dead] * 14, every=10, lr=1.0)
    assert not told([dead] * 49, lr=1e-5)
    assert min(step for step, _ in told([dead] * 60, lr=1e-5)) == 5100, "0.05 / 1e-5 updates and the first line"


def test_it_is_told_again_only_after_the_reconstructions_differed():
    alarm = ReconstructionAlarm()
    assert len(told([COLLAPSED] * 10, alarm=alarm)) == 1
    assert not told([validation(12, 0.03, 0.1)] * 4 + [COLLAPSED] * 4, alarm=alarm, first_step=1000), "just outside"
    assert len(told([validation()] + [COLLAPSED] * 4, alarm=alarm, first_step=2000)) == 1


def test_a_psnr_that_stays_below_that_of_one_mean_picture_is_told_once():
    ((step, warning),) = told([validation(9.0, 0.5, -0.3)] * 20)
    assert step == 500 and "9.0 dB" in warning and "one mean picture" in warning
    assert not told([*[validation(9.0, 0.5, -0.3)] * 4, validation(9.5, 0.5, 0.1)] * 5)
    # Clips that hardly differ, while the model learns what they have in common.
    rising = (14.8, 16.7, 17.1, 17.8, 16.3, 18.0, 18.2)
    assert not told([validation(psnr, 2.0, -3.0) for psnr in rising] + [validation(18.2, 2.0, -3.0)] * 20)


def test_a_psnr_that_falls_to_four_times_the_error_and_stays_there_is_told_once():
    ((step, warning),) = told([validation(22.0)] * 5 + [validation(15.5)] * 20)
    assert step == 1000 and "15.5 dB, 6.5 dB below" in warning
    assert not told([validation(22.0)] * 5 + [validation(17.0)] * 20), "a discriminator costs some decibels"
    assert not told([validation(22.0)] * 3 + [validation(15.0)] * 4 + [validation(22.0)] * 9)
    assert not told([validation(22.0)] * 100), "a run that is trained to its end does not rise either"


def test_codes_that_fall_to_a_few_are_told_once():
    before, after = {"codes_used": 400.0}, {"codes_used": 12.0}
    ((step, warning),) = told([before] * 10 + [after] * 40, every=10)
    assert step == 200 and "12 different codes, of 400 " in warning
    assert "--quantizer" in warning
    assert not told([before] * 10 + [{"codes_used": 40.0}] * 40, every=10)
    assert not told([{"codes_used": 4.0}] * 40, every=10), "a batch of four patches has no more"
    assert len(told([{"codes_used": 1.0}] * 40, every=10)) == 1


def test_a_discriminator_that_always_wins_is_told_once():
    ((step, warning),) = told([{"discr_loss": 0.01}] * 50, every=10)
    assert step == 200 and "its loss is 0.01" in warning
    assert "--discr_learning_rate" in warning
    assert not told(([{"discr_loss": 0.0}] * 19 + [{"discr_loss": 0.1}]) * 5, every=10)
    both = [line for _ in range(20) for line in ({"discr_loss": 0.0}, validation())]
    assert len(told(both, every=10)) == 1, "lines without it do not count"
