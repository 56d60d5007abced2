"""Videos to codes or latents, and back, frame by frame."""

import argparse
import contextlib
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.data.decoding.images import MAX_ASPECT_RATIO
from tandem.data.decoding.videos import open_sound_track
from tandem.data.feed import to_unit_range
from tandem.data.fields import SampleDataset
from tandem.data.sets import open_videos
from tandem.data.stores.codes import FRAME_FOLDER, StoredCodes, code_dtype, decode_videos
from tandem.data.stores.encoding import PIECE_FRAMES, encode_streams
from tandem.data.stores.films import FilmWriter
from tandem.data.stores.latents import DTYPES, FilmLatentWriter, StoredLatents
from tandem.data.stores.writer import Encode, ShardWriter
from tandem.devices import to_device
from tandem.distributed import ProcessGroup
from tandem.io.installed import missing_package
from tandem.io.reading import counted, error_text
from tandem.io.writing import say
from tandem.models.autoencoders.video_tokenizer import VideoTokenizer
from tandem.models.building import require_room
from tandem.models.layers.video.blocks import check_side
from tandem.models.layers.video.causal import StreamState
from tandem.models.layers.video.tiles import apply_in_tiles
from tandem.sides import Sides, height_and_width
from tandem.training.noise import Noise
from tandem.training.visuals.videos import can_write_mp4, check_sound, to_gif, write_mp4

from .base import latent_settings, run_model

DEMO_FRAMES = 41  # of a demonstration clip


class VideoCoder:
    """Videos frame by frame, and images as videos of one frame, through a VideoTokenizer; with the attributes and
    methods of `ImageCoder`."""

    kind = "videos"

    def __init__(self, model: VideoTokenizer, args: argparse.Namespace, processes: ProcessGroup) -> None:
        if model.channels != 3:
            raise ValueError(f"{args.model} has {model.channels} channels, and films have 3")
        if args.format == "mp4" and not can_write_mp4():
            raise missing_package("--format mp4 (gif and png do not)", "av (PyAV) with libx264", "video")
        self._model, self._args, self._processes = model, args, processes
        self._threads = max(1, args.num_workers)
        self.stored: type[StoredCodes] = StoredCodes
        self.writer: Callable[..., ShardWriter] = FilmWriter
        self.ending = FRAME_FOLDER if args.format == "png" else f".{args.format}"
        self.frames_per_code = model.frames_per_code
        self._rates = {"fps": args.fps, "frame_stride": args.frame_stride}
        self.settings = {**self._rates, "frames_per_code": model.frames_per_code}
        if args.keep_aspect:
            self.settings["keep_aspect"] = True
        if args.tile is not None:
            self._check_tile()
            self.settings |= {"tile": args.tile, "tile_overlap": args.tile_overlap}
        if not model.num_codes:
            self.settings |= latent_settings(model, args)
            self.stored = StoredLatents
            self.writer = functools.partial(FilmLatentWriter, Noise(args.seed, "latents of films"))

    def _check_tile(self) -> None:
        """Set the default of --tile_overlap. Raises ValueError, in one line, if tiles do not fit the model."""
        args, pixels = self._args, self._model.pixels_per_code
        check_side("--tile", args.tile, pixels)
        if args.tile_overlap is None:
            args.tile_overlap = max(args.tile // 4 // pixels, min(args.tile // pixels - 1, 1)) * pixels
        if args.tile_overlap % pixels or args.tile_overlap >= args.tile:
            raise ValueError(
                f"--tile_overlap {args.tile_overlap}: give a multiple of {pixels} below --tile {args.tile}"
            )
        if self._model.num_codes and not args.decode:
            raise ValueError(
                "--tile: the codes of neighbouring tiles cannot be blended; leave it out, or give it for --decode"
            )

    def _stream(self, step: Any, pixels: int, scale: Fraction) -> Callable[[Tensor], Tensor]:
        """A new stream: a function from the next inputs to their outputs, in tiles with --tile.

        Args:
            step: The method of the model that does so for an input and a state.
            pixels: Of the film, for which a place of the input stands: 1 for frames.
            scale: Sides of the output / sides of the input.
        """
        if self._args.tile is None:
            return functools.partial(step, state=StreamState())
        side, overlap = self._args.tile // pixels, self._args.tile_overlap // pixels
        return functools.partial(apply_in_tiles, step, states={}, side=side, overlap=overlap, scale=scale)

    def _open_encoding(self) -> Callable[[Tensor], Tensor]:
        model = self._model
        step = model.encode_next if model.num_codes else model.posterior_next
        return functools.partial(self._encode_next, self._stream(step, 1, Fraction(1, model.pixels_per_code)))

    def _open_decoding(self) -> Callable[[Tensor], Tensor]:
        pixels = self._model.pixels_per_code
        return functools.partial(self._decode_next, self._stream(self._model.decode_next, pixels, Fraction(pixels)))

    def _encode_next(self, stream: Callable[[Tensor], Tensor], frames: Tensor) -> Tensor:
        pixels = to_unit_range(to_device(frames, self._processes.device))[None]
        (encoded,) = run_model(self._processes, self._args.precision, "encoding", stream, pixels)
        return encoded if self._model.num_codes else encoded.transpose(0, 1)

    def _decode_next(self, stream: Callable[[Tensor], Tensor], codes: Tensor) -> Tensor:
        model = self._model
        height, width = (side * model.pixels_per_code for side in codes.shape[-2:])
        frames = len(codes) * model.frames_per_code
        require_room(f"{counted(frames, 'frame')} of {width} x {height} pixels", frames, 3, height, width)
        values = (codes if model.num_codes else codes.transpose(0, 1))[None]
        videos = run_model(self._processes, self._args.precision, "decoding", stream, values)
        return videos[0].transpose(0, 1)

    def open(self, sides: Sides) -> tuple[Tensor, dict[str, Any], SampleDataset, Encode]:
        """See `ImageCoder.open`. A row, also for the writer, is [h', w'] of codes or [channels, h', w'] of latents; if
        videos keep their shape, [] or [channels]."""
        model, args = self._model, self._args
        height, width = height_and_width(sides)
        for side in (height, width):
            check_side("--image_size", side, model.pixels_per_code)
        longest = MAX_ASPECT_RATIO * min(height, width) if args.keep_aspect else width
        require_room(f"a piece of a video of {longest} x {height} pixels", PIECE_FRAMES, 3, height, longest)
        # num_frames is the length of the films of demo:moving; `read_frames` reads whole videos.
        videos = open_videos(args.video_folder, image_size=sides, num_frames=DEMO_FRAMES, **self._rates)
        clips: Any = videos.fields[0]
        multiple = model.pixels_per_code if args.keep_aspect else None

        def read_frames(index: int) -> Any:
            return clips.frames(videos.source.record(index), multiple)

        options: dict[str, Any] = {"frames_per_code": model.frames_per_code}
        options |= {"num_threads": self._threads, "keep_aspect": args.keep_aspect}
        options["open_stream"] = self._open_encoding
        channels, _, *places = model.latent_shape(1, height, width)
        grid, dtype = [] if args.keep_aspect else places, str(code_dtype(model.num_codes))
        if not model.num_codes:
            grid, dtype = [2 * channels if args.latent == "moments" else channels, *grid], DTYPES[args.latent_dtype]
        empty = torch.zeros(0, *grid, dtype=getattr(torch, dtype))
        compute = functools.partial(encode_streams, read_frames, **options)
        return empty, {"grid": grid, "dtype": dtype}, videos, compute

    def _write_film(self, file: Any, frames: Any, fps: float, name: str) -> None:
        args = self._args
        if args.format == "gif":
            file.write(to_gif(frames, fps))
            return
        path = Path(args.sound_from, name) if args.sound_from else None
        with open_sound_track(path) if path and _has_good_sound(path) else contextlib.nullcontext() as sound:
            write_mp4(file, frames, fps, sound)

    def _lacks_sound(self, film: Path, name: str) -> bool:
        """Whether a decoded film was written without the sound of its original, which can be read by now."""
        path = Path(self._args.sound_from or "", name)
        return bool(self._args.sound_from) and path.exists() and not _has_sound(film) and _has_good_sound(path)

    def write(self, codes: StoredCodes, shard: int, paths: Sequence[Path]) -> None:
        options: Any = {"write": self._write_film, "lacks_sound": self._lacks_sound, "num_threads": self._threads}
        decode_videos(codes, shard, paths, self._open_decoding, **options)


def _has_sound(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError), open_sound_track(path) as sound:
        return sound is not None
    return False


def _has_good_sound(path: Path) -> bool:
    """Whether a film has a sound that can be read as a whole and written; if it has another one, a line says why not.
    Raises ValueError, in one line, if the file cannot be opened."""
    try:
        with open_sound_track(path) as sound:
            if sound:
                check_sound(sound)
            return sound is not None
    except OSError as error:
        raise ValueError(f"cannot read the sound of {path}: {error_text(error)}") from None
    except ValueError as error:
        say(f"cannot read the sound of {path}: {error_text(error)}; the film has no sound")
        return False
