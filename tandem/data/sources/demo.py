"""The demonstrations, generated data sets without files: captioned pictures of shapes, clips of moving shapes, and
captioned sounds.

A sample depends only on (seed, index) and is the same on every machine. Lengths are in units of the picture's side,
times in frames: one index shows the same scene at every image_size, and a longer clip begins with the frames of a
shorter one.

For pictures of one shape ("scenes"), one in ten combinations of shape, colour and place is held out: no picture has it,
though every pair of two of these attributes occurs. The pictures that a model generates for held-out captions show
whether it can combine attributes that it has not seen together. Scenes also have exact embeddings of their captions, so
that no text encoder has to be trained.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.hashing import GOLDEN_GAMMA, Draws, derive_key, mix64
from tandem.sides import Sides, height_and_width

from .record import Record

Array = npt.NDArray[np.floating]
Key = tuple[int | str, ...]  # of `Draws`
T = TypeVar("T")

PREFIX = "demo:"
DEFAULT_SIZE, LARGEST_SIZE = 4096, 1 << 22
_LONGEST_QUOTE = 60


class DemoSource:
    """`n` samples of a demonstration, numbered. See `RecordSource`. A record holds, by its kind,

    - "shapes": of one to three shapes, image(image_size, channels) -> uint8 (channels, height, width): of 4 channels
      the last is opaque alpha, of others the colours follow one another again and again; and "texts",
      {"captions": [...]}, which are true of a picture that is not mirrored;
    - "scenes": of one shape, the same; and image_embed() -> float32 (30,), text_encodings() -> float32 (9, 32);
    - "moving": clip(image_size, num_frames, frames_per_step) -> uint8 (3, num_frames, height, width), where
      frames_per_step, in frames of the scene (`FRAMES_PER_SECOND`), passes between two frames of the clip;
    - "tones": sound(sample_rate, clip_samples) -> float32 (clip_samples,) in [-1, 1]; and "texts" of four captions and
      the "label", the waveform. The first caption has the same words for all tones of equal attributes, the others use
      random synonyms. Augmentation changes what no caption mentions: loudness, phases and noise.
    """

    fingerprint = skipped = ""
    shards: Sequence[range] | None = None

    def __init__(self, kind: str, n: int, seed: int = 0) -> None:
        self.kind, self.n, self.seed = kind, n, seed

    def __len__(self) -> int:
        return self.n

    def record(self, index: int, epoch: int = 0, augment: bool = False) -> Record:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return _KINDS[self.kind].draw(self.seed, index, epoch if augment else "plain")

    def describe(self, index: int) -> str:
        return f"{demo_name(self.kind)}[{index}]"

    name = describe

    def examples(self, name: str) -> Sequence[int]:
        return [0] if name in self.record(0) else []


def demo_name(kind: str) -> str:
    """The name of the demonstration with samples of a kind, such as "demo:shapes" of scenes."""
    return f"{PREFIX}{_KINDS[kind].name}"


def open_demo(spec: str, kind: str, seed: int = 0) -> DemoSource | None:
    """The samples of `demo:<name>` or `demo:<name>:<number>`; None if `spec` does not begin with `demo:`. `kind`: see
    `DemoSource`.

    Raises ValueError, in one line, if `spec` names another demonstration, or its number is not a positive integer.
    """
    if not spec.startswith(PREFIX):
        return None
    name = demo_name(kind)
    name_in_spec, _, number = spec.removeprefix(PREFIX).partition(":")
    if PREFIX + name_in_spec != name:
        raise ValueError(f"there is no demonstration set {spec!r} of {_KINDS[kind].noun}: the only one is {name}")
    n = int(number or DEFAULT_SIZE) if re.fullmatch("[0-9]{,7}", number) else 0
    if not 0 < n <= LARGEST_SIZE:
        raise ValueError(
            f"{spec[:_LONGEST_QUOTE]!r} asks for {number[:_LONGEST_QUOTE]!r} {_KINDS[kind].noun}, which is no number "
            f"from 1 to {LARGEST_SIZE}: write e.g. {name}:{DEFAULT_SIZE}"
        )
    return DemoSource(kind, n, seed)


def _draw_one(choices: Iterable[T], draws: Draws) -> T:
    options = list(choices)
    return options[draws.below(len(options))]


# Shapes: their attributes, and how they are painted.

COLOURS = {
    "red": (214, 40, 44), "orange": (242, 135, 30), "yellow": (250, 222, 60), "green": (40, 175, 70),
    "cyan": (70, 210, 220), "blue": (40, 84, 210), "purple": (128, 58, 180), "pink": (236, 88, 160),
}  # fmt: skip
SIZES = {"small": 0.13, "": 0.17, "large": 0.215}  # radius; captions do not mention the middle size
PLACES = {
    "top left": (0.25, 0.25), "at the top": (0.5, 0.25), "top right": (0.75, 0.25),
    "on the left": (0.25, 0.5), "in the centre": (0.5, 0.5), "on the right": (0.75, 0.5),
    "bottom left": (0.25, 0.75), "at the bottom": (0.5, 0.75), "bottom right": (0.75, 0.75),
}  # fmt: skip
BACKGROUNDS = ("light", "dark")


def _star(x: Array, y: Array) -> Array:
    """A star (see SHAPES) with five points at radius 1 and notches between them at radius 0.45."""
    fifth = 2 * math.pi / 5
    # The angle from the nearest point suffices, because the two halves of a point are mirror images.
    angle = np.abs((np.arctan2(x, -y) + fifth / 2) % fifth - fifth / 2)
    along, across = np.hypot(x, y) * np.cos(angle), np.hypot(x, y) * np.sin(angle)
    notch_along, notch_across = 0.45 * math.cos(fifth / 2), 0.45 * math.sin(fifth / 2)
    edge = math.hypot(1 - notch_along, notch_across)
    return ((along - 1) * notch_across + across * (1 - notch_along)) / edge


# (x, y) from the centre, y downwards -> distance to the outline, positive outside, negative inside; all in radii
SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "circle": lambda x, y: np.hypot(x, y) - 1,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.72) - 0.28,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.82,
    "diamond": lambda x, y: (1.4 * np.abs(x) + np.abs(y) - 1) / math.hypot(1.4, 1),
    "triangle": lambda x, y: np.maximum(y - 0.75, (2 * np.abs(x) - y - 1) / math.hypot(2, 1)),
    "star": _star,
    "cross": lambda x, y: np.minimum(
        np.maximum(np.abs(x) - 0.95, np.abs(y) - 0.32), np.maximum(np.abs(y) - 0.95, np.abs(x) - 0.32)
    ),
    "crescent": lambda x, y: np.maximum(np.hypot(x, y) - 1, 0.85 - np.hypot(x - 0.55, y)),
}


class Figure(NamedTuple):
    """A shape in a picture. x, y, radius in [0, 1] of the picture's side (x to the right, y down); angle in radians."""

    shape: str
    colour: str
    size: str
    place: str
    x: float
    y: float
    radius: float
    angle: float

    def __str__(self) -> str:
        words = " ".join(word for word in (self.size, self.colour, self.shape) if word)
        return f"{'an' if words[0] in 'aeiou' else 'a'} {words} {self.place}"


def paint(picture: Array, figure: Figure) -> None:
    """Lay one shape over picture (3, size, size), in place; its edge is one pixel wide."""
    size = picture.shape[-1]
    reach = 1.05 * figure.radius + 1 / size
    columns, rows = (slice(max(0, int((c - reach) * size)), int((c + reach) * size) + 1) for c in (figure.x, figure.y))
    grid = _pixel_centers(size)
    x, y = (grid[None, columns] - figure.x) / figure.radius, (grid[rows, None] - figure.y) / figure.radius
    cos, sin = math.cos(figure.angle), math.sin(figure.angle)
    distance = SHAPES[figure.shape](cos * x + sin * y, cos * y - sin * x)
    cover = np.clip(0.5 - distance * (figure.radius * size), 0, 1)  # which part of each pixel the shape covers
    region = picture[:, rows, columns]
    region += cover * (np.array(COLOURS[figure.colour], np.float32)[:, None, None] - region)


def _pixel_centers(size: int) -> Array:
    return (np.arange(size, dtype=np.float32) + 0.5) / size


def _dull_colour(draws: Draws) -> Array:
    """float32 (3, 1, 1) in [0, 255]. In at least one channel it differs by 50 or more from each of COLOURS, even after
    waves of brightness change it by up to 30. The first of `draws` determines whether it is dark."""
    level = draws.uniform(50, 75) if _draw_one(BACKGROUNDS, draws) == "dark" else draws.uniform(185, 205)
    return np.array([level + draws.uniform(-12, 12) for _ in range(3)], np.float32)[:, None, None]


# Pictures.


def _are_far_apart(places: tuple[str, ...]) -> bool:
    """Whether any two places are half a picture apart in x or y, so that not even large shapes touch."""
    pairs = itertools.combinations((PLACES[place] for place in places), 2)
    return all(max(abs(ax - bx), abs(ay - by)) >= 0.5 for (ax, ay), (bx, by) in pairs)


_ARRANGEMENTS = [[c for c in itertools.combinations(PLACES, n) if _are_far_apart(c)] for n in (1, 2, 3)]
TRIPLES = list(itertools.product(SHAPES, COLOURS, PLACES))


def is_held_out(shape: str, colour: str, place: str) -> bool:
    """True for 58 of the 576 triples, of which no two have two attributes in common."""
    return (list(SHAPES).index(shape) + 3 * list(COLOURS).index(colour) + 7 * list(PLACES).index(place)) % 10 == 0


_TRAINING_TRIPLES = [triple for triple in TRIPLES if not is_held_out(*triple)]


def _draw_shapes(seed: int, index: int, _: int | str) -> Record:
    draws = Draws("shapes", seed, index)
    figures = [
        _make_figure(_draw_one(SHAPES, draws), _draw_one(COLOURS, draws), _draw_one(SIZES, draws), place, draws)
        for place in _draw_one(_draw_one(_ARRANGEMENTS, draws), draws)
    ]
    *others, last = map(str, figures)
    caption = f"{', '.join(others)} and {last}" if others else last
    return {"image": partial(_paint_picture, figures, ("background", seed, index)), "texts": {"captions": [caption]}}


def _draw_scene(seed: int, index: int, _: int | str) -> Record:
    # "seen" has no meaning: without it, the pictures would be others than those of earlier versions.
    draws, key = Draws("scene", "seen", seed, index), ("scene background", "seen", seed, index)
    shape, colour, place = _draw_one(_TRAINING_TRIPLES, draws)
    figure = _make_figure(shape, colour, _draw_one(SIZES, draws), place, draws)
    background = _draw_one(BACKGROUNDS, Draws(*key))  # `_dull_colour` draws the same from this key
    caption = f"{figure}, on {background}"
    return {
        "image": partial(_paint_picture, [figure], key), "texts": {"captions": [caption]},
        "image_embed": partial(_encode_figure, figure, background), "text_encodings": partial(_encode_text, caption),
    }  # fmt: skip


def _make_figure(shape: str, colour: str, size: str, place: str, draws: Draws) -> Figure:
    """A shape near the middle of its place, with slight random changes of size and angle."""
    x, y = (centre + draws.uniform(-0.02, 0.02) for centre in PLACES[place])
    return Figure(shape, colour, size, place, x, y, SIZES[size] * draws.uniform(0.96, 1.04), draws.uniform(-0.15, 0.15))


def _cut_out(square: Tensor, image_size: Sides) -> Tensor:
    """The middle of a square scene (..., n, n), of which one side is n: (..., height, width)."""
    height, width = height_and_width(image_size)
    top, left = (square.shape[-2] - height) // 2, (square.shape[-1] - width) // 2
    return square[..., top : top + height, left : left + width].contiguous()


def _paint_picture(figures: list[Figure], key: Key, image_size: Sides, channels: int = 3) -> Tensor:
    """Shapes on a dull colour with a gradient and two long waves of brightness, which depend on `key`."""
    draws, grid = Draws(*key), _pixel_centers(max(height_and_width(image_size)))
    colour, x, y = _dull_colour(draws), grid[None, :], grid[:, None]
    brightness = draws.uniform(-16, 16) * (x - 0.5) + draws.uniform(-16, 16) * (y - 0.5)
    for _ in range(2):
        direction, n_waves, phase = draws.uniform(0, math.pi), draws.uniform(1, 3), draws.uniform(0, 2 * math.pi)
        k = 2 * math.pi * n_waves
        brightness = brightness + 7 * np.sin(k * math.cos(direction) * x + k * math.sin(direction) * y + phase)
    picture = colour + brightness
    for figure in figures:
        paint(picture, figure)
    image = _cut_out(torch.from_numpy(np.rint(picture).astype(np.uint8)), image_size)
    if channels == 4:
        return torch.cat([image, torch.full_like(image[:1], 255)])
    return image[[channel % 3 for channel in range(channels)]]


# Embeddings of the caption of a scene.

_TABLES = [list(table) for table in (PLACES, SHAPES, COLOURS, SIZES, ("dark", "light"))]
TOKENS, TOKEN_DIM = 9, 32  # of an encoded caption: "a small red circle on the left, on dark" has 9 words


def _encode_figure(figure: Figure, background: str) -> Tensor:
    """A shape and its background -> float32 (30,), one-hot codes of the 9 places, 8 shapes, 8 colours, 3 sizes and 2
    backgrounds.

    The code of a shape's looks does not depend on its place, so they need not be learned for each place.
    """
    names = (figure.place, figure.shape, figure.colour, figure.size, background)
    return torch.cat([torch.eye(len(table))[table.index(name)] for table, name in zip(_TABLES, names, strict=True)])


def _encode_text(caption: str) -> Tensor:
    """A caption in the form of a text encoder's output: float32 (9, 32), for each word the sum of a fixed random vector
    of the word and one of its position, with variance 1; zeros after the end."""
    rows = [
        [(a + b) / 2**0.5 for a, b in zip(_vector("word", word), _vector("position", position), strict=True)]
        for position, word in enumerate(caption.replace(",", "").split())
    ]
    return torch.tensor(rows + [[0.0] * TOKEN_DIM] * (TOKENS - len(rows)))


@functools.lru_cache(maxsize=256)
def _vector(*key: int | str) -> list[float]:
    """Uniform numbers with mean 0 and variance 1."""
    draws = Draws("caption", *key)
    return [draws.uniform(-(3**0.5), 3**0.5) for _ in range(TOKEN_DIM)]


def condition_of(text: str) -> dict[str, Tensor]:
    """A caption of a scene, such as "a small red circle on the left, on dark" -> its "image_embed" (30,) and
    "text_encodings" (9, 32). The default background is light. Raises ValueError, in one line, for another sentence."""
    words = text.lower().strip().rstrip(".").removeprefix("an ").removeprefix("a ")
    words, _, background = words.partition(", on ")
    background = background or "light"
    for names in itertools.product(SHAPES, COLOURS, SIZES, PLACES):
        figure = Figure(*names, x=0.5, y=0.5, radius=0.0, angle=0.0)
        if str(figure).split(" ", 1)[1] == words and background in BACKGROUNDS:
            caption = f"{figure}, on {background}"
            return {"image_embed": _encode_figure(figure, background), "text_encodings": _encode_text(caption)}
    raise ValueError(
        f"{text!r} is no caption of demo:shapes: write 'a', perhaps small or large, then one of {', '.join(COLOURS)}, "
        f"one of {', '.join(SHAPES)}, and one of {', '.join(PLACES)}; then perhaps ', on dark'"
    )


# Clips: one or two shapes that glide over a soft background and bounce off its edges.

FRAMES_PER_SECOND = 24  # of a scene; with --fps N, a clip has N frames for 24 of the scene
_MARGIN = 0.22  # the least distance of a shape's centre from an edge, in sides


class _Mover(NamedTuple):
    """A shape as it is in frame 0, with its speeds: sides per frame (x to the right, y down), radians per frame."""

    figure: Figure
    speed_x: float
    speed_y: float
    spin: float

    def at(self, time: float) -> Figure:
        """The shape at a time, in frames."""
        return self.figure._replace(
            x=_bounce(self.figure.x + self.speed_x * time),
            y=_bounce(self.figure.y + self.speed_y * time),
            angle=self.figure.angle + self.spin * time,
        )


def _bounce(position: float) -> float:
    """A position on an endless line -> the position between the margins of a shape that bounces off them."""
    width = 1 - 2 * _MARGIN
    return _MARGIN + width - abs((position - _MARGIN) % (2 * width) - width)


def _draw_moving(seed: int, index: int, _: int | str) -> Record:
    draws = Draws("moving", seed, index)
    movers = [_draw_mover(draws) for _ in range(1 + draws.below(2))]
    return {"clip": partial(_paint_clip, movers, ("moving background", seed, index))}


def _draw_mover(draws: Draws) -> _Mover:
    shape, colour = _draw_one(SHAPES, draws), _draw_one(COLOURS, draws)
    x, y = (draws.uniform(_MARGIN, 1 - _MARGIN) for _ in range(2))
    direction, speed = draws.uniform(0, 2 * math.pi), draws.uniform(0.04, 0.07)
    figure = Figure(shape, colour, "", "", x, y, draws.uniform(0.2, 0.3), draws.uniform(0, 2 * math.pi))
    return _Mover(figure, speed * math.cos(direction), speed * math.sin(direction), draws.uniform(-0.06, 0.06))


def _paint_clip(
    movers: list[_Mover], key: Key, image_size: Sides, num_frames: int, frames_per_step: float = 1.0
) -> Tensor:
    """Shapes, painted in order, on a dull colour with drifting long waves of brightness, which depend on `key`."""
    side = max(height_and_width(image_size))
    draws, grid = Draws(*key), _pixel_centers(side)
    colour, waves = _dull_colour(draws), []
    for _ in range(2):
        direction, n_waves, phase = draws.uniform(0, math.pi), draws.uniform(0.5, 1.5), draws.uniform(0, 2 * math.pi)
        k, drift = 2 * math.pi * n_waves, draws.uniform(-0.1, 0.1)
        along = (k * math.cos(direction) * grid)[None, :] + (k * math.sin(direction) * grid)[:, None]
        waves.append((along, phase, drift))
    clip = np.empty((3, num_frames, side, side), np.uint8)
    for frame in range(num_frames):  # one by one, so that no frame's bits depend on the number of frames
        time = frame * frames_per_step
        brightness = np.zeros((side, side), np.float32)
        for along, phase, drift in waves:
            brightness += 10 * np.sin(along + np.float32(phase + drift * time))
        picture = colour + brightness
        for mover in movers:
            paint(picture, mover.at(time))
        clip[:, frame] = np.rint(picture)
    return _cut_out(torch.from_numpy(clip), image_size)


# Sounds: a tone of some waveform and pitch, in pulses, that fades or swells; phases are integers. The tables hold the
# synonyms of each value, the plainest first; no synonym stands for two values.

WAVEFORMS = {
    "sine": ("sine wave", "sine tone", "pure tone"),
    "triangle": ("triangle wave", "triangle tone", "triangular wave"),
    "square": ("square wave", "square tone", "rectangular wave"),
    "sawtooth": ("sawtooth wave", "sawtooth tone", "saw wave"),
    "noise": ("noise", "band of noise", "hissing noise"),
}
PITCHES = {
    "low": ("low", "deep", "low-pitched"),
    "middle": ("middle", "medium-pitched", "mid-range"),
    "high": ("high", "high-pitched", "shrill"),
}
TEMPOS = {
    "slow": ("slow", "leisurely", "lazy"),
    "medium": ("moderate", "medium-paced", "middling"),
    "fast": ("fast", "rapid", "quick"),
}
ENVELOPES = {
    "steady": ("at a steady volume", "equally loud throughout", "at a constant level"),
    "fading": ("fading away", "growing softer", "getting quieter"),
    "swelling": ("swelling", "growing louder", "getting louder"),
}
_WORDS = {"waveform": WAVEFORMS, "pitch": PITCHES, "tempo": TEMPOS, "envelope": ENVELOPES}
TEMPLATES = (
    "a {pitch} {waveform} in {tempo} pulses, {envelope}",
    "{tempo} pulses of a {pitch} {waveform}, {envelope}",
    "{envelope}: a {pitch} {waveform} that pulses at a {tempo} rate",
    "the sound of a {pitch} {waveform}, {envelope}, with {tempo} pulses",
)
HERTZ = {"low": (130.0, 185.0), "middle": (340.0, 480.0), "high": (900.0, 1250.0)}
PULSES_PER_SECOND = {"slow": (1.8, 2.4), "medium": (4.0, 5.3), "fast": (9.0, 12.0)}
LOUDEST_OVER_SOFTEST = 10.0  # ratio of loudness between the ends of a clip that fades or swells

_LOWEST_SAMPLE_RATE, _SHORTEST_CLIP_SECONDS = 8000, 0.5  # below these, two waveforms or two tempos would sound alike
_RMS = 0.25  # root mean square of a pulse at its loudest, for every waveform
_ENTRIES_BITS = 12  # a table of one period has 2^12 entries
_ENTRIES = 1 << _ENTRIES_BITS
_MOST_HARMONICS = 40
_DUTY, _RAMP = 0.6, 0.08  # shares of a pulse's period: of the sound, and of its rise and of its fall


def _draw_tone(seed: int, index: int, epoch: int | str) -> Record:
    draws = Draws("tones", seed, index)
    traits = {name: _draw_one(table, draws) for name, table in _WORDS.items()}
    low, high = HERTZ[traits["pitch"]]
    hertz, pulses_per_second = low * (high / low) ** draws.uniform(), draws.uniform(*PULSES_PER_SECOND[traits["tempo"]])
    draws, words = Draws("tone words", seed, index), {name: table[traits[name]] for name, table in _WORDS.items()}
    captions = [TEMPLATES[0].format(**{name: first for name, (first, *_) in words.items()})]
    for template in TEMPLATES[1:]:
        captions.append(template.format(**{name: _draw_one(synonyms, draws) for name, synonyms in words.items()}))
    key = ("tone", seed, epoch, index)
    return {
        "sound": partial(_synthesize, traits["waveform"], traits["envelope"], hertz, pulses_per_second, key),
        "texts": {"captions": captions, "label": words["waveform"][0]},
    }


def check_sound(sample_rate: int, clip_samples: int) -> None:
    """Raise ValueError, in one line, if different tones would sound alike in such a clip."""
    if sample_rate < _LOWEST_SAMPLE_RATE or clip_samples < _SHORTEST_CLIP_SECONDS * sample_rate:
        raise ValueError(
            f"demo:tones needs a sample rate of {_LOWEST_SAMPLE_RATE} Hz and clips of {_SHORTEST_CLIP_SECONDS} s "
            f"at least, not {sample_rate} Hz and {clip_samples / sample_rate:g} s"
        )


def _synthesize(
    waveform: str, envelope: str, hertz: float, pulses_per_second: float, key: Key, sample_rate: int, clip_samples: int
) -> Tensor:
    draws = Draws(*key)
    beat = _phases(clip_samples, pulses_per_second / sample_rate, draws.uniform())
    phase = _phases(clip_samples, hertz / sample_rate, draws.uniform())
    if waveform == "noise":
        samples = _noise(phase, hertz / 3 / sample_rate, draws.bits())
    else:
        samples = _one_period(waveform, min(_MOST_HARMONICS, int(0.48 * sample_rate / hertz)))[phase]
    samples = samples * _pulse()[beat] * _ramp(envelope, clip_samples) * np.float32(draws.uniform(0.5, 1.0))
    return torch.from_numpy(samples)


def _noise(phase: npt.NDArray[np.int64], rate: float, key: int) -> Array:
    """Noise whose spectrum is a band around the frequency of a wave with these phases: the sum of two waves, a quarter
    of a period apart, each multiplied by noise of low frequencies with `rate` values per sample."""
    positions = np.arange(len(phase)) * rate
    n = int(positions[-1]) + 2
    samples = np.zeros(len(phase), np.float32)
    for number in range(2):
        envelope = np.interp(positions, np.arange(n), _white_noise(n, key + number)).astype(np.float32)
        samples += envelope * _one_period("sine", 1)[(phase + number * _ENTRIES // 4) % _ENTRIES]
    # Scale to `_RMS`: uniform numbers in [-1, 1) have the mean square 1/3, linear interpolation between them has
    # 2/9, and so the sum of the two products has 4/9 of `_RMS` squared.
    return samples * np.float32(1.5)


def _white_noise(n: int, key: int) -> Array:
    """n uniform numbers in [-1, 1), from the same sequence as `Draws`, computed at once."""
    states = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA) + np.uint64(derive_key("white", key))
    return (mix64(states) >> 11).astype(np.float64) * 2.0**-52 - 1.0


def _phases(n: int, per_sample: float, start: float) -> npt.NDArray[np.int64]:
    """The phases of samples 0 to n - 1 of a wave, in 0 .. 2^12 - 1, computed in 32-bit fixed point."""
    step, first = round(per_sample * 2**32), int(start * 2**32)
    return ((first + step * np.arange(n, dtype=np.int64)) & (2**32 - 1)) >> (32 - _ENTRIES_BITS)


@functools.lru_cache(maxsize=256)
def _one_period(waveform: str, n_harmonics: int) -> Array:
    """One band-limited period of a waveform, with root mean square `_RMS`."""
    angles = 2 * math.pi * np.arange(_ENTRIES) / _ENTRIES
    harmonics = range(1, n_harmonics + 1)
    zeros = np.zeros_like(angles)
    if waveform == "sine":
        wave = np.sin(angles)
    elif waveform == "triangle":
        wave = sum(((-1) ** (k // 2) / k**2 * np.sin(k * angles) for k in harmonics if k % 2), zeros)
    else:
        wave = sum((np.sin(k * angles) / k for k in harmonics if k % 2 or waveform == "sawtooth"), zeros)
    return (wave * (_RMS / np.sqrt(np.mean(wave**2)))).astype(np.float32)


@functools.lru_cache(maxsize=1)
def _pulse() -> Array:
    """Loudness over one period of the pulses, in [0, 1]."""
    positions = np.arange(_ENTRIES) / _ENTRIES
    rise = np.clip(np.minimum(positions, _DUTY - positions) / _RAMP, 0, 1)
    return (rise * rise * (3 - 2 * rise)).astype(np.float32)


@functools.lru_cache(maxsize=8)
def _ramp(envelope: str, n: int) -> Array:
    """Loudness over the clip, in [0.1, 1], linear in decibels."""
    if envelope == "steady":
        return np.ones(n, np.float32)
    fading = np.geomspace(1.0, 1.0 / LOUDEST_OVER_SOFTEST, n).astype(np.float32)
    return fading if envelope == "fading" else fading[::-1]


class _Kind(NamedTuple):
    """The demonstration with samples of a kind: its name, the noun for messages, and the function of (seed, index,
    epoch or "plain") that generates a sample."""

    name: str
    noun: str
    draw: Callable[[int, int, int | str], Record]


_KINDS = {
    "shapes": _Kind("shapes", "images", _draw_shapes), "scenes": _Kind("shapes", "images", _draw_scene),
    "moving": _Kind("moving", "clips", _draw_moving), "tones": _Kind("tones", "sounds", _draw_tone),
}  # fmt: skip
