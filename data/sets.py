"""The sets that scripts train on: which fields each takes out of which source, and the feeds of their batches."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from .crops import CENTER, Crop, crop_of
from .decoding import sounds, videos
from .demo import DemoSource, check_sound, demo_name, open_demo
from .feed import Feed, split_seed_of
from .fields import (
    IMAGE,
    KINDS,
    TEXT,
    CaptionField,
    ClipField,
    EmbeddingField,
    Field,
    ImageField,
    Kind,
    OneFrameField,
    SoundField,
    TextsField,
    embedding_field,
    embedding_rows,
)
from .order import Split, split_samples, split_shards
from .records.opening import open_source
from .records.own import OwnData, OwnSource, data_of
from .records.record import Source, Wanted
from .samples import Samples
from .tokenizers import Tokenizer

if TYPE_CHECKING:
    from distributed import Backend

Spec = str | OwnData | None

_LARGEST_CLIP_BYTES = 1 << 32
_NO_FLIP = "--random_flip would make captions and embeddings wrong, which are of images as they are"


class ImageBatch(TypedDict):
    """images: uint8 (b, c, h, w); positions and ids: see `Feed`."""

    images: Tensor
    positions: list[int]
    ids: list[int]


class VideoBatch(TypedDict):
    """videos: uint8 (b, 3, f, h, w), in a batch of images f = 1; positions and ids: see `Feed`."""

    videos: Tensor
    positions: list[int]
    ids: list[int]


class SoundBatch(TypedDict):
    """waveforms: float32 (b, clip_samples) in [-1, 1]; tokens: int64 (b, max_text_tokens); lengths: how many tokens of
    each row count; captions: the texts of the tokens, in training one of each sound's captions, drawn for each epoch,
    in validation the first; caption_ids: int64 (b,), equal for equal captions; positions and ids: see `Feed`;
    all_captions: all captions of each sound; labels: the class of each sound, None if it has none."""

    waveforms: Tensor
    tokens: Tensor
    lengths: list[int]
    captions: list[str]
    caption_ids: Tensor
    positions: list[int]
    ids: list[int]
    all_captions: list[list[str]]
    labels: list[str | None]


class ConditionedBatch(TypedDict, total=False):
    """images: uint8 (b, 3, s, s); captions: "" where there is none; positions and ids: see `Feed`. And, where the model
    takes them: image_embed, float32 (b, d), and text_encodings, float32 (b, L, d), which end with rows of 0 after the
    last token; or, if these are to be computed from images and texts, tokens, int64 (b, number of tokens)."""

    images: Tensor
    captions: list[str]
    image_embed: Tensor
    text_encodings: Tensor
    tokens: Tensor
    positions: list[int]
    ids: list[int]


def open_records(spec: Spec, wanted: Sequence[Wanted], kind: str, noun: str, seed: int, **numbers: Any) -> Source:
    """The source that a flag stands for: `demo:<name>` (also None), `demo:<name>:<number>`; a user's own dataset
    (`OwnData`); or what `open_source` makes of a path. No sample is opened.

    Args:
        wanted: What fields look for; the first one makes a sample.
        kind: Of the demonstration, see `DemoSource`.
        noun: What messages call the samples, in the plural.
        numbers: Which tars: see `open_source`.

    Raises ValueError, in one line, if there is no such set or nothing in it.
    """
    if isinstance(spec, OwnData):
        return OwnSource(spec)
    demo = demo_name(kind)
    drawn = open_demo(spec or demo, kind, noun, seed)
    return drawn or open_source(str(spec), wanted, demo=demo, **numbers)


def open_images(
    spec: Spec, *, image_size: int, channels: int = 3, flip: bool = False, seed: int = 0, crop: Crop = CENTER
) -> Samples:
    """A set of "images": see `open_records` for `spec` and what is raised, and `ImageField`."""
    if channels not in (3, 4):
        raise ValueError(f"images have 3 channels (RGB) or 4 (RGBA), not {channels}")
    fields = [ImageField(image_size, channels, flip, seed, crop=crop)]
    return Samples(open_records(spec, [field.wanted for field in fields], "shapes", "images", seed), fields)


def image_feed(args: argparse.Namespace, processes: Backend, channels: int = 3) -> Feed[ImageBatch]:
    """The feed of a script that trains on images of 3 (RGB) or 4 (RGBA) channels. Raises what `Feed` raises."""
    source = data_of(args, "image_folder")

    def open_set(spec: Spec = source) -> Samples:
        return open_images(
            spec, image_size=args.image_size, channels=channels, flip=args.random_flip, seed=args.seed,
            crop=crop_of(args),
        )  # fmt: skip

    return Feed(
        open_set, args, processes, split_seed=split_seed_of(args), noun="image", source=str(source),
        open_valid=partial(open_set, args.valid_folder) if args.valid_folder else None,
    )  # fmt: skip


def open_videos(
    spec: Spec,
    *,
    image_size: int,
    num_frames: int,
    fps: float | None = None,
    frame_stride: int = 1,
    flip: bool = False,
    seed: int = 0,
    short_clips: str = "repeat",
    clip_starts: str = "anywhere",
    crop: Crop = CENTER,
) -> Samples:
    """A set of clips, "videos", in which an image is a video of one frame: see `open_records` for `spec` and what is
    raised, `ClipField` for `flip`, and `ClipDecoder` for the others."""
    if (n_bytes := 3 * num_frames * image_size**2) > _LARGEST_CLIP_BYTES:
        raise ValueError(
            f"a clip of {num_frames} frames of {image_size} pixels takes {n_bytes / 1e9:.3g} GB: lower one of them"
        )
    if fps is not None and frame_stride != 1:
        raise ValueError(f"--fps {fps:g} and --frame_stride {frame_stride} exclude each other: give one of them")
    clips = videos.ClipDecoder(
        image_size, num_frames, fps=fps, frame_stride=frame_stride, short_clips=short_clips, clip_starts=clip_starts,
        seed=seed, crop=crop,
    )  # fmt: skip
    fields = [ClipField(clips, flip)]
    source = open_records(spec, [field.wanted for field in fields], "moving", "clips", seed)
    if not isinstance(source, DemoSource | OwnSource):
        videos.require_decoder()
    return Samples(source, fields)


def video_feed(args: argparse.Namespace, processes: Backend) -> Feed[VideoBatch]:
    """The feed of a script that trains on videos: with `--image_folder`, every `--image_every`-th update is a batch of
    images, as clips of one frame. Validation is of videos only. Raises what `Feed` raises."""
    alike = {"image_size": args.image_size, "flip": args.random_flip, "seed": args.seed, "crop": crop_of(args)}
    names = ("num_frames", "fps", "frame_stride", "short_clips", "clip_starts")
    source = data_of(args, "video_folder")

    def open_set(spec: Spec = source) -> Samples:
        return open_videos(spec, **alike, **{name: getattr(args, name) for name in names})

    def open_second() -> Samples:
        if args.image_every == 1:
            raise ValueError("--image_every 1 leaves no update for the videos: give 2 or more")
        fields = [OneFrameField(**alike)]
        return Samples(open_records(args.image_folder, [fields[0].wanted], "shapes", "images", args.seed), fields)

    return Feed(
        open_set, args, processes, split_seed=split_seed_of(args), noun="clip",
        source=" and ".join(filter(None, [str(source), args.image_folder])),
        open_second=open_second if args.image_folder else None, second_every=args.image_every,
        open_valid=partial(open_set, args.valid_folder) if args.valid_folder else None,
    )  # fmt: skip


def open_sounds(
    spec: Spec, *, sample_rate: int, clip_seconds: float, tokenizer: Tokenizer | None = None, seed: int = 0
) -> Samples:
    """A set of sounds, "waveforms", and, with a tokenizer, their texts: see `open_records` for `spec` and what is
    raised, `SoundField` and `TextsField`. With a tokenizer, a set without any caption is refused."""
    clip_samples = round(clip_seconds * sample_rate)
    if not (sample_rate > 0 and clip_samples > 0):
        raise ValueError(f"there is no sample in a clip of {clip_seconds:g} s at {sample_rate} Hz")
    fields: list[Field] = [SoundField(sounds.ClipDecoder(sample_rate, clip_samples, seed))]
    if tokenizer:
        fields.append(TextsField(tokenizer, seed))
    source = open_records(spec, [field.wanted for field in fields], "tones", "sounds", seed)
    if isinstance(source, DemoSource):
        check_sound(sample_rate, clip_samples)
    else:
        sounds.require_decoders()
    if tokenizer and not isinstance(source, OwnSource) and not has(source, "texts"):
        raise ValueError(
            f"no sound of the {len(source)} in {spec!r} has a caption: beside {source.describe(0)!r} there has "
            "to be a .txt of the same name (a caption per line) or a .json; in a table or manifest, a column caption, "
            "captions, text or caption_1"
        )
    return Samples(source, fields)


def sound_feed(args: argparse.Namespace, processes: Backend, tokenizer: Tokenizer) -> Feed[SoundBatch]:
    """The feed of a script that trains on sounds and captions. Raises what `Feed` raises."""
    source = data_of(args, "audio_data")

    def open_set(spec: Spec = source) -> Samples:
        hearing = {"sample_rate": args.sample_rate, "clip_seconds": args.clip_seconds}
        return open_sounds(spec, **hearing, tokenizer=tokenizer, seed=args.seed)

    return Feed(
        open_set, args, processes, split_seed=split_seed_of(args), noun="sound", source=str(source),
        open_valid=partial(open_set, args.valid_folder) if args.valid_folder else None,
    )  # fmt: skip


def open_conditioned(
    spec: Spec,
    *,
    image_size: int,
    takes: Sequence[Kind] = (),
    tokenize: Callable[[Sequence[str]], Tensor] | None = None,
    rows: dict[Kind, str] = {},  # noqa: B006  (nothing changes it)
    index_width: int = 4,
    longest_text: int = 256,
    flip: bool = False,
    seed: int = 0,
    crop: Crop = CENTER,
    **numbers: Any,
) -> Samples:
    """A set of "images" with "captions" and what a model is conditioned on: see `open_records` for `spec` and
    `numbers`. Images whose shorter side has fewer than `image_size` pixels are `Incomplete`: a model that draws would
    learn their blur. So nothing smaller is cut out of an image either.

    Args:
        takes: Which kinds of embeddings the model takes.
        tokenize: Gives the tokens of captions, if embeddings are computed from these and the images; stored embeddings
            are then not read.
        rows: Files of rows of embeddings, see `embedding_rows`.
        longest_text: The most tokens that the model takes.
        flip: Half of the augmented images are mirrored, which captions and stored embeddings do not allow.

    Raises ValueError, in one line, if there is no such set, it lacks what the model takes, or flags contradict it.
    """
    crop = dataclasses.replace(crop, least=image_size)
    fields: list[Field] = [
        ImageField(image_size, flip=flip, seed=seed, enlarge=False, crop=crop),
        CaptionField(tokenize),
    ]
    for kind in rows:
        if tokenize or kind not in takes:
            why = "--clip computes embeddings itself" if tokenize else "the model does not take them"
            raise ValueError(f"{kind.flag} has no use: {why}; leave it out")
    stored = [] if tokenize else [kind for kind in takes if kind not in rows]
    wanted = [*(field.wanted for field in fields), *(kind.wanted for kind in stored)]
    source = open_records(spec, wanted, "scenes", "images", seed, **numbers)
    selects = numbers.get("start_shard") or numbers.get("end_shard") is not None
    if selects and isinstance(source, DemoSource | OwnSource):
        raise ValueError(f"{spec} has no shards: leave out the flags that select or describe them")
    for kind in [] if tokenize else takes:
        found = (
            embedding_rows(source, kind, rows[kind], index_width=index_width)
            if kind in rows
            else embedding_field(source, kind, longest_text)
        )
        if found is None:
            raise ValueError(
                f"the model takes {kind.wanted.noun}s, and {spec!r} has none: put KEY{kind.wanted.endings[0]} beside "
                f"each image, give {kind.flag}, or compute them with --clip and --clip_weights"
            )
        if kind == TEXT and found.shape[0] > longest_text:
            raise ValueError(
                f"texts of {found.shape[0]} tokens are longer than --max_text_len {longest_text}: raise it"
            )
        fields.append(found)
    is_own = isinstance(source, OwnSource)
    if flip and ((takes and not tokenize) or (not is_own and has(source, "texts"))):
        raise ValueError(_NO_FLIP)
    return Samples(source, fields)


def decoder_feed(
    args: argparse.Namespace,
    processes: Backend,
    *,
    image_size: int,
    takes_image: bool = True,
    takes_text: bool = False,
    longest_text: int = 256,
    tokenize: Callable[[Sequence[str]], Tensor] | None = None,
) -> Feed[ConditionedBatch]:
    """The feed of a script that trains on conditioned images; `widths_of` says how wide its conditions are. The others
    are arguments of `open_conditioned`. Raises what `Feed` raises."""
    source = data_of(args, "image_folder")
    takes = [kind for kind, is_taken in ((IMAGE, takes_image), (TEXT, takes_text)) if is_taken]
    rows = {kind: spec for kind, spec in ((IMAGE, args.image_embeddings), (TEXT, args.text_embeddings)) if spec}
    of_training: dict[str, Any] = {
        "rows": rows, "index_width": args.index_width, "start_shard": args.start_shard, "end_shard": args.end_shard,
        "shard_width": args.shard_width,
    }  # fmt: skip

    def open_set(spec: Spec, **selected: Any) -> Samples:
        return open_conditioned(
            spec, image_size=image_size, takes=takes, tokenize=tokenize, longest_text=longest_text,
            flip=args.random_flip, seed=args.seed, crop=crop_of(args), **selected,
        )  # fmt: skip

    def divide(samples: Samples) -> Split:
        fractions, seed = (args.valid_fraction, args.test_fraction), split_seed_of(args)
        if args.split_by == "sample":
            return split_samples(len(samples), *fractions, seed, args.batch_size)
        if samples.source.shards is None:
            raise ValueError(f"--split_by shard splits by tars, and {str(source)!r} has none: use sample")
        return split_shards(samples.source.shards, *fractions, seed, args.batch_size)

    feed: Feed[ConditionedBatch] = Feed(
        partial(open_set, source, **of_training), args, processes, split_seed=split_seed_of(args), noun="image",
        source=str(source), divide=divide,
        open_valid=partial(open_set, args.valid_folder) if args.valid_folder else None,
    )  # fmt: skip
    with processes.agreement():
        if feed.valid_samples is not None:
            _check_widths(feed.valid_samples, feed.first, args.valid_folder)
    return feed


def widths_of(samples: Samples) -> dict[str, Any]:
    """The shape of what a sample holds of each kind: "image_embed", d; "text_encodings", (L, d); None where a set has
    none or they are not used."""
    shapes = {field.kind: field.shape for field in samples.fields if isinstance(field, EmbeddingField)}
    return {"image_embed": shapes.get(IMAGE, (None,))[0], "text_encodings": shapes.get(TEXT)}


def has(source: Source, name: str) -> bool:
    """Whether any record holds something of this name."""
    return bool((source.sizes(name) >= 0).any())


def _check_widths(valid: Samples, trained: Samples, folder: str) -> None:
    """Raise ValueError if the embeddings to validate are no such as the model is trained on; texts may be shorter or
    longer."""
    for kind in KINDS:
        width, expected = (
            next((field.shape[-1] for field in of.fields if field.wanted == kind.wanted), None)  # type: ignore[attr-defined]
            for of in (valid, trained)
        )
        if width != expected:
            raise ValueError(
                f"{kind.wanted.noun}s of --valid_folder {folder} have {width} numbers, those to train on {expected}: "
                "compute them with the same model"
            )
