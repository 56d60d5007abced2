"""demo:shapes for conditioned models: one shape each, what the numbers say, and what is held out."""

from __future__ import annotations

import itertools

import pytest
import torch

from data.images.embeddings import IMAGE, TEXT
from data.images.scenes import TRIPLES, Scenes, Triple, condition_of, is_held_out
from data.images.shapes import Item


def scenes(n: int = 4000, **options) -> Scenes:
    return Scenes(n, **{"image_size": 24, **options})


def triple(item: Item) -> Triple:
    return Triple(item.shape, item.colour, item.place)


def test_a_tenth_of_the_combinations_is_held_out_of_which_no_two_share_a_pair():
    held_out = [t for t in TRIPLES if is_held_out(t)]
    assert (len(TRIPLES), len(held_out)) == (8 * 8 * 9, 58)
    for a, b in itertools.combinations(held_out, 2):
        assert sum(x == y for x, y in zip(a, b, strict=True)) <= 1
    assert [len({t[i] for t in held_out}) for i in range(3)] == [8, 8, 9], "every attribute is asked for"


def test_held_out_combinations_are_never_shown_and_all_others_are():
    shown = scenes()
    seen = {triple(shown.item(i)) for i in range(len(shown))}
    assert seen == {t for t in TRIPLES if not is_held_out(t)}


def test_sentences_are_conditions():
    shown = scenes(200, image_size=16)
    for index in range(200):
        given = condition_of(shown.caption(index))
        assert torch.equal(given["image_embed"], shown.embeddings(IMAGE).load(index))
        assert torch.equal(given["text_encodings"], shown.embeddings(TEXT).load(index))
        is_dark = shown.load(index).float().median() < 128
        assert shown.background(index) == ("dark" if is_dark else "light"), index
    short, whole = condition_of("a red star top left"), condition_of("A red star top left, on light.")
    assert torch.equal(short["image_embed"], whole["image_embed"])
    for text in ("a red star", "a red star top left, on grey", "a red star top left on dark"):
        with pytest.raises(ValueError, match="is no caption of demo:shapes"):
            condition_of(text)
