"""Use a trained MuLaN: build an index of the embeddings of sound files, and search it by words or by sound.

    python embed.py --model runs/mulan --audio sounds/ --output index/
    torchrun --nproc_per_node 8 embed.py --model runs/mulan --audio sounds/ --output index/     # or any launcher
    python embed.py --model runs/mulan --index index/ --query "a slow low sine wave" --query some.wav

The files are the same, byte for byte, for any number of processes. Run the same command again to continue after an
interruption. tandem/data/stores/embeddings.py describes index/, and how to load it in two lines.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.config.converters import FILE, FOLDER, PATH, size
from tandem.config.fields import Requirement, flag, given
from tandem.config.parser import ArgumentParser
from tandem.config.shared import bad_sample_flag, kernel_settings
from tandem.io.reading import counted
from tandem.launch import fetch_model, inference_parser, start_inference

if TYPE_CHECKING:  # importing PyTorch takes seconds: functions do it after the arguments have been checked
    from torch import Tensor

    from tandem.data.decoding.sounds import ClipDecoder
    from tandem.data.fields import SampleDataset
    from tandem.distributed import ProcessGroup

_AUDIO_ONLY = given("audio", "PATH")
_QUERY = Requirement("query", "TEXT", lambda args: bool(args.query or args.query_file))


@dataclass
class Config:
    """The sounds to embed and the index to search."""

    model: str | None = flag(
        None,
        "run of train_mulan.py, its model/ or best/ folder, or USER/NAME of the Hub",
        FOLDER,
        required=True,
        title="from and to",
    )
    audio: str | None = flag(
        None,
        "sounds to embed: a folder with subfolders, a csv or jsonl manifest, webdataset tars, tables, or demo:tones",
        PATH,
    )
    output: str | None = flag(
        None,
        "index to write; an index that is not complete is continued",
        FOLDER,
        aliases="output_dir",
        requires=_AUDIO_ONLY,
    )
    fresh: bool = flag(False, "start over; the old content is moved to DIR.old-N")
    index: str | None = flag(None, "index to search (default: --output)", FOLDER)

    max_clips: int = flag(
        6,
        "clips of a long file, spread evenly over it, whose embeddings are averaged; 1: only the middle of a file",
        size,
        metavar="CLIPS",
        requires=_AUDIO_ONLY,
        title="embedding",
    )
    files_per_shard: int = flag(256, "sounds per file of embeddings", size, metavar="FILES", requires=_AUDIO_ONLY)
    on_bad_sample: str = bad_sample_flag(_AUDIO_ONLY)

    query: list[str] | None = flag(
        None, "a sentence, or the path of a sound file; repeatable", action="append", metavar="TEXT", title="search"
    )
    query_file: str | None = flag(None, "more queries, one per line", FILE)
    top_k: int = flag(10, "matches to print for each query", size, metavar="ROWS", requires=_QUERY)
    json: bool = flag(False, "print a JSON object per query, not a table", requires=_QUERY)

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: ArgumentParser) -> None:
        args.index = args.index or args.output
        if not (args.audio or _QUERY.is_met(args)):
            parser.error("nothing to do: give --audio or --query")
        if (args.audio and not args.output) or not args.index:
            parser.error("no index is named: give --index, or --audio and --output to make one")
        if "num_workers" in args.explicit and not args.audio:
            parser.error("--num_workers is for --audio; leave it out, or give --audio")


def build_parser() -> ArgumentParser:
    return inference_parser(
        "embed.py", "Embed sounds with a trained MuLaN, and search among them.",
        "--model DIR [--audio PATH --output DIR] [--index DIR] [--query TEXT]", Config,
        batch_size=16, unit="CLIPS", num_workers_help="loader processes per process",
    )  # fmt: skip


def load_clips(sounds: SampleDataset, index: int) -> tuple[Tensor, dict[str, Any]]:
    """The clips (k, n) of a sound, and its index entry."""
    sample = sounds.load(index)
    return sample["waveforms"], {"captions": sample["captions"]} if sample["captions"] else {}


def make_index(args: argparse.Namespace, processes: ProcessGroup, say: Callable[[str], None]) -> None:
    """Write the index of a folder of sounds. Raises AskedToStop after a signal."""
    import numpy as np

    from tandem.data.sets import open_sounds_in_clips
    from tandem.data.stores.embeddings import EMBEDDINGS
    from tandem.data.stores.encoding import encode_batches
    from tandem.data.stores.names import SampleNames
    from tandem.data.stores.output import OutputFolder
    from tandem.data.stores.writer import EncodedShard, ShardWriter
    from tandem.embedding import open_embedder, unit_means

    fetch_model(args.model, processes)
    with processes.raise_on_all_ranks():
        embedder = open_embedder(args.model, args.batch_size, processes, args.precision)
        processes.heartbeat("listing the samples", is_uninterrupted=True)
        sounds = open_sounds_in_clips(args.audio, embedder.decoder, args.max_clips)
        folder = os.path.join(os.path.expanduser(args.audio), "")
        names = SampleNames(sounds.source, lambda index: sounds.describe(index).removeprefix(folder))
    if sounds.skipped:
        say(sounds.skipped)
    settings = {
        "task": "embed", **embedder.identity, "dim": embedder.dim, "max_clips": args.max_clips,
        "batch_size": args.batch_size, **kernel_settings(args, processes),
        "files": len(names), "names_sha256": names.sha256,
        "files_per_shard": args.files_per_shard,
    }  # fmt: skip
    output = OutputFolder(Path(args.output), settings, processes, fresh=args.fresh, say=say)
    empty = np.zeros((0, embedder.dim), np.float32)
    shards = ShardWriter(output, EMBEDDINGS, empty, names, args.files_per_shard)

    def compute_embeddings(shard_items: Sequence[range]) -> Iterator[EncodedShard]:
        options = {"batch_size": args.batch_size, "samples_per_request": 1, "num_workers": args.num_workers}
        options["waiting"] = processes.waiting_for_workers
        load = functools.partial(load_clips, sounds)
        for encoded in encode_batches(load, shard_items, embedder.embed_clips, **options):
            yield encoded._replace(parts=[unit_means(encoded.parts)] if encoded.parts else [])

    _, bad, _ = shards.fill(compute_embeddings, "rows", "embedded", stop_at_bad=args.on_bad_sample == "error")
    say(f"{counted(len(names) - bad, 'sound')} in {counted(len(shards), 'shard')} of embeddings: {args.output}")


def load_query_clips(query: str, decoder: ClipDecoder, max_clips: int) -> Tensor | None:
    """The clips of the sound file that a query names; None if it is a sentence. Raises ValueError, in one line, if the
    file cannot be read, or the query has the ending of a sound file and there is none."""
    from tandem.data.decoding.sounds import ENDINGS, FURTHER_ENDINGS, require_decoders
    from tandem.data.sources.record import FileRef
    from tandem.io.reading import error_text

    query = os.path.expanduser(query)
    if os.path.isfile(query):
        require_decoders()
        try:
            return decoder.load_clips(FileRef(query), max_clips)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {query}: {error_text(error)}") from None
    if query.lower().endswith(ENDINGS + FURTHER_ENDINGS):
        raise ValueError(f"there is no file {query!r}; put a full stop after a sentence that ends like a file")
    return None


def search(args: argparse.Namespace, processes: ProcessGroup) -> None:
    """Print the best matches of each query. Only the root process searches."""
    import torch

    from tandem.data.stores.embeddings import QueryResult, StoredEmbeddings, read_queries
    from tandem.data.stores.encoding import encode_in_batches
    from tandem.embedding import open_embedder, unit_means

    fetch_model(args.model, processes)
    with processes.raise_on_all_ranks():
        if processes.is_root:
            queries, stored = read_queries(args.query or [], args.query_file), StoredEmbeddings(args.index)
            # Embed a sound with the settings of the index, so that a sound in the index has the cosine 1.
            batch_size, max_clips = stored.index["batch_size"], stored.index["max_clips"]
            embedder = open_embedder(args.model, batch_size, processes, args.precision)
            if not embedder.identity.items() <= stored.index.items():
                raise ValueError(f"the index in {args.index} was not made by {args.model}: give the model that made it")

            def embed(query: str) -> Tensor:
                if (clips := load_query_clips(query, embedder.decoder, max_clips)) is None:
                    return embedder.embed_text(query)
                return unit_means([encode_in_batches(clips, embedder.embed_clips, batch_size)])[0]

            vectors = torch.stack([embed(query) for query in queries])
            matches = stored.nearest(vectors.numpy(), args.top_k, lambda: processes.heartbeat("searching"))
            for result in map(QueryResult, queries, matches):
                print(result.as_json() if args.json else result.as_table(), flush=True)


def run(args: argparse.Namespace, processes: ProcessGroup) -> None:
    if args.audio:
        stream = sys.stderr if args.json else sys.stdout  # --json keeps stdout for data only
        make_index(args, processes, functools.partial(processes.say, file=stream))
    if _QUERY.is_met(args):
        search(args, processes)


def main(argv: Sequence[str] | None = None) -> None:
    start_inference(run, build_parser(), argv)


if __name__ == "__main__":
    main()
