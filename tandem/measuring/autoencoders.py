"""Reconstructions of autoencoders, and the distributions of their features."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from tandem import distributed
from tandem.data.stores.output import sha256_of
from tandem.devices import moment, on_host, seconds_between
from tandem.distributed import ProcessGroup
from tandem.io import published
from tandem.io.fetching import fetch_file
from tandem.io.writing import write_atomically
from tandem.models.features import i3d
from tandem.models.features.lpips import load_lpips
from tandem.models.layers.convolutional import without_range_checks
from tandem.sides import height_and_width
from tandem.training.metrics import fid
from tandem.training.metrics.feature_statistics import FeatureStatistics
from tandem.training.metrics.latents import LatentMeasures, between_neighbours
from tandem.training.metrics.reconstruction import ReconstructionQuality, psnr
from tandem.training.metrics.videos import VideoQuality
from tandem.weights.load import Trained, open_model

from .passes import Batches, run_rounds


def reconstruct(model: Any, samples: Tensor, processes: ProcessGroup, precision: str) -> tuple[Tensor, Tensor]:
    """Reconstructions of images or videos in [0, 1], in the precision of the run, and their codes or latents."""
    processes.heartbeat("reconstructing")
    with distributed.autocast(precision, processes.device), without_range_checks():
        codes = model.encode(samples)
        return model.decode(codes), codes


def open_models(args: argparse.Namespace, processes: ProcessGroup) -> dict[str, Any]:
    """The models on the device of the run, by the user's names. Sets args.image_size and args.channels. Raises
    ValueError, in one line, if there is no such model or one does not take such samples."""
    kinds = ("VideoTokenizer",) if args.video_folder else ("DiscreteVAE", "VQGAN", "VideoTokenizer")
    models, device = {name: open_model(name, *kinds) for name in args.model}, processes.device
    for line in filter(None, (trained.assumed for trained in models.values())):
        processes.say(line)
    first = models[args.model[0]].model
    args.image_size, args.channels = args.image_size or first.image_size, first.channels
    sides = height_and_width(args.image_size)
    shape = (args.channels, *([args.num_frames] if args.video_folder else []), *sides)
    colour_flags = [f"--{name}" for name in ("fid_weights", "fvd_weights", "lpips_weights") if getattr(args, name)]
    if args.channels != 3 and colour_flags:
        raise ValueError(f"{colour_flags[0]}: its network takes 3 channels, and {args.model[0]} has {args.channels}")
    for name, trained in models.items():
        try:
            reconstruct(trained.model.to(device), torch.zeros(1, *shape, device=device), processes, args.precision)
        except ValueError as error:
            raise ValueError(f"{name} takes no such samples: {error}") from None
    return models


class Networks(NamedTuple):
    """LPIPS; the network of rFID or rFVD with the length of its features and the SHA-256 of its weights. None stands
    for networks without weights."""

    lpips: Any
    features: Any
    dim: int
    sha256: str | None


def open_networks(args: argparse.Namespace, processes: ProcessGroup) -> Networks:
    """The networks of the flags. Raises ValueError, in one line, if weights cannot be used."""
    device, heartbeat = processes.device, partial(processes.heartbeat, "fetching weights")
    lpips = load_lpips(args.lpips_weights, min(height_and_width(args.image_size)), device, heartbeat)
    weights = (
        fetch_file(published.INCEPTION, heartbeat)
        if args.fid_weights == published.PUBLISHED
        else args.fid_weights or args.fvd_weights
    )
    weights_sha256 = sha256_of([Path(weights)]) if weights else None
    network: Any = i3d.i3d_features(args.fvd_weights, args.num_frames, device, args.fvd_eps)
    if args.fid_weights:
        network = fid.Inception(published.load_published_weights(published.INCEPTION, str(weights), heartbeat), device)
    return Networks(lpips, network, getattr(network, "dim", i3d.I3D_DIM), weights_sha256)


class ModelMeasures(NamedTuple):
    """A model, and what is measured of it.

    name: As the user gave it.
    quality: Of reconstructions, and of the use of codes.
    features: Of reconstructions; None without a network.
    latents: None for a model with codes, or without --latents.
    """

    name: str
    trained: Trained
    quality: Any
    features: FeatureStatistics | None
    latents: LatentMeasures | None


def open_measures(
    models: Mapping[str, Trained], networks: Networks, args: argparse.Namespace, processes: ProcessGroup
) -> list[ModelMeasures]:
    """What the flags ask for of each model, without samples yet."""
    device, measures = processes.device, list[ModelMeasures]()
    make_quality: Any = ReconstructionQuality
    if args.video_folder:
        make_quality = partial(VideoQuality, num_frames=args.num_frames)
    for name, trained in models.items():
        model, latents = trained.model, None

        def encode(images: Tensor, model: Any = model) -> Tensor:
            with distributed.autocast(args.precision, device), without_range_checks():
                encoded: Tensor = model.encode(images)
                return encoded

        if args.latents and not model.num_codes:
            blank = torch.zeros(1, args.channels, *height_and_width(args.image_size), device=device)
            with torch.no_grad():
                shape = encode(blank).shape[1:]
            latents = LatentMeasures(encode, shape, device, keep=networks.features is not None)
        features = FeatureStatistics(networks.features, networks.dim, device) if networks.features else None
        quality = make_quality(model.num_codes, device=device, losses=(), lpips=networks.lpips)
        measures.append(ModelMeasures(name, trained, quality, features, latents))
    return measures


def measure_batches(
    measures: Sequence[ModelMeasures], processes: ProcessGroup, precision: str, notes: list[dict[str, Any]],
    batches: Batches,
) -> Iterator[None]:  # fmt: skip
    """Reconstruct each batch with each model, and add the reconstructions, and latents, to the measures of that model.
    Appends the notes of the samples to `notes`, each with the measurements [PSNR, seconds] of each model."""

    def reconstruct_batches() -> Iterator[tuple[Any, Tensor]]:
        for originals, batch_notes in batches:
            notes.extend(batch_notes)
            for name, trained, quality, features, latents in measures:
                start = moment(processes.device)
                reconstructions, codes = reconstruct(trained.model, originals, processes, precision)
                moments = start, moment(processes.device)
                no_codes = originals.new_zeros(0).long()
                quality.add(originals, reconstructions, codes if trained.model.num_codes else no_codes)
                if latents:
                    latents.add(originals, codes, [note["index"] for note in batch_notes])
                if features:
                    features.add(reconstructions)
                psnrs = psnr(originals, reconstructions)
                is_finite = reconstructions.isfinite().all()[None].to(psnrs)
                yield (name, batch_notes, moments), torch.cat([psnrs, is_finite])

    for (name, batch_notes, moments), batch_values in on_host(reconstruct_batches()):
        *psnrs, is_finite = batch_values.tolist()
        if not is_finite:
            raise ValueError(f"{name} makes values that are not finite: with fp16, try --precision bf16 or fp32")
        seconds = seconds_between(*moments) / len(batch_notes)
        for note, sample_psnr in zip(batch_notes, psnrs, strict=True):
            note["measurements"].append([sample_psnr, seconds])
        yield


def reference_statistics(
    key: Sequence[Any], networks: Networks, run_pass: Callable[..., None], processes: ProcessGroup
) -> fid.Gaussian:
    """Mean and covariance of the originals' features: read from the file that an earlier command with this key saved,
    or computed by `run_pass` over the originals and saved. Collective."""
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    path, gaussian = Path(torch.hub.get_dir()) / "statistics" / f"{name}.safetensors", None
    with contextlib.suppress(ValueError, TypeError):  # the file is missing or damaged
        gaussian = fid.Gaussian(**published.read_state_dict(path))
        if [*map(len, gaussian)] != [networks.dim] * 2 or not all(part.isfinite().all() for part in gaussian):
            gaussian = None
    if all(processes.gather_objects(gaussian is not None)) and gaussian:
        processes.say(f"the statistics of the originals are those in {path}")
        return gaussian
    originals = FeatureStatistics(networks.features, networks.dim, processes.device)

    def add_batches(batches: Batches) -> Iterator[None]:
        for samples, _ in batches:
            originals.add(samples)
            yield

    run_pass("computed features of originals", add_batches)
    gaussian, _ = originals.result(processes.sum)
    with contextlib.suppress(OSError):  # they are computed again the next time
        if processes.is_root:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save(gaussian._asdict()))
    return gaussian


def compute_scores(
    measures: ModelMeasures, reference: fid.Gaussian | None, n_samples: int, networks: Networks,
    args: argparse.Namespace, processes: ProcessGroup,
) -> dict[str, Any]:  # fmt: skip
    """The values of a model by the names of evaluate.py, those of Fréchet distances on the root alone. Collective.
    Raises AskedToStop after a signal.

    Args:
        reference: The distribution of the originals' features; None without a network.
    """
    scores: dict[str, Any]
    scores, _ = measures.quality.result(processes.sum)
    if measures.latents:
        scores |= measures.latents.statistics.result(processes.sum)
    if measures.features and reference:
        distributions = dict[str, fid.Gaussian]()
        distributions["rfid" if args.fid_weights else "rfvd"], score = measures.features.result(processes.sum)
        scores |= score
        if measures.latents:
            latents = measures.latents.all_latents(n_samples, processes.sum)
            distributions["ifid"] = decode_between_neighbours(
                latents, measures.trained.model, networks, args, processes
            )
        processes.heartbeat("computing the Fréchet distance", is_uninterrupted=True)
        with processes.raise_on_all_ranks():
            if processes.is_root:
                for name, distribution in distributions.items():
                    scores[name] = fid.frechet_distance(reference, distribution)
    return scores


def decode_between_neighbours(
    latents: Tensor, model: Any, networks: Networks, args: argparse.Namespace, processes: ProcessGroup
) -> fid.Gaussian:
    """The distribution of the features of what the model decodes of points between neighbours among the latents of all
    samples. The batches do not depend on the number of processes. Collective. Raises AskedToStop after a signal."""
    statistics = FeatureStatistics(networks.features, networks.dim, processes.device)
    n, size, n_decoded = len(latents), args.batch_size, 0

    def decode_batches() -> Iterator[None]:
        nonlocal n_decoded
        for first in range(0, n, size)[processes.rank :: processes.world_size]:
            rows = range(first, min(first + size, n))
            with distributed.autocast(args.precision, processes.device):
                statistics.add(model.decode(between_neighbours(latents, rows).to(processes.device)))
            n_decoded += len(rows)
            yield

    with torch.no_grad():
        for n_of_all in run_rounds(decode_batches(), lambda: n_decoded, processes):
            processes.say(f"decoded {n_of_all} of {n} points between latents")
    distribution: fid.Gaussian = statistics.result(processes.sum)[0]
    return distribution
