"""demo:shapes for conditioned models: one shape each, what the numbers say, and what is held out."""

from __future__ import annotations

import itertools

import pytest
import torch

from data.images.embeddings import IMAGE, TEXT
from data.images.scenes import TRIPLES, Scenes, Triple, attributes, condition_of, is_held_out
from data.images.shapes import COLOURS, PLACES, SHAPES, SIZES, Item

BACKGROUNDS = ["dark", "light"]


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
    unseen = shown.held_out(1000)
    assert {triple(unseen.item(i)) for i in range(1000)} == {t for t in TRIPLES if is_held_out(t)}
    assert unseen.load(3).shape == (3, 24, 24) and unseen.embeddings(IMAGE).load(3).sum() == 5


def test_embeddings_say_where_which_shape_of_which_colour_and_size_is():
    item = Item("ring", "cyan", "large", "in the centre", 0.5, 0.5, 0.2, 0.0)
    tables = (PLACES, "in the centre"), (SHAPES, "ring"), (COLOURS, "cyan"), (SIZES, "large"), (BACKGROUNDS, "light")
    parts = attributes(item, "light").split([9, 8, 8, 3, 2])
    for (table, name), part in zip(tables, parts, strict=True):
        assert part.sum() == 1 and part[list(table).index(name)] == 1
    elsewhere = attributes(Item("ring", "cyan", "large", "top left", 0.25, 0.25, 0.17, 0.0), "light")
    assert torch.equal(elsewhere[9:], attributes(item, "light")[9:]), "what is somewhere does not depend on where it is"


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


def test_a_picture_shows_its_item_alone():
    """Beside the background of the same scene nothing differs but the shape, which is where the item says."""
    shown = scenes(30, image_size=32)
    for index in range(30):
        item, picture = shown.item(index), shown.load(index).float()
        colour = torch.tensor(COLOURS[item.colour])[:, None, None]
        near = ((picture - colour).abs().amax(0) < 25).nonzero().float()
        centre = (near.mean(0) + 0.5) / 32
        assert len(near) > 3
        # A crescent's mass lies 0.3 radii beside its middle; the largest radius is 0.224.
        assert (centre - torch.tensor([item.y, item.x])).abs().max() < 0.08, str(item)
