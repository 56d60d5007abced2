"""Measure trained autoencoders on images or videos: how near reconstructions are to the originals, and how much of the
codebook is used.

    python evaluate.py --model runs/vqgan --image_folder photos/ --fid_weights published --lpips_weights published
    torchrun --nproc_per_node 8 evaluate.py --compare runs/a runs/b vae.pt --image_folder photos/ --output eval.json
    deepspeed evaluate.py --model runs/tokenizer --video_folder clips/ --fvd_weights i3d.pt
    horovodrun -np 8 python evaluate.py --model runs/tokenizer --image_folder photos/

The values are the same, to the last bit, for every launcher and any number of processes: batches do not depend on it,
and sums are exact. docs/evaluation.md says how everything is measured, and how papers do it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import distributed
from hub import fetch
from tandem.converters import FILE, FOLDER, PATH, frame_rate, pixels, positive_int, size
from tandem.fields import flag, given, without
from training.flags.parser import ArgumentParser
from training.flags.shared import add_computation_arguments, kernel_settings

if TYPE_CHECKING:  # importing PyTorch takes seconds: functions do it after the arguments have been checked
    from torch import Tensor

    from data.samples import Samples
    from training.measures.fid import Gaussian

SHOWN = 6  # samples in the picture
# What the table shows, by the names in the JSON file.
HEADINGS = {
    "rfid": "rFID", "rfvd": "rFVD", "inception_score": "IS", "psnr": "PSNR", "ssim": "SSIM", "lpips": "LPIPS",
    "dpsnr": "PSNR of motion", "flicker": "flicker", "codes_used": "codes used", "perplexity": "perplexity",
    "samples_per_second": "per second",
}  # fmt: skip
_OF_IMAGES, _OF_VIDEOS = given("image_folder", "PATH"), given("video_folder", "PATH")


@dataclass
class Config:
    """What is measured, on what and how."""

    # fmt: off
    model: str | None = flag(None, "a trained autoencoder: a run, a checkpoint, its model/ folder, a public package's "
        "file, or USER/NAME of the Hugging Face Hub", FOLDER, title="what is measured")
    compare: list[str] | None = flag(None, "several models, a row each", FOLDER, nargs="+")
    image_folder: str | None = flag(None, "images: a folder, nested as you like, webdataset tars, tables, a manifest; "
        "demo:shapes draws its own", PATH)
    video_folder: str | None = flag(None, "videos: the same; the clip in the middle of each is measured", PATH)
    output: str | None = flag(None, "write the values to this FILE.json, and beside it FILE.png: the samples in which "
        "the models differ most, or that a single model makes worst, under their originals", FILE)
    image_size: int | None = flag(None, "resize the shorter side to this and crop the centre (default: the models')",
        pixels, title="how")
    num_frames: int = flag(17, "frames of a clip", size, needs=_OF_VIDEOS)
    fps: float | None = flag(None, "frames per second (default: all of the file)", frame_rate, needs=_OF_VIDEOS)
    frame_stride: int = flag(1, "take every N-th frame of a video", positive_int, needs=(_OF_VIDEOS, without("fps")))
    fid_weights: str | None = flag(None, "report rFID and inception score by these weights (pt_inception-2015-12-05): "
        "a file, or published, which fetches them", FILE, needs=_OF_IMAGES)
    fvd_weights: str | None = flag(None, "report rFVD by these weights of I3D (a plain state dict)", FILE,
        needs=_OF_VIDEOS)
    lpips_weights: str | None = flag(None, "report LPIPS by these weights: a file, a folder, or published", FILE)
    # fmt: on

    @classmethod
    def settle(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        parser.choose(args, model=None, compare=None)
        parser.choose(args, image_folder=None, video_folder=None)
        args.models, args.fresh, args.data = args.compare or [args.model], False, args.image_folder or args.video_folder
        if not args.models[0] or not args.data:
            parser.error("give --model or --compare, and --image_folder or --video_folder")
        if args.output and not args.output.endswith(".json"):
            parser.error(f"--output {args.output} is not a FILE.json")


def build_parser() -> ArgumentParser:
    text = "Measure trained autoencoders on images or videos."
    parser = ArgumentParser("evaluate.py", text, is_root=distributed.launched_as_root)
    parser.usage = "%(prog)s (--model DIR | --compare DIR ...) (--image_folder PATH | --video_folder PATH) [flags]"
    parser.add_config(Config)
    add_computation_arguments(parser, batch_size=32, unit="SAMPLES", num_workers_help="loader processes per process")
    distributed.add_arguments(parser, trains=False)
    return parser


def reconstructed(model: Any, samples: Tensor, backend: distributed.Backend) -> tuple[Tensor, Tensor]:
    """Reconstructions of images or videos in [0, 1], in the precision of the run, and their codes, if there are any."""
    import torch

    backend.mark("reconstructing")
    with torch.no_grad(), backend.autocast():
        if type(model).__name__ == "DiscreteVAE":  # its forward pass has soft codes
            return model.decode(codes := model.encode(samples)), codes
        out = model(samples)
        return out.reconstruction, torch.zeros(0, dtype=torch.int64) if out.codes is None else out.codes


def open_models(args: argparse.Namespace, backend: distributed.Backend) -> tuple[dict[str, Any], dict[str, str]]:
    """The models by the names that the user gives them, on the device of the run, and the SHA-256 of their weights.
    Sets args.image_size. Raises ValueError, in one line, if there is none or one does not take such samples."""
    import torch

    from models.files.building import require_room
    from models.video.layers import check_frames
    from trained import open_model

    kinds = ("VideoTokenizer",) if args.video_folder else ("DiscreteVAE", "VQGAN", "VideoTokenizer")
    found = {name: open_model(name, *kinds) for name in args.models}
    models = {name: each.model.to(backend.device).requires_grad_(False) for name, each in found.items()}
    sides, channels = ({getattr(model, name) for model in models.values()} for name in ("image_size", "channels"))
    if len(channels) > 1 or (len(sides) > 1 and not args.image_size):
        raise ValueError(f"the models are of images of {sides} pixels and {channels} channels: give --image_size")
    args.image_size, (args.channels,) = args.image_size or sides.pop(), channels
    shape = (args.channels, *([args.num_frames] if args.video_folder else []), args.image_size, args.image_size)
    require_room(f"a batch of {args.batch_size}", args.batch_size, *shape)
    for name, model in models.items():
        try:
            if args.video_folder:
                check_frames(args.num_frames, model.frames_per_code)
            reconstructed(model, torch.zeros(1, *shape, device=backend.device), backend)
        except ValueError as error:
            raise ValueError(f"{name} takes no such samples: {error}") from None
    return models, {name: each.about["weights_sha256"] for name, each in found.items()}


def open_samples(args: argparse.Namespace) -> tuple[Samples, str]:
    """The samples, and in words what they are and how they are prepared. Raises ValueError, in one line."""
    from data.sets import open_images, open_videos

    side = args.image_size
    how = f"the shorter side resized to {side} pixels (bilinear, antialiased), {side} x {side} cropped from the centre"
    if args.image_folder:
        samples = open_images(args.image_folder, image_size=side, channels=args.channels)
        return samples, f"{len(samples)} images of {args.data}: {how}"
    speed = {"fps": args.fps, "frame_stride": args.frame_stride}
    samples = open_videos(args.video_folder, image_size=side, num_frames=args.num_frames, **speed)
    frames = f"{args.num_frames} frames in the middle" + (f" at {args.fps:g} per second" if args.fps else "")
    return samples, f"{len(samples)} videos of {args.data}: {frames}, {how}"


def load_batch(samples: Samples, indices: range) -> tuple[list[int], list[Tensor], list[Any]]:
    """Which samples with these indices can be read, these, and those that cannot."""
    from data.bad_samples import BadSample, reason_of

    found, bad = dict[int, Any](), []
    for index in indices:
        try:
            (found[index],) = samples.load(index).values()
        except (OSError, ValueError) as error:
            bad.append(BadSample(index, samples.describe(index), reason_of(error)))
    return list(found), list(found.values()), bad


def go_through(
    samples: Samples, args: argparse.Namespace, backend: distributed.Backend, doing: str, use: Callable[..., None]
) -> None:
    """Call `use` with the indices and pixels, uint8 (b, ...), of each batch of this process. Collective. Raises
    UserMistake, in one line, if too many samples cannot be read; AskedToStop after a signal."""
    import torch

    from data.bad_samples import BadSampleLog
    from data.workers import Loader
    from tandem.files.exits import AskedToStop

    n, rank, world, bad, said = len(samples), backend.rank, backend.world_size, [], time.monotonic()
    batches = [range(first, min(first + args.batch_size, n)) for first in range(0, n, args.batch_size)]
    loaded = iter(Loader(partial(load_batch, samples), batches[rank::world], args.num_workers))
    for done in range(0, len(batches), world):
        if backend.stop_requested(now=True):
            backend.say("asked to stop, with nothing written; the same command starts over")
            raise AskedToStop
        if time.monotonic() - said > 30:
            said = time.monotonic()
            backend.say(f"{doing}: {done * args.batch_size} of {n}")
        with backend.agreement():
            if done + rank < len(batches):
                indices, found, broken = next(loaded)
                bad += broken
                if found:
                    use(indices, torch.stack(found))
    log = BadSampleLog(n)
    for sample in log.share(bad, backend.gather_objects):
        backend.say(f"cannot read {sample}; it is left out".encode(errors="backslashreplace").decode())
    with backend.agreement():
        log.check()
        if n - log.count < 2:
            raise ValueError(f"{n - log.count} samples of {args.data} could be read: give at least 2, better thousands")


def reference(
    features: Any, dim: int, key: Sequence[str], again: Callable[..., None], backend: distributed.Backend
) -> Gaussian | None:
    """The distribution of the originals' features: what an earlier command has kept of this key, on the root alone, or
    what `again`, which goes through all samples, makes of them. Collective."""
    import torch
    from safetensors.torch import load, save

    from data.feed import to_unit_range
    from tandem.files.reading import DAMAGES, read_bytes
    from tandem.files.writing import write_atomically
    from training.measures.exact import on_grid
    from training.measures.fid import FrechetStatistics, Gaussian

    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path, kept = Path(torch.hub.get_dir()) / "statistics" / f"{name}.safetensors", dict[str, Tensor]()
    if backend.is_root:
        with contextlib.suppress(*DAMAGES):
            kept = load(read_bytes(path, 1 << 28))
    if backend.broadcast_object(bool(kept)):
        backend.say(f"the originals' statistics were kept before: {path}")
        return Gaussian(kept["mean"], kept["covariance"]) if kept else None
    statistics = FrechetStatistics(dim, backend.device)

    def use(indices: Sequence[int], batch: Tensor) -> None:
        backend.mark("judging originals")
        statistics.add(on_grid(features(to_unit_range(batch.to(backend.device)))))

    again("judged originals", use)
    found = Gaussian(*(part.cpu() for part in statistics.result(backend.sum)))
    if backend.is_root:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save({"mean": found.mean, "covariance": found.covariance}))
        except OSError as error:
            backend.say(f"the originals' statistics cannot be kept: {error}")
    return found


def evaluate(args: argparse.Namespace, backend: distributed.Backend) -> None:
    """Measure the models and say what was found. Raises AskedToStop after a signal."""
    import torch

    from data.feed import to_unit_range
    from data.stores.output import sha256_of
    from models.files.published import INCEPTION, PUBLISHED, weights_of
    from models.i3d import I3D_DIM, i3d_features
    from models.perceptual import load_lpips
    from tandem.files.fetching import fetched
    from training.measures.exact import InceptionScore, on_grid
    from training.measures.fid import FrechetStatistics, Gaussian, Inception, frechet_distance
    from training.measures.reconstruction import ReconstructionQuality, psnr
    from training.measures.videos import VideoQuality

    for name in args.models:
        fetch(name, backend)
    with backend.agreement():
        if args.output and not Path(args.output).absolute().parent.is_dir():
            raise ValueError(f"--output {args.output}: there is no such folder")
        models, about = open_models(args, backend)
        mark = partial(backend.mark, "fetching weights")
        lpips = load_lpips(args.lpips_weights, args.image_size, backend.device, mark)
        weights = fetched(INCEPTION, mark) if args.fid_weights == PUBLISHED else args.fid_weights or args.fvd_weights
        features: Any = i3d_features(args.fvd_weights, args.num_frames, backend.device)
        if args.fid_weights:
            features = Inception(weights_of(INCEPTION, str(weights), mark), backend.device)
        weights_sha256 = sha256_of([Path(weights)]) if weights else None
        backend.working("listing the samples")
        samples, prepared = open_samples(args)
    backend.say(prepared)
    device, dim = backend.device, Inception.dim if args.image_folder else I3D_DIM
    make: Any = ReconstructionQuality if args.image_folder else partial(VideoQuality, num_frames=args.num_frames)
    quality = {name: make(model.num_codes, device=device, losses=(), lpips=lpips) for name, model in models.items()}
    made_of = {name: FrechetStatistics(dim, device) for name in models if features}
    scores = {name: InceptionScore(features.logits, device) for name in models if args.fid_weights}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    each: list[list[float]] = []  # of a sample: its index, a checksum of its pixels, and each model's PSNR

    def use(indices: Sequence[int], batch: Tensor) -> None:
        originals, near = to_unit_range(batch.to(device)), []
        for name, model in models.items():
            started = time.perf_counter()
            made, codes = reconstructed(model, originals, backend)
            near.append(psnr(originals, made).tolist())  # waits for the device
            seconds[name].append((time.perf_counter() - started) / len(batch))
            backend.mark("judging")
            quality[name].add(originals, made, codes.to(device))
            if features:
                vectors = features(made)
                made_of[name].add(on_grid(vectors))
                if name in scores:
                    scores[name].add(vectors)
        sums = [zlib.crc32(pixels.numpy()) for pixels in batch]
        each.extend(map(list, zip(indices, sums, *near, strict=True)))

    again = partial(go_through, samples, args, backend)
    with torch.no_grad():
        again("measured", use)
        everything = sorted(row for of_rank in backend.gather_objects(each) for row in of_rank)
        pixels_sha256 = hashlib.sha256(json.dumps([row[:2] for row in everything]).encode()).hexdigest()
        key = [str(weights_sha256), samples.fingerprint, prepared, pixels_sha256]
        original = reference(features, dim, key, again, backend) if features else None
    values: dict[str, dict[str, Any]] = {}
    for name, model in models.items():
        found, _ = quality[name].result(backend.sum)
        if scores:
            found["inception_score"] = scores[name].result(backend.sum)
        if features:
            made = Gaussian(*(part.cpu() for part in made_of[name].result(backend.sum)))
            with backend.agreement():
                backend.working("computing the Fréchet distance")
                if original:
                    found["rfid" if args.fid_weights else "rfvd"] = frechet_distance(original, made)
        times = [one for of_rank in backend.gather_objects(seconds[name]) for one in of_rank]
        speed = backend.world_size / median(times)
        values[name] = {**found, "num_codes": model.num_codes, "samples_per_second": speed}
    with backend.agreement():
        if backend.is_root:
            say_table(values, backend.say)
            if args.output:
                report = {
                    "data": args.data, "samples": len(everything), "prepared": prepared, "pixels_sha256": pixels_sha256,
                    "judge_sha256": weights_sha256, **kernel_settings(args, backend),
                    "models": {name: {"weights_sha256": about[name], **values[name]} for name in models},
                }  # fmt: skip
                write(args, report, models, everything, samples, backend)
    distance = ("rFID and IS", "--fid_weights") if args.image_folder else ("rFVD", "--fvd_weights")
    needs = {distance: features, ("LPIPS", "--lpips_weights"): lpips}
    if missing := [f"{what} ({flag})" for (what, flag), network in needs.items() if network is None]:
        backend.say(f"not measured without the weights that they need: {', '.join(missing)}")


def say_table(values: Mapping[str, Mapping[str, Any]], say: Callable[[str], None]) -> None:
    """Print a row for each model, with a column for each value that there is."""
    from training.run.table import number

    names = [name for name in HEADINGS if any(name in found for found in values.values())]
    rows = [["", *(HEADINGS[name] for name in names)]]
    for model, found in values.items():
        cells = {name: number(found.get(name)) for name in names}
        if found["num_codes"]:
            cells["codes_used"] += f" of {found['num_codes']}"
        rows.append([model, *cells.values()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        say("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip())


def write(
    args: argparse.Namespace, report: Mapping[str, Any], models: Mapping[str, Any], each: Sequence[Sequence[float]],
    samples: Samples, backend: distributed.Backend,
) -> None:  # fmt: skip
    """Write --output and the picture of the samples whose PSNR differs most between models, or is lowest of one."""
    import torch

    from data.feed import to_unit_range
    from data.stores.output import explained_write, json_bytes
    from tandem.files.writing import write_atomically
    from training.pictures.images import grid, to_png

    def difference(row: Sequence[float]) -> float:
        return max(row[2:]) - min(row[2:]) if len(models) > 1 else -row[2]

    shown = sorted(each, key=difference, reverse=True)[:SHOWN]
    _, pixels, _ = load_batch(samples, [int(row[0]) for row in shown])
    originals = to_unit_range(torch.stack(pixels).to(backend.device))
    made = {name: reconstructed(model, originals, backend)[0] for name, model in models.items()}
    rows = {"original": originals, **made}
    if args.video_folder:
        rows = {name: films[:, :, films.shape[2] // 2] for name, films in rows.items()}
    picture = Path(args.output).with_suffix(".png")
    for path, content in ((picture, to_png(grid(rows))), (Path(args.output), json_bytes(report))):
        with explained_write(path):
            write_atomically(path, content)
    what = "differ most" if len(models) > 1 else "are farthest from their originals"
    backend.say(f"wrote {args.output} and {picture}, of the samples whose reconstructions {what}; PSNR from the left:")
    for row in shown:
        backend.say(f"  {samples.name(int(row[0]))}: {', '.join(f'{near:.2f}' for near in row[2:])}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse(argv)
    distributed.launch_inference(lambda backend: evaluate(args, backend), parser, args)


if __name__ == "__main__":
    main()
