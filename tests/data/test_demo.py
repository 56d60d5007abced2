"""The demonstrations: they are what their captions say, the same everywhere, and their names are checked."""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.data.sources.demo.pictures import TRIPLES, condition_of, is_held_out
from tandem.data.sources.demo.shapes import COLOURS, POSITIONS, SHAPES, SIZES
from tandem.data.sources.demo.source import DemoSource, open_demo
from tandem.data.sources.demo.tones import HERTZ, LOUDEST_OVER_SOFTEST, PITCHES
from tests.data.helpers import one_line
from tests.processes import python

DRAWN = {
    "shapes": ("image", 16, 4), "scenes": ("image", 16, 3), "moving": ("clip", 16, 3), "tones": ("sound", 16000, 32000)
}  # fmt: skip
# of an outline of radius 1, from elementary geometry; of the crescent see below
AREAS = {
    "circle": math.pi, "ring": math.pi * (1 - 0.44**2), "square": 1.64**2, "diamond": 2 / 1.4,
    "triangle": 1.75**2 / 2, "star": 5 * 0.45 * math.sin(math.pi / 5), "cross": 2 * 1.9 * 0.64 - 0.64**2,
}  # fmt: skip
PHRASE = re.compile(rf"an? (?:(small|large) )?({'|'.join(COLOURS)}) ({'|'.join(SHAPES)}) ({'|'.join(POSITIONS)})")


def draw(source: DemoSource, index: int, epoch: int = 0, augment: bool = False) -> Tensor:
    name, *sizes = DRAWN[source.kind]
    return source.record(index, epoch, augment)[name](*sizes)


def digest(kind: str, seed: int = 0) -> str:
    source = pickle.loads(pickle.dumps(DemoSource(kind, 20, seed)))
    return hashlib.sha256(b"".join(draw(source, i).numpy().tobytes() for i in range(len(source)))).hexdigest()


def caption(source: DemoSource, index: int) -> str:
    return source.record(index)["texts"]["captions"][0]


def test_samples_are_the_same_in_every_process_and_depend_on_the_seed() -> None:
    program = "from tests.data.test_demo import DRAWN, digest; print(*map(digest, DRAWN))"
    for kind, elsewhere in zip(DRAWN, python(program).stdout.split(), strict=True):
        assert elsewhere == digest(kind) != digest(kind, seed=1)


def test_a_name_is_a_demonstration_a_mistake_or_a_path() -> None:
    assert len(open_demo("demo:shapes", "scenes", 3) or ()) == 4096 and open_demo("photos", "scenes", 3) is None
    assert "the only one is demo:shapes" in one_line(open_demo, "demo:tones", "scenes", 3)
    for number in ("0", "-1", "1x", "4194305", "9" * 100):
        assert "no number from 1 to 4194304" in one_line(open_demo, f"demo:shapes:{number}", "scenes", 3)


def crescent_area() -> float:
    """A circle of radius 1 less its lens with one of radius r at distance d."""
    r, d = 0.85, 0.55
    a, b = math.acos((d**2 + 1 - r**2) / (2 * d)), math.acos((d**2 + r**2 - 1) / (2 * d * r))
    lens = a + r**2 * b - 0.5 * math.sqrt((-d + 1 + r) * (d + 1 - r) * (d - 1 + r) * (d + 1 + r))
    return math.pi - lens


def test_captions_of_pictures_are_true() -> None:
    """The pixels of the named colour lie at the named place, and their area is that of the named shape and size."""
    size, images = 192, DemoSource("shapes", 120)
    areas = AREAS | {"crescent": crescent_area()}
    y, x = np.mgrid[0:size, 0:size] / size
    seen = set()
    for index in range(120):
        picture = images.record(index)["image"](size, 3).numpy().astype(int)
        phrases = PHRASE.findall(caption(images, index))
        assert 1 <= len(phrases) <= 3
        for size_name, colour, shape, position in phrases:
            near = np.maximum(abs(x - POSITIONS[position][0]), abs(y - POSITIONS[position][1])) < 0.25
            distance = np.abs(picture - np.array(COLOURS[colour])[:, None, None]).max(0)
            area = ((distance < 50) & near).sum() / size**2
            # sizes vary by 4%, so areas by 8%; the next size is 26% away; pixels on the outline are of mixed colours
            assert area / (areas[shape] * SIZES[size_name] ** 2) == pytest.approx(1, abs=0.16), caption(images, index)
            seen.update([size_name, colour, shape, position])
    assert seen == {*SIZES, *COLOURS, *SHAPES, *POSITIONS}


def test_a_tenth_of_the_combinations_is_held_out_of_which_no_two_share_a_pair() -> None:
    held_out = [names for names in TRIPLES if is_held_out(*names)]
    assert (len(TRIPLES), len(held_out)) == (8 * 8 * 9, 58)
    for a, b in itertools.combinations(held_out, 2):
        assert sum(x == y for x, y in zip(a, b, strict=True)) <= 1
    assert [len({names[i] for names in held_out}) for i in range(3)] == [8, 8, 9], "every attribute is asked for"


def test_held_out_combinations_are_never_shown_and_all_others_are() -> None:
    shown = DemoSource("scenes", 4000)
    phrases = [PHRASE.findall(caption(shown, index))[0] for index in range(len(shown))]
    assert {(shape, colour, position) for _, colour, shape, position in phrases} == {
        names for names in TRIPLES if not is_held_out(*names)
    }


def test_sentences_are_conditions() -> None:
    shown = DemoSource("scenes", 200)
    for index in range(200):
        record, said = shown.record(index), caption(shown, index)
        given = condition_of(said)
        assert torch.equal(given["image_embed"], record["image_embed"]()), said
        assert torch.equal(given["text_encodings"], record["text_encodings"]()), said
        is_dark = record["image"](16, 3).float().median() < 128
        assert said.endswith(", on dark" if is_dark else ", on light")
    short, whole = condition_of("a red star top left"), condition_of("A red star top left, on light.")
    assert torch.equal(short["image_embed"], whole["image_embed"])
    for text in ("a red star", "a red star top left, on grey", "a red star top left on dark"):
        assert "is no caption of demo:shapes" in one_line(condition_of, text)


def test_captions_of_sounds_are_true() -> None:
    sounds, rate = DemoSource("tones", 60), 16000
    for index in range(60):
        said = caption(sounds, index)
        sound = sounds.record(index)["sound"](rate, 2 * rate).numpy()
        strongest = np.abs(np.fft.rfft(sound))[20:].argmax() / 2 + 10  # in Hz, above the pulses
        low, high = next(HERTZ[pitch] for pitch, (word, *_) in PITCHES.items() if f"a {word} " in said)
        # pulses blur a frequency by theirs, 12 per second at most; a band of noise reaches a third to either side
        beside = high / 3 if "noise" in said else 12
        assert low - beside <= strongest <= high + beside, said
        first, last = (np.sqrt(np.mean(part**2)) for part in (sound[: rate // 2], sound[-rate // 2 :]))
        # from the middle of the first quarter of the clip to that of the last one
        decay = LOUDEST_OVER_SOFTEST**0.75
        expected = decay if "fading" in said else 1 / decay if "swelling" in said else 1
        assert first / last == pytest.approx(expected, rel=0.45), said  # slow pulses are cut unevenly, noise varies
