"""Measure trained models: of autoencoders on images or videos, how close reconstructions are to the originals, and how
many codes are used; of MuLaNs, how well they classify sounds by the names of the classes alone.

    python evaluate.py --model runs/vqgan --image_folder photos/ --fid_weights published --lpips_weights published
    torchrun --nproc_per_node 8 evaluate.py --compare runs/a runs/b vae.pt --image_folder photos/ --output eval.json
    deepspeed evaluate.py --model runs/tokenizer --video_folder clips/ --fvd_weights i3d.pt
    horovodrun -np 8 python evaluate.py --model runs/tokenizer --image_folder photos/
    python evaluate.py --model runs/vqgan --held_out_of runs/vqgan
    python evaluate.py --model runs/mulan --audio_data ESC-50/meta/esc50.csv --audio_folder ESC-50/audio/

The values are the same, to the last bit, for every launcher and any number of processes: batches do not depend on them,
and sums are exact. docs/evaluation.md defines all values, and those of papers.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tandem.config.converters import FILE, FOLDER, NAME_OR_PATH, PATH, picture_sides, positive_float, size, templates
from tandem.config.fields import Requirement, flag, given, without
from tandem.config.parser import ArgumentParser
from tandem.config.shared import kernel_settings
from tandem.io.reading import counted, error_text
from tandem.io.writing import write_atomically
from tandem.launch import fetch_model, inference_parser, start_inference
from tandem.sides import Sides, height_and_width
from tandem.training.run_folder.starts import last_start
from tandem.weights.load import default_weights_path, resolve
from tandem.weights.origin import find_run, read_run_arguments

if TYPE_CHECKING:  # importing PyTorch takes seconds: functions do it after the arguments have been checked
    from tandem.data.fields import SampleDataset
    from tandem.distributed import ProcessGroup

PICTURE_SAMPLES = 6  # samples in the picture
# Headings of the table, by the names in the JSON file.
HEADINGS = {
    "rfid": "rFID", "ifid": "iFID", "rfvd": "rFVD", "inception_score": "IS", "psnr": "PSNR", "ssim": "SSIM",
    "lpips": "LPIPS",
    "dpsnr": "PSNR of motion", "flicker": "flicker", "codes_used": "codes used", "perplexity": "perplexity",
    "equivariance_error": "equivariance error", "fine_energy": "fine energy", "dead_channels": "dead channels",
    "samples_per_second": "samples/s", "top1": "top-1", "top5": "top-5", "map": "mAP",
}  # fmt: skip
LISTS = ("channel_means", "channel_deviations", "spectrum", "image_spectrum")  # of --latents, in the JSON file alone
# --resize -> how images are resized to the side of the models' images, before the centre crop.
RESIZES = {
    "ours": "{} (bilinear, antialiased)",
    "taming": "{} (bilinear, not antialiased)",
    "adm": "halved by a box filter while twice as large, then {} (bicubic, antialiased)",
}
_VIDEOS_ONLY, _SOUNDS_ONLY = given("video_folder", "PATH"), given("audio_data", "PATH")
_MANIFEST_ONLY = Requirement(
    "audio_data", "FILE", lambda args: (args.audio_data or "").endswith((".csv", ".tsv", ".jsonl", ".ndjson", ".json"))
)
_FILES_ONLY = Requirement("image_folder", "PATH", lambda args: not (args.image_folder or "demo:").startswith("demo:"))


@dataclass
class Config:
    """The models to measure, the data, and how."""

    # fmt: off
    model: list[str] | None = flag(None, "trained autoencoders or MuLaNs, a row each: runs, checkpoints, model/ "
        "folders, public packages' files, or USER/NAME of the Hugging Face Hub", FOLDER, nargs="+", aliases="compare",
        required=True, title="what is measured")
    image_folder: str | None = flag(None, "images: a folder, tars, a table or manifest, or demo:shapes", PATH)
    video_folder: str | None = flag(None, "videos: a folder, tars, a table or manifest, or demo:moving; the clip "
        "in the middle of each is measured", PATH)
    held_out_of: str | None = flag(None, "measure on the data that this run held out, instead of a folder; of "
        "videos, its --num_frames is then the default", FOLDER, metavar="RUN")
    audio_data: str | None = flag(None, "sounds to classify by a MuLaN: a manifest or table with a column of classes, "
        "as ESC-50's, a folder or tars with a .json each, or demo:tones", PATH)
    output: str | None = flag(None, "write the values to NAME.json, and a picture to NAME.png: the samples on which "
        "the models differ most, or which a single model reconstructs worst, below their originals", NAME_OR_PATH)
    image_size: Sides | None = flag(None, "sides of the centre crop (default: the first model's)", picture_sides,
        title="method", requires=without("audio_data"))
    resize: str = flag("ours", "how images are resized: ours is bilinear, antialiased; taming is not antialiased, as "
        "in taming-transformers, Open-MAGVIT2 and IBQ; adm halves by a box filter first, as in LlamaGen",
        choices=tuple(RESIZES), requires=_FILES_ONLY)
    num_frames: int = flag(17, "frames of a clip", size, requires=_VIDEOS_ONLY)
    fid_weights: str | None = flag(None, "report rFID and inception score by these weights (pt_inception-2015-12-05): "
        "a file, or published, which fetches them", FILE, requires=given("image_folder", "PATH"))
    fvd_weights: str | None = flag(
        None, "report rFVD by these weights of I3D (a state dict)", FILE, requires=_VIDEOS_ONLY
    )
    fvd_eps: float = flag(1e-3, "eps of I3D's batch normalisations: 1e-3 as in its training, 1e-5 as for the published "
        "values of TATS, Open-MAGVIT2 and cd-fvd", positive_float, requires=given("fvd_weights", "FILE"))
    latents: bool = flag(False, "also measure how easily continuous latents can be generated: equivariance error, "
        "energy by frequency, means, deviations and dead channels and, with --fid_weights, iFID",
        requires=given("image_folder", "PATH"))
    lpips_weights: str | None = flag(None, "report LPIPS by these weights: a file, a folder, or published, which "
        "fetches them", FILE, requires=without("audio_data"))
    audio_folder: str | None = flag(None, "folder of the files that the manifest names (default: its own)", FOLDER,
        requires=_MANIFEST_ONLY, title="zero-shot classification")
    zero_shot_templates: tuple[str, ...] = flag(("This is a sound of {}.",), "sentences with {} for the class; their "
        "embeddings are averaged", templates, requires=_SOUNDS_ONLY)
    max_clips: int = flag(6, "clips of a long sound that are embedded", size, requires=_SOUNDS_ONLY)
    per_fold: bool = flag(False, "also report the values of each fold, by the column fold", requires=_SOUNDS_ONLY)
    # fmt: on

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        parser.choose_one(args, image_folder=None, video_folder=None, held_out_of=None, audio_data=None)
        args.run = None
        if args.held_out_of:
            try:
                args.run = read_run_arguments(Path(args.held_out_of))
            except ValueError as error:
                parser.error(f"--held_out_of: {error}")
            if args.run.script not in ("train_vae.py", "train_vqgan.py", "train_tokenizer.py"):
                parser.error(
                    f"--held_out_of {args.held_out_of} is a run of {args.run.script}, which trains no autoencoder"
                )
            setattr(args, args.run.data_flag, args.run.dataset or getattr(args.run, args.run.data_flag))
            if args.video_folder and "num_frames" not in args.explicit:
                args.num_frames = args.run.num_frames
        args.fresh = False  # `distributed.launch_inference` reads it, and this script has no --fresh
        args.data = args.image_folder or args.video_folder or args.audio_data
        args.output = args.output and args.output.removesuffix(".json")
        if args.output and not os.path.basename(args.output):
            parser.error(f"--output {args.output}: give a name in that folder, to which .json and .png are added")
        if not args.data:
            parser.error("give --image_folder, --video_folder, --held_out_of or --audio_data")


def build_parser() -> ArgumentParser:
    return inference_parser(
        "evaluate.py", "Measure trained models.",
        "--model DIR [DIR ...] (--image_folder PATH | --video_folder PATH | --held_out_of RUN | --audio_data PATH)",
        Config, batch_size=32, unit="SAMPLES", num_workers_help="loader processes per process",
    )  # fmt: skip


def open_samples(args: argparse.Namespace) -> SampleDataset:
    """The samples to measure on. Raises ValueError, in one line, if there are none."""
    from tandem.data.held_out import split_of_run
    from tandem.data.sets import open_images, open_videos

    options = {"channels": args.channels, "resize": args.resize}
    if not args.held_out_of:
        if args.video_folder:
            sizes = {"image_size": args.image_size, "num_frames": args.num_frames}
            return open_videos(args.data, channels=args.channels, **sizes)
        return open_images(args.data, image_size=args.image_size, **options)
    sizes = {"image_size": args.image_size, "num_frames": args.num_frames}
    try:
        held_out = split_of_run(argparse.Namespace(**{**vars(args.run), **sizes}), **options).held_out
    except ValueError as error:
        raise ValueError(f"--held_out_of {args.held_out_of}: {error}") from None
    if not len(held_out):
        raise ValueError(f"{args.held_out_of} was trained on all of {args.data}: its --valid_fraction is 0")
    return held_out


def compare_with_training(args: argparse.Namespace, samples: SampleDataset) -> tuple[dict[str, int], list[str]]:
    """Name of a model in a run's folder -> number of these samples that it was trained on, if that is known; and lines
    that report the numbers, or why one is unknown."""
    from tandem.data import held_out

    counts, lines, n = dict[str, int](), list[str](), len(samples)
    hint = "" if args.held_out_of else "; --held_out_of RUN measures what a run did not train on"
    for name in args.model:
        if (folder := find_run(resolve(default_weights_path(Path(name)))[1])) is None:
            continue
        try:
            if args.held_out_of and os.path.realpath(folder) == os.path.realpath(args.held_out_of):
                counts[name] = 0  # held out by its split; `data_change_lines` below warns if the split has changed
                continue
            run = read_run_arguments(folder)
            counts[name], fingerprint = held_out.count_trained_on(run, samples, args.data)
        except (OSError, ValueError) as error:
            lines.append(f"it is unknown on how many of these {n} samples {name} was trained: {error_text(error)}")
            continue
        locations = held_out.folders_of_run(run)
        if counts[name]:
            lines.append(
                f"by their paths, {name} was trained on {counts[name]} of these {n} samples: its data is "
                f"{locations}{hint}"
            )
        elif not args.held_out_of:
            lines.append(f"by their paths, {name} was trained on none of these {n} samples: its data is {locations}")
        lines += data_change_lines(name, folder, fingerprint)
    if args.held_out_of:
        run_fingerprint = held_out.split_of_run(args.run).fingerprint
        lines += data_change_lines(args.held_out_of, Path(args.held_out_of), run_fingerprint)
    return counts, list(dict.fromkeys(lines))


def data_change_lines(name: str, run: Path, fingerprint: str | None) -> list[str]:
    """[A line] if the fingerprint of a run's data has changed since the run was last started, else []."""
    old_fingerprint = last_start(run).get("data_fingerprint")
    if None in (old_fingerprint, fingerprint) or old_fingerprint == fingerprint:
        return []
    return [
        f"files in the data of {name} were added, removed or renamed since its training, so the split has changed, and "
        "samples that are held out now may have been trained on"
    ]


def evaluate(args: argparse.Namespace, processes: ProcessGroup) -> None:
    """Measure autoencoders and report the values. Raises AskedToStop after a signal."""
    import torch

    from tandem.data.stores.output import json_bytes
    from tandem.measuring.autoencoders import (
        compute_scores,
        measure_batches,
        open_measures,
        open_models,
        open_networks,
        reference_statistics,
    )
    from tandem.measuring.passes import process_batches, require_same_files

    with processes.raise_on_all_ranks():
        models = open_models(args, processes)
        networks = open_networks(args, processes)
        processes.heartbeat("listing the samples", is_uninterrupted=True)
        samples = open_samples(args)
        trained_on, lines = compare_with_training(args, samples) if processes.is_root else ({}, [])
        height, width = height_and_width(args.image_size)
        side_text = f"shorter side resized to {height}" if height == width else f"resized to cover {height} x {width}"
        preparation = RESIZES[args.resize].format(f"{side_text} pixels") + ", then the centre cropped"
        if args.video_folder:
            preparation = f"{args.num_frames} frames from the middle, {preparation}"
    require_same_files(samples, args, processes)
    held_out = f" that {args.held_out_of} did not train on" if args.held_out_of else ""
    processes.say(f"{counted(len(samples), 'sample')} of {args.data}{held_out}: {preparation}")
    if samples.skipped:
        processes.say(samples.skipped)
    for line in lines:
        processes.say(line)
    measures = open_measures(models, networks, args, processes)
    notes: list[dict[str, Any]] = []  # of this process's samples
    run_pass = partial(process_batches, samples, args, processes)
    with torch.no_grad():
        run_pass("measured", partial(measure_batches, measures, processes, args.precision, notes))
        all_notes = sorted(itertools.chain(*processes.gather_objects(notes)), key=lambda note: note["index"])
        checksums = [note["checksum"] for note in all_notes]
        settings = [args.batch_size, kernel_settings(args, processes)]
        key = [networks.sha256, args.fvd_eps, samples.fingerprint, preparation, checksums, *settings]
        reference = reference_statistics(key, networks, run_pass, processes) if networks.features else None
    values: dict[str, dict[str, Any]] = {}
    for number, model_measures in enumerate(measures):
        name, trained = model_measures.name, model_measures.trained
        scores = compute_scores(model_measures, reference, len(samples), networks, args, processes)
        speed = processes.world_size / median(note["measurements"][number][1] for note in all_notes)
        row = {metric: scores[metric] for metric in (*HEADINGS, *LISTS) if metric in scores}
        row |= {"trained_on": trained_on[name]} if name in trained_on else {}
        values[name] = {**row, "samples_per_second": speed, "num_codes": trained.model.num_codes, **trained.identity}
    with processes.raise_on_all_ranks():
        if processes.is_root:
            options = f"--resize {args.resize}" if args.image_folder else ""
            options = f"--fvd_eps {args.fvd_eps:g}" if args.fvd_weights else options
            say_table(values, options, processes.say)
        if processes.is_root and args.output:
            report = {
                "data": args.data, "samples": len(all_notes), "held_out_of": args.held_out_of, "prepared": preparation,
                "resize": args.resize, "fvd_eps": args.fvd_eps if args.fvd_weights else None,
                "network_sha256": networks.sha256, "batch_size": args.batch_size, **kernel_settings(args, processes),
                "models": values,
            }  # fmt: skip
            write_atomically(Path(f"{args.output}.json"), json_bytes(report))
            draw(args, models, all_notes, samples, processes)
    if args.latents and all(trained.model.num_codes for trained in models.values()):
        processes.say("latents are not measured: every model has codes")
    feature_metrics = "rFID and IS (--fid_weights)" if args.image_folder else "rFVD (--fvd_weights)"
    networks_by_metric = {"LPIPS (--lpips_weights)": networks.lpips, feature_metrics: networks.features}
    if missing := [name for name, network in networks_by_metric.items() if network is None]:
        processes.say(f"not measured, because their weights are not given: {', '.join(missing)}")


def classify(args: argparse.Namespace, processes: ProcessGroup) -> None:
    """Measure how well MuLaNs classify sounds by the names of the classes, and report the values. Raises AskedToStop
    after a signal."""
    from tandem.data.fields import ClassesField
    from tandem.data.sets import open_classified_sounds
    from tandem.data.stores.output import json_bytes
    from tandem.embedding import open_embedder
    from tandem.measuring.passes import require_same_files
    from tandem.measuring.sounds import Classification, classify_sounds

    values, rows = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()  # of the models; of the table
    result = Classification(0, [], {}, {})
    for name in args.model:
        with processes.raise_on_all_ranks():
            embedder = open_embedder(name, args.batch_size, processes, args.precision)
            processes.heartbeat("listing the samples", is_uninterrupted=True)
            sounds = open_classified_sounds(args.data, embedder.decoder, args.max_clips, args.audio_folder)
            if args.per_fold and "fold" not in getattr(sounds.source, "columns", {}).get(ClassesField.spec, ()):
                raise ValueError(f"--per_fold: {args.data} is no table or manifest with a column fold")
        require_same_files(sounds, args, processes)
        if sounds.skipped and not values:
            processes.say(sounds.skipped)
        result = classify_sounds(sounds, embedder, args, processes)
        rows[name] = values[name] = {**result.values, **embedder.identity}
        if args.per_fold:
            values[name]["folds"] = result.folds
            rows |= {f"{name}, fold {fold}": fold_values for fold, fold_values in result.folds.items()}
    with processes.raise_on_all_ranks():
        if processes.is_root:
            sentences = " | ".join(args.zero_shot_templates)
            processes.say(f"{result.n_sounds} sounds of {args.data} in {len(result.classes)} classes: {sentences}")
            say_table(rows, "", processes.say)
        if processes.is_root and args.output:
            report = {
                "data": args.data, "samples": result.n_sounds, "classes": result.classes,
                "zero_shot_templates": args.zero_shot_templates, "max_clips": args.max_clips,
                "batch_size": args.batch_size, **kernel_settings(args, processes), "models": values,
            }  # fmt: skip
            write_atomically(Path(f"{args.output}.json"), json_bytes(report))


def say_table(values: Mapping[str, Mapping[str, Any]], corner: str, say: Callable[[str], None]) -> None:
    """Print a row for each model and a column for each value. `corner`: flags that the values depend on, or ""."""
    from tandem.training.logging.table import format_number

    names = [name for name in HEADINGS if any(name in row for row in values.values())]
    rows = [[corner, *(HEADINGS[name] for name in names)]]
    for model, row in values.items():
        cells = {name: format_number(row.get(name)) for name in names}
        if row.get("num_codes"):
            cells["codes_used"] += f" of {row['num_codes']}"
        rows.append([model, *cells.values()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        say("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))


def draw(
    args: argparse.Namespace, models: Any, notes: Sequence[Any], samples: SampleDataset, processes: ProcessGroup
) -> None:
    """Write a picture of the samples whose PSNR differs most between models, or is the lowest for a single model."""
    import torch

    from tandem.data.feed import to_unit_range
    from tandem.measuring.autoencoders import reconstruct
    from tandem.measuring.passes import load
    from tandem.training.visuals.images import grid, to_png

    psnrs = {note["index"]: [psnr for psnr, _ in note["measurements"]] for note in notes}
    scores = {index: max(values) - min(values) if len(values) > 1 else -values[0] for index, values in psnrs.items()}
    indices = sorted(psnrs, key=lambda index: scores[index], reverse=True)[:PICTURE_SAMPLES]
    rows = {"original": to_unit_range(torch.cat([load(samples, index)[0] for index in indices]).to(processes.device))}
    with torch.no_grad():
        rows |= {
            name: reconstruct(trained.model, rows["original"], processes, args.precision)[0]
            for name, trained in models.items()
        }
    if args.video_folder:
        rows = {name: clips[:, :, args.num_frames // 2] for name, clips in rows.items()}
    picture = Path(f"{args.output}.png")
    write_atomically(picture, to_png(grid(rows)))
    reason = "differ most between models" if len(models) > 1 else "are worst"
    processes.say(f"{picture} shows the samples whose reconstructions {reason}; from the left, with PSNR row by row:")
    for index in indices:
        processes.say(f"  {samples.name(index)}: {', '.join(f'{psnr:.2f}' for psnr in psnrs[index])}")


def run(args: argparse.Namespace, processes: ProcessGroup) -> None:
    for name in args.model:
        fetch_model(name, processes)
    with processes.raise_on_all_ranks():
        if processes.is_root and args.output and not Path(args.output).absolute().parent.is_dir():
            raise ValueError(f"--output {args.output}: there is no such folder")
    (classify if args.audio_data else evaluate)(args, processes)


def main(argv: Sequence[str] | None = None) -> None:
    start_inference(run, build_parser(), argv)


if __name__ == "__main__":
    main()
