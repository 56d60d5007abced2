"""Images with what a model is conditioned on: captions, embeddings or tokens; and the feed of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor

from ..contracts import Processes, skipped_of
from ..crops import CENTER, Crop, crop_of
from ..feed import Feed, split_seed_of
from ..files.opening import demonstration_size
from ..order import Split, split_samples, split_shards
from ..own import OwnData, data_of
from ..stream import collate_entries
from .captioned import ALL_SHARDS, Captioned, Shards, open_captioned
from .embeddings import IMAGE, KINDS, TEXT, Embeddings
from .own import OwnConditionedImages
from .scenes import Scenes

Tokenize = Callable[[Sequence[str]], Tensor]  # b texts -> int64 (b, number of tokens)

# Flags of files with rows of embeddings, by the batch's entry.
_FLAGS = {IMAGE.key: "--image_embeddings", TEXT.key: "--text_embeddings"}
_NO_FLIP = "--random_flip would make captions and embeddings wrong, which are of images as they are"


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


class Widths(TypedDict):
    """image_embed: d; text_encodings: (L, d); None where a set has none or they are not used."""

    image_embed: int | None
    text_encodings: tuple[int, int] | None


class ConditionedImages:
    """Images, each with its caption and with embeddings or the tokens of its caption. See `Samples` for the methods."""

    def __init__(
        self, images: Captioned, embeddings: Mapping[str, Embeddings], tokenize: Tokenize | None = None
    ) -> None:
        self.images, self._embeddings, self._tokenize = images, dict(embeddings), tokenize
        self.describe, self.skipped = images.describe, skipped_of(images)
        self.fingerprint = "".join((images.fingerprint, *(found.fingerprint for found in embeddings.values())))

    @property
    def widths(self) -> Widths:
        """The shape of what `load` gives of each kind."""
        shapes: dict[str, Any] = {key: embeddings.shape for key, embeddings in self._embeddings.items()}
        return {"image_embed": shapes.get(IMAGE.key, (None,))[0], "text_encodings": shapes.get(TEXT.key)}

    def __len__(self) -> int:
        return len(self.images)

    def load(self, index: int, epoch: int = 0, augment: bool = False) -> dict[str, Any]:
        """The sample's part of each entry of a `ConditionedBatch`. Raises OSError, ValueError or `Incomplete` if a part
        cannot be read or is missing."""
        found = {key: embeddings.load(index) for key, embeddings in self._embeddings.items()}
        caption = self.images.caption(index)
        if self._tokenize:
            found["tokens"] = self._tokenize([caption])[0]
        return {"images": self.images.load(index, epoch, augment), "captions": caption, **found}


def open_conditioned(
    spec: str | OwnData | None,
    *,
    image_size: int,
    takes_image: bool,
    takes_text: bool,
    shards: Shards = ALL_SHARDS,
    tokenize: Tokenize | None = None,
    longest_text: int = 256,
    flip: bool = False,
    seed: int = 0,
    crop: Crop = CENTER,
) -> ConditionedImages | OwnConditionedImages:
    """Open a set of images with what a model is conditioned on.

    - `demo:shapes` (also None), `demo:shapes:<number of images>`: see `scenes`;
    - webdataset tars of images, each with a .txt and perhaps embeddings (see `embeddings`): one .tar, a folder of tars,
      a pattern (`tars/*.tar`), a range (`{000..010}.tar`), or a path with `{}` for the number;
    - a folder of images, with the same files beside each;
    - Arrow or parquet files of images and captions, or a folder of them (see `data.files.tables`);
    - a user's own dataset (`OwnData`).

    Args:
        takes_image: Whether the model takes image embeddings.
        takes_text: Whether it takes text encodings.
        tokenize: Gives the tokens of captions, if embeddings are computed from these and the images; stored embeddings
            are then not read.
        longest_text: The most tokens that the model takes.
        flip: Half of the augmented images are mirrored, which captions and stored embeddings do not allow.
        crop: What is cut out of augmented images, but for the demonstration.

    Raises ValueError, in one line, if there is no such set, it lacks what the model takes, or flags contradict it.
    """
    spec = "demo:shapes" if spec is None else spec
    takes = {IMAGE.key: takes_image, TEXT.key: takes_text}
    if isinstance(spec, OwnData):
        if shards != ALL_SHARDS:
            raise ValueError(f"--dataset {spec} holds its embeddings and has no shards: leave out the flags about them")
        if flip and (takes_image or takes_text):
            raise ValueError(_NO_FLIP)
        return OwnConditionedImages(
            spec, image_size=image_size, takes=takes, tokenize=tokenize, longest_text=longest_text, flip=flip,
            seed=seed, crop=crop,
        )  # fmt: skip
    images: Captioned
    if (n := demonstration_size(spec, "shapes", "images")) is not None:
        if shards != ALL_SHARDS:
            raise ValueError(f"{spec} has no shards: leave out the flags that select or describe them")
        images = Scenes(n, image_size=image_size, flip=flip, seed=seed)
    else:
        images = open_captioned(spec, image_size=image_size, shards=shards, flip=flip, seed=seed, crop=crop)
    for key, (flag, _) in shards.embeddings.items():
        if tokenize or not takes[key]:
            why = "--clip computes embeddings itself" if tokenize else "the model does not take them"
            raise ValueError(f"{flag} has no use: {why}; leave it out")
    embeddings: dict[str, Embeddings] = {}
    for kind in KINDS:
        if takes[kind.key] and not tokenize:
            found = images.embeddings(kind)
            if found is None:
                raise ValueError(
                    f"the model takes {kind.noun}s, and {spec!r} has none: put KEY{kind.endings[0]} beside each image, "
                    f"give {_FLAGS[kind.key]}, or compute them with --clip and --clip_weights"
                )
            embeddings[kind.key] = found
    if TEXT.key in embeddings and embeddings[TEXT.key].shape[0] > longest_text:
        n_tokens = embeddings[TEXT.key].shape[0]
        raise ValueError(f"texts of {n_tokens} tokens are longer than --max_text_len {longest_text}: raise it")
    if flip and (embeddings or images.has_captions):
        raise ValueError(_NO_FLIP)
    return ConditionedImages(images, embeddings, tokenize)


def decoder_feed(
    args: argparse.Namespace,
    processes: Processes,
    *,
    image_size: int,
    takes_image: bool = True,
    takes_text: bool = False,
    longest_text: int = 256,
    tokenize: Tokenize | None = None,
) -> Feed[ConditionedBatch]:
    """The feed of a script that trains on conditioned images; its `samples.widths` are the widths of the conditions.

    `args` are `ConditionedImageFlags` (`data/flags.py`) and `RunFlags` (`training/flags/shared.py`), the others as for
    `open_conditioned`. Raises what `Feed` raises.
    """
    urls = {IMAGE.key: args.image_embeddings, TEXT.key: args.text_embeddings}
    rows = {key: (_FLAGS[key], url) for key, url in urls.items() if url}
    shards = Shards(args.start_shard, args.end_shard, args.shard_width, args.index_width, rows)

    source = data_of(args, "image_folder")

    def open_set(spec: str | OwnData = source, shards: Shards = shards) -> ConditionedImages | OwnConditionedImages:
        return open_conditioned(
            spec, image_size=image_size, takes_image=takes_image, takes_text=takes_text, shards=shards,
            tokenize=tokenize, longest_text=longest_text, flip=args.random_flip, seed=args.seed, crop=crop_of(args),
        )  # fmt: skip

    def open_valid() -> ConditionedImages | OwnConditionedImages:
        return open_set(args.valid_folder, ALL_SHARDS)  # the flags of shards and rows are about those to train on

    def divide(samples: ConditionedImages | OwnConditionedImages) -> Split:
        fractions, seed = (args.valid_fraction, args.test_fraction), split_seed_of(args)
        if args.split_by == "sample":
            return split_samples(len(samples), *fractions, seed, args.batch_size)
        if samples.images.shards is None:
            raise ValueError(f"--split_by shard splits by tars, and {str(source)!r} has none: use sample")
        return split_shards(samples.images.shards, *fractions, seed, args.batch_size)

    feed: Feed[ConditionedBatch] = Feed(
        open_set, args, processes, split_seed=split_seed_of(args), noun="image", source=str(source),
        collate=collate_entries, divide=divide, open_valid=open_valid if args.valid_folder else None,
    )  # fmt: skip
    with processes.agreement():
        if args.valid_folder:
            _check_widths(feed.valid_samples, feed.first, args.valid_folder)
    return feed


def _check_widths(valid: Any, trained: Any, folder: str) -> None:
    """Raise ValueError if the embeddings to validate are no such as the model is trained on; texts may be shorter or
    longer."""
    for kind, *pair in zip(KINDS, *([of.widths[kind.key] for kind in KINDS] for of in (valid, trained)), strict=True):
        width, expected = (size[-1] if isinstance(size, tuple) else size for size in pair)
        if width != expected:
            raise ValueError(
                f"{kind.noun}s of --valid_folder {folder} have {width} numbers, those to train on {expected}: compute "
                "them with the same model"
            )
