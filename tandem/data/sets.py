"""The data sets of the scripts, the fields of each and their source; and the scripts' feeds (`TrainingData`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tandem.data.decoding.images import CENTER, Crop
from tandem.data.sources.demo.source import DemoSource, demo_name, open_demo
from tandem.data.sources.demo.tones import check_sound
from tandem.data.sources.opening import open_source
from tandem.data.sources.record import FieldSpec, RecordSource
from tandem.data.sources.rows import Rows
from tandem.data.sources.user_dataset import DatasetSpec, UserDatasetSource, data_of
from tandem.io.installed import require_packages
from tandem.sides import Sides, height_and_width, sides_text

from .decoding import sounds, videos
from .embeddings import IMAGE, KINDS, TEXT, EmbeddingField, Kind, embedding_field, embedding_rows
from .feed import TrainingData
from .fields import (
    CLASS_KEYS,
    ClassesField,
    ClipField,
    Field,
    ImageCaptionField,
    ImageField,
    OneFrameField,
    SampleDataset,
    SoundCaptionsField,
    SoundField,
    TextsField,
)
from .tokenizers import Tokenizer

if TYPE_CHECKING:
    from tandem.distributed import ProcessGroup

Spec = str | DatasetSpec | None

_LARGEST_CLIP_BYTES = 1 << 32
_NO_FLIP = "--random_flip would make captions and embeddings wrong: they describe the images that are not mirrored"


def open_records(spec: Spec, field_specs: Sequence[FieldSpec], kind: str, seed: int, **tar_range: Any) -> RecordSource:
    """The source of a flag's value: `demo:<name>` or `demo:<name>:<number>`; a user's own dataset (`DatasetSpec`); or a
    path, see `open_source`. None stands for the demonstration of this `kind`. No sample is opened.

    Args:
        field_specs: What the fields read; each file or row with content for field_specs[0] is a sample.
        kind: The kind of demonstration, see `DemoSource`.
        tar_range: The selection of tars, or the folder of a manifest's files, see `open_source`.

    Raises ValueError, in one line, if there is no such set or nothing in it.
    """
    if isinstance(spec, DatasetSpec):
        return UserDatasetSource(spec)
    demo = demo_name(kind)
    return open_demo(spec or demo, kind, seed) or open_source(str(spec), field_specs, demo=demo, **tar_range)


def _open_feed(
    open_set: Callable[..., SampleDataset],
    args: Any,
    processes: ProcessGroup,
    flag: str,
    noun: str,
    train_options: Mapping[str, Any] = {},
    **feed_options: Any,
) -> TrainingData:
    """The feed of a script. It trains on the set that --dataset, or else the flag named `flag`, gives, which `open_set`
    opens with `train_options`. It validates on the set of --valid_folder, if there is one, opened without them."""
    spec = data_of(args, flag)
    open_valid = partial(open_set, args.valid_folder) if args.valid_folder else None
    feed_options = {"source": str(spec), "noun": noun, "open_valid": open_valid, **feed_options}
    return TrainingData(partial(open_set, spec, **train_options), args, processes, **feed_options)


def open_images(spec: Spec, field: type[ImageField] = ImageField, **options: Any) -> SampleDataset:
    """A set of images: see `open_records` for `spec` and what is raised, and `ImageField` for the arguments."""
    fields = [field(**options)]
    return SampleDataset(open_records(spec, [fields[0].spec], "shapes", fields[0].seed), fields)


def image_opener(args: Any, **options: Any) -> Callable[..., SampleDataset]:
    """A function that opens sets of images by the flags of a run; `options`: further arguments of `ImageField`."""
    return partial(open_images, **_picture_options(args, args.image_size), **options)


def image_data(args: Any, processes: ProcessGroup) -> TrainingData:
    """The feed of a script that trains on images. Raises what `TrainingData` raises."""
    return _open_feed(image_opener(args, channels=args.channels), args, processes, "image_folder", "image")


def _picture_options(args: Any, image_size: Sides) -> dict[str, Any]:
    """The arguments of `ImageField` and `videos.ClipDecoder` that follow from the flags."""
    crop = Crop(args.crop, args.crop_area, args.seed)
    return {"image_size": image_size, "flip": args.random_flip, "seed": args.seed, "crop": crop}


def open_videos(
    spec: Spec, *, image_size: Sides, num_frames: int, flip: bool = False, channels: int = 3, **options: Any
) -> SampleDataset:
    """A set of clips, "videos", in which an image is a video of one frame: see `open_records` for `spec` and what is
    raised, `ClipField` for `flip` and `channels`, and `videos.ClipDecoder` for the others."""
    if channels != 3 and not isinstance(spec, DatasetSpec):
        raise ValueError(
            f"films have 3 channels, and the model takes {channels}: only a run's --dataset can have others"
        )
    if (n_bytes := channels * num_frames * math.prod(height_and_width(image_size))) > _LARGEST_CLIP_BYTES:
        text = f"a clip of {num_frames} frames of {sides_text(image_size)} pixels takes {n_bytes / 1e9:.3g} GB"
        raise ValueError(f"{text}: lower one of them")
    clips = videos.ClipDecoder(image_size, num_frames, **options)
    fields = [ClipField(clips, flip, channels)]
    source = open_records(spec, [fields[0].spec], "moving", clips.seed)
    if not isinstance(source, DemoSource | UserDatasetSource):
        require_packages("reading video files (PyAV)", "av", extra="video")
    return SampleDataset(source, fields)


def video_opener(args: Any) -> Callable[..., SampleDataset]:
    """A function that opens sets of clips by the flags of a run."""
    names = ("num_frames", "fps", "frame_stride", "short_clips", "clip_starts", "channels")
    clip_options = {name: getattr(args, name) for name in names}
    return partial(open_videos, **_picture_options(args, args.image_size), **clip_options)


def video_data(args: Any, processes: ProcessGroup) -> TrainingData:
    """The feed of a script that trains on videos: with `--image_folder`, every `--image_every`-th update is a batch of
    images, as clips of one frame. Validation is of videos only. Raises what `TrainingData` raises."""
    feed_options = dict[str, Any]()
    if args.image_folder:
        sources = f"{data_of(args, 'video_folder')} and {args.image_folder}"
        open_second = partial(image_opener(args, channels=args.channels), args.image_folder, OneFrameField)
        feed_options = {"open_second": open_second, "second_every": args.image_every, "source": sources}
    return _open_feed(video_opener(args), args, processes, "video_folder", "clip", **feed_options)


def open_sounds(
    spec: Spec, *, sample_rate: int, clip_seconds: float, tokenizer: Tokenizer | None = None, seed: int = 0
) -> SampleDataset:
    """A set of sounds, "waveforms", and, with a tokenizer, their texts: see `open_records` for `spec` and what is
    raised, `SoundField` and `TextsField`. With a tokenizer, a set without any caption is refused."""
    clip_samples = round(clip_seconds * sample_rate)
    if not (sample_rate > 0 and clip_samples > 0):
        raise ValueError(f"there is no sample in a clip of {clip_seconds:g} s at {sample_rate} Hz")
    fields: list[Field] = [SoundField(sounds.ClipDecoder(sample_rate, clip_samples, seed))]
    if tokenizer:
        fields.append(TextsField(tokenizer, seed))
    source = _open_sound_source(spec, fields, seed)
    if isinstance(source, DemoSource):
        check_sound(sample_rate, clip_samples)
    if tokenizer and not isinstance(source, UserDatasetSource) and not source.examples("texts"):
        raise ValueError(
            f"no sound of the {len(source)} in {spec!r} has a caption: beside {source.describe(0)!r} there has "
            "to be a .txt of the same name (a caption per line) or a .json; in a table or manifest, a column caption, "
            f"captions, text or caption_1{source.skipped and f'; {source.skipped}'}"
        )
    return SampleDataset(source, fields)


def open_sounds_in_clips(spec: str, clips: sounds.ClipDecoder, max_clips: int) -> SampleDataset:
    """A set of sounds, of each at most `max_clips` clips, and of their captions: see `open_records` for `spec` and what
    is raised, and `SoundField`."""
    fields = [SoundField(clips, max_clips), SoundCaptionsField()]
    return SampleDataset(_open_sound_source(spec, fields), fields)


def open_classified_sounds(spec: str, clips: sounds.ClipDecoder, max_clips: int, folder: str | None) -> SampleDataset:
    """A set of sounds, of each at most `max_clips` clips, and of their classes: see `open_records` for `spec` and what
    is raised. A set without any class is refused. `folder`: that of a manifest's files, None for its own."""
    fields = [SoundField(clips, max_clips), ClassesField()]
    source = _open_sound_source(spec, fields, folder=folder)
    classes: Sequence[Any] = source.columns[ClassesField.spec] if isinstance(source, Rows) else source.examples("texts")
    if not {*classes} - {"fold"}:
        raise ValueError(f"no sound in {spec!r} has a class: in a column or a .json, {' or '.join(CLASS_KEYS)}")
    return SampleDataset(source, fields)


def _open_sound_source(spec: Spec, fields: Sequence[Field], seed: int = 0, **options: Any) -> RecordSource:
    source = open_records(spec, [field.spec for field in fields], "tones", seed, **options)
    if not isinstance(source, DemoSource):
        sounds.require_decoders()
    return source


def sound_data(args: Any, processes: ProcessGroup, tokenizer: Tokenizer) -> TrainingData:
    """The feed of a script that trains on sounds and captions. Raises what `TrainingData` raises."""
    options = {"sample_rate": args.sample_rate, "clip_seconds": args.clip_seconds, "seed": args.seed}
    return _open_feed(partial(open_sounds, **options, tokenizer=tokenizer), args, processes, "audio_data", "sound")


def open_conditioned(
    spec: Spec,
    *,
    image_size: int,
    kinds: Sequence[Kind] = (),
    tokenize: Callable[[Sequence[str]], Tensor] | None = None,
    rows: dict[Kind, str] = {},  # noqa: B006  (nothing changes it)
    index_width: int = 4,
    longest_text: int = 256,
    flip: bool = False,
    seed: int = 0,
    crop: Crop = CENTER,
    **tar_range: Any,
) -> SampleDataset:
    """A set of "images" with "captions" and the conditions of a model: see `open_records` for `spec` and
    `tar_range`. Images whose shorter side has fewer than `image_size` pixels are `SampleIncomplete`, and random
    crops have at least as many: a generative model would learn the blur of enlarged images.

    Args:
        kinds: The kinds of embeddings that the model takes.
        tokenize: Captions -> tokens, if the run computes embeddings from captions and images; stored ones are then not
            read.
        rows: Files of rows of embeddings, see `embedding_rows`.
        longest_text: The most tokens that the model takes.
        flip: Mirror half of the images that are trained on; not allowed with captions or stored embeddings.

    Raises ValueError, in one line, if there is no such set, it lacks what the model takes, or flags contradict it.
    """
    crop = dataclasses.replace(crop, min_side=image_size)
    image = ImageField(image_size, flip=flip, seed=seed, enlarge=False, crop=crop)
    fields: list[Field] = [image, ImageCaptionField(tokenize)]
    stored_kinds = [] if tokenize else [kind for kind in kinds if kind not in rows]
    field_specs = [*(field.spec for field in fields), *(kind.spec for kind in stored_kinds)]
    source = open_records(spec, field_specs, "scenes", seed, **tar_range)
    selects_shards = tar_range.get("start_shard") or tar_range.get("end_shard") is not None
    if selects_shards and isinstance(source, DemoSource | UserDatasetSource):
        raise ValueError(f"{spec} has no shards: leave out the flags that select or describe them")
    for kind in [] if tokenize else kinds:
        in_rows = embedding_rows(source, kind, rows[kind], index_width=index_width) if kind in rows else None
        embedding = in_rows or embedding_field(source, kind, longest_text)
        if embedding is None:
            raise ValueError(
                f"the model takes {kind.spec.noun}s, and {spec!r} has none: put KEY{kind.spec.endings[0]} beside "
                f"each image, give {kind.flag}, compute them with --clip, or train without by --condition_on none"
            )
        if kind == TEXT and (n_tokens := embedding.shape[0]) > longest_text:
            raise ValueError(f"texts of {n_tokens} tokens are longer than --max_text_len {longest_text}: raise it")
        fields.append(embedding)
    is_user_dataset = isinstance(source, UserDatasetSource)
    if flip and ((kinds and not tokenize) or (not is_user_dataset and source.examples("texts"))):
        raise ValueError(_NO_FLIP)
    return SampleDataset(source, fields)


def decoder_data(
    args: Any,
    processes: ProcessGroup,
    *,
    image_size: int,
    takes_image: bool = True,
    takes_text: bool = False,
    **options: Any,
) -> TrainingData:
    """The feed of a script that trains on images with conditions. `widths_of(feed.first_samples)` gives their widths.
    `options`: "longest_text" and "tokenize", see `open_conditioned`. Raises what `TrainingData` raises."""
    kinds = [kind for kind, is_taken in ((IMAGE, takes_image), (TEXT, takes_text)) if is_taken]
    rows = {kind: spec for kind, spec in ((IMAGE, args.image_embeddings), (TEXT, args.text_embeddings)) if spec}
    names = ("index_width", "start_shard", "end_shard", "shard_width")
    train_options = {"rows": rows, **{name: getattr(args, name) for name in names}}
    open_set = partial(open_conditioned, **_picture_options(args, image_size), kinds=kinds, **options)
    feed = _open_feed(open_set, args, processes, "image_folder", "image", train_options)
    with processes.raise_on_all_ranks():
        if feed.valid_samples is not None:
            _check_widths(feed.valid_samples, feed.first_samples, args.valid_folder)
    return feed


def widths_of(samples: SampleDataset) -> dict[str, Any]:
    """The shape of each condition of a sample: "image_embed", d; "text_encodings", (L, d); None where a set has none or
    they are not used."""
    shapes = _embedding_shapes(samples)
    return {"image_embed": shapes.get(IMAGE, (None,))[0], "text_encodings": shapes.get(TEXT)}


def _embedding_shapes(samples: SampleDataset) -> dict[Kind, tuple[Any, ...]]:
    return {field.kind: field.shape for field in samples.fields if isinstance(field, EmbeddingField)}


def _check_widths(valid: SampleDataset, trained: SampleDataset, folder: str) -> None:
    """Raise ValueError if embeddings of the validation set have another width than those of the training set."""
    for kind in KINDS:
        width, expected = (_embedding_shapes(samples).get(kind, (None,))[-1] for samples in (valid, trained))
        if width != expected:
            raise ValueError(
                f"{kind.spec.noun}s of --valid_folder {folder} have {width} numbers, those to train on {expected}: "
                "compute them with the same model"
            )
