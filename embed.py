"""Use a trained MuLaN: an index of the embeddings of sound files, search in it by words or by sound, and the codes of
embeddings that MusicLM is conditioned on.

    python embed.py --model runs/mulan/model --audio sounds/ --output index/
    torchrun --nproc_per_node 8 embed.py --model runs/mulan/model --audio sounds/ --output index/     # or any launcher
    python embed.py --model runs/mulan/model --index index/ --query "a slow low sine wave" --query some.wav
    python embed.py --index index/ --fit_quantizer quantizer/      # then the codes of all that is in the index:
    python embed.py --index index/ --quantizer quantizer/

Any number of processes writes the same bytes. Run the same command again to go on after an interruption.
data/embeddings.py says what is in index/, and how to load it in two lines.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import distributed
from training.flags.converters import non_negative_int, positive_int
from training.flags.parser import ArgumentParser

if TYPE_CHECKING:  # PyTorch takes seconds to import: only after the arguments are known to be right
    from torch import Tensor

    from models import MuLaN, ResidualQuantizer

    Model = TypeVar("Model", MuLaN, ResidualQuantizer)
Say = Callable[[str], None]
# Flags that mean nothing without another.
NEEDS = {
    "audio": ("output", "files_per_shard", "max_clips", "on_bad_sample", "num_workers"),
    "query": ("top_k", "json"),
    "fit_quantizer": ("num_quantizers", "codebook_size", "quantizer_epochs"),
}
FIT_ROWS = 256  # embeddings per entry of a codebook, at most


def build_parser() -> ArgumentParser:
    text = "Embed sounds with a trained MuLaN, search among them, and quantize their embeddings."
    parser = ArgumentParser("embed.py", text, is_root=distributed.launched_as_root)
    parser.usage = "%(prog)s [--model DIR] [--audio DIR --output DIR] [--index DIR] [--query TEXT] [flags]"
    # fmt: off
    add = parser.add_argument_group("from and to").add_argument
    add("--model", metavar="DIR", help="model/ folder of a run of train_mulan.py, for --audio and --query")
    add("--audio", metavar="DIR", help="embed every sound file in this folder, nested as you like")
    add("--output", "--output_dir", metavar="DIR", help="index to write; what it holds is continued")
    add("--index", metavar="DIR", help="index to search or to quantize (default: --output)")
    add("--fresh", action="store_true", help="start over; what the output holds is moved to DIR.old-N")

    add = parser.add_argument_group("embedding").add_argument
    add("--max_clips", type=positive_int, default=6, metavar="CLIPS",
        help="a file longer than the model's clips is the mean of so many at most, spread evenly; 1: its middle alone")
    add("--files_per_shard", type=positive_int, default=256, metavar="FILES", help="per file of embeddings")
    add("--on_bad_sample", type=str.lower, choices=("skip", "error"), default="skip",
        help="where a file cannot be read: leave it out and name it in bad.jsonl, or stop")

    add = parser.add_argument_group("search").add_argument
    add("--query", action="append", metavar="TEXT", help="a sentence, or the path of a sound file; may be repeated")
    add("--query_file", metavar="FILE", help="more of them, one per line")
    add("--top_k", type=positive_int, default=10, metavar="ROWS", help="the best matches of each query")
    add("--json", action="store_true", help="a JSON object per query in place of tables")

    add = parser.add_argument_group("codes").add_argument
    add("--fit_quantizer", metavar="DIR", help="learn residual codebooks from the index, on one process; where to")
    add("--num_quantizers", type=positive_int, default=12, metavar="LEVELS", help="codes per embedding")
    add("--codebook_size", type=positive_int, default=1024, metavar="ENTRIES", help="of each level")
    add("--quantizer_epochs", type=positive_int, default=10, metavar="EPOCHS",
        help=f"over the index, or over {FIT_ROWS} embeddings per entry drawn from it where it holds more")
    add("--quantizer", metavar="DIR",
        help="write the codes of the index to codes/ in it; with --query: show those of the query")

    add = parser.add_argument_group("computation").add_argument
    add("--batch_size", type=positive_int, default=16, metavar="CLIPS", help="per forward pass of a process")
    add("--precision", type=str.lower, choices=("fp32", "bf16", "fp16"), default="fp32", help="of the forward pass")
    add("--num_workers", type=non_negative_int, default=2, metavar="N", help="loader processes per process")
    add("--cpu_threads", type=positive_int, default=1, metavar="N",
        help="of a process that computes on the CPU; start more processes rather than more threads")
    # fmt: on
    distributed.add_arguments(parser)
    return parser


def load(kind: type[Model], folder: str, backend: distributed.Backend) -> tuple[Model, dict[str, Any]]:
    """A model on the device of the run, and what identifies it. Raises ValueError where there is no such model."""
    from data.stores.resumable import sha256_of
    from models.files.pretrained import read_config, read_headers

    model = kind.from_pretrained(folder).to(backend.device)
    name, arguments = read_config(Path(folder))
    sha256 = sha256_of(Path(folder) / file for file in sorted(read_headers(Path(folder))))
    return model, {"config": {"model": name, **arguments}, "weights_sha256": sha256}


def embedders(
    model: MuLaN, folder: str, backend: distributed.Backend
) -> tuple[Callable[[Tensor], Tensor], Callable[[str], Tensor]]:
    """Waveforms (b, n) in [-1, 1] -> unit vectors (b, d), in the precision of the run; and a sentence, alone, so that
    no other changes its last bit -> (d,). Both come in fp32 on the CPU."""
    import torch

    from data.stores.search import tokens_of_query

    @torch.no_grad()
    def of_clips(waveforms: Tensor) -> Tensor:
        backend.mark("embedding")
        with backend.autocast():
            return model.encode_audio(waveforms.to(backend.device)).float().cpu()

    @torch.no_grad()
    def of_text(text: str) -> Tensor:
        sizes = model.config["max_text_tokens"], model.config["vocab_size"]
        tokens = tokens_of_query(text, tokenizer_of(Path(folder)), *sizes).to(backend.device)
        return model.encode_text(tokens, torch.tensor([tokens.shape[1]], device=backend.device))[0].float().cpu()

    return of_clips, of_text


def tokenizer_of(folder: Path) -> str:
    """What `open_tokenizer` is to open for a model: the tokenizer.json beside it, or else CLIP's."""
    return str(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else "clip"


def computation(args: argparse.Namespace, backend: distributed.Backend) -> dict[str, Any]:
    """What numbers depend on beside model and input, if only in their last bits: kernels are chosen by shape."""
    threads = args.cpu_threads if backend.device.type == "cpu" else None
    return {"deterministic": args.deterministic, "device": backend.device.type, "cpu_threads": threads}


def make_index(args: argparse.Namespace, backend: distributed.Backend, say: Say) -> int:
    """A folder of sounds to an index; returns how many shards are left to do after a signal."""
    import data
    from data.images.sequence import names_sha256, report_left_out
    from data.sounds.decoding import ClipDecoder
    from data.sounds.long_sounds import ClipSequence, embed_sounds, open_long_sounds
    from data.stores.embeddings import EmbeddingWriter
    from data.stores.resumable import Rounds, explained, open_output
    from models import MuLaN
    from training.files import hold, write_atomically

    with backend.agreement():
        model, about = load(MuLaN, args.model, backend)
        decoder = ClipDecoder(model.config["sample_rate"], model.clip_samples)
        sounds = open_long_sounds(args.audio, decoder, args.max_clips)
        names = [sounds.name(index) for index in range(len(sounds))]
    settings = {
        "task": "embed", **about, "dim": model.dim_latent, "max_clips": args.max_clips, "batch_size": args.batch_size,
        "precision": backend.options.precision, **computation(args, backend), "files": len(names),
        "names_sha256": names_sha256(names), "files_per_shard": args.files_per_shard,
    }  # fmt: skip
    write, folder = explained(write_atomically), Path(args.output)
    _lock = open_output(folder, settings, backend, write=write, hold=hold, fresh=args.fresh, say=say)
    writer = EmbeddingWriter(folder, names, settings, write)
    todo = backend.broadcast_object(writer.shards.unfinished() if backend.is_root else None)
    log, stop = data.BadSampleLog(len(names)), args.on_bad_sample == "error"
    known = [bad for shard in range(writer.n_shards) if shard not in todo for bad in writer.shards.bad(shard)]
    report_left_out(log, known, backend, say, stop=stop)

    ranges = [writer.files_of(shard) for shard in todo[backend.rank :: backend.world_size]]
    clips = iter(ClipSequence(sounds, ranges, num_workers=args.num_workers))
    embed, _ = embedders(model, args.model, backend)
    rounds = Rounds(todo, backend, lambda n: say(f"embedded {n} of {len(todo)} shards"))
    for shard in rounds:
        bad: list[data.BadSample] = []
        with backend.agreement():
            if shard is not None:
                vectors, bad = embed_sounds(next(clips), embed, args.batch_size)
                writer.write_shard(shard, vectors, bad)
        report_left_out(log, bad, backend, say, stop=stop)
    if rounds.left:
        return rounds.left
    with backend.agreement():
        if backend.is_root:
            writer.write_index()
    say(f"{len(names) - log.count} sounds in {writer.n_shards} shards of embeddings: {args.output}")
    return 0


def fit_quantizer(args: argparse.Namespace, backend: distributed.Backend, say: Say) -> int:
    """Codebooks learned from an index, by the root alone: the same for any number of processes."""
    import torch

    from data.stores.embeddings import read_embeddings
    from data.stores.resumable import explained, open_output
    from models import ResidualQuantizer
    from training.files import hold, write_atomically

    with backend.agreement():
        index = read_embeddings(args.index)
    settings = {
        "task": "fit", "index_sha256": index.sha256, "num_quantizers": args.num_quantizers,
        "codebook_size": args.codebook_size, "epochs": args.quantizer_epochs, **computation(args, backend),
    }  # fmt: skip
    folder, write = Path(args.fit_quantizer), explained(write_atomically)
    _lock = open_output(folder, settings, backend, write=write, hold=hold, fresh=args.fresh, say=say)
    with backend.agreement():
        if backend.is_root and not (folder / "config.json").exists():
            quantizer = ResidualQuantizer(index.index["dim"], args.num_quantizers, args.codebook_size)
            quantizer.to(backend.device)
            rows = torch.from_numpy(index.sample(FIT_ROWS * args.codebook_size, seed=0)).to(backend.device)
            left = quantizer.fit(rows, args.quantizer_epochs, seed=0, mark=lambda: backend.mark("fitting"))
            shares = " ".join(f"{share:.3f}" for share in left)
            say(f"{folder}: fitted to {len(rows)} embeddings, of which its levels leave {shares}")
            quantizer.save_pretrained(folder)
    return 0


def write_codes(args: argparse.Namespace, backend: distributed.Backend, say: Say) -> int:
    """The codes of all that is in an index; returns how many shards are left to do after a signal."""
    import torch

    from data.stores.codes import code_dtype
    from data.stores.embeddings import CODES, ShardFolder, read_embeddings
    from data.stores.resumable import Rounds, explained, open_output
    from models import ResidualQuantizer
    from training.files import hold, write_atomically

    with backend.agreement():
        index = read_embeddings(args.index)
        quantizer, about = load(ResidualQuantizer, args.quantizer, backend)
    settings = {"task": "quantize", "index_sha256": index.sha256, **about, **computation(args, backend)}
    folder, write = index.folder / CODES, explained(write_atomically)
    _lock = open_output(folder, settings, backend, write=write, hold=hold, fresh=args.fresh, say=say)
    shards = ShardFolder(folder, CODES, index.rows, write)
    todo = backend.broadcast_object(shards.unfinished() if backend.is_root else None)
    rounds = Rounds(todo, backend, lambda n: say(f"quantized {n} of {len(todo)} shards"))
    for shard in rounds:
        with backend.agreement():
            if shard is not None:
                codes = quantizer.encode(torch.from_numpy(index.load(shard)).to(backend.device))
                shards.write(shard, codes.cpu().numpy().astype(code_dtype(quantizer.codebook_size)))
    if rounds.left:
        return rounds.left
    with backend.agreement():
        if backend.is_root:
            shards.write_index(settings)
    say(f"codes of {sum(index.rows)} sounds: {folder}")
    return 0


def search(args: argparse.Namespace, backend: distributed.Backend, say: Say) -> int:
    """The best matches of each query, by the root alone."""
    import torch

    from data.sounds.decoding import ClipDecoder
    from data.sounds.long_sounds import file_embedder, is_sound
    from data.stores.embeddings import read_embeddings
    from data.stores.search import Answer, read_queries
    from models import MuLaN, ResidualQuantizer

    with backend.agreement():
        if backend.is_root:
            queries, index = read_queries(args.query or [], args.query_file), read_embeddings(args.index)
            model, about = load(MuLaN, args.model, backend)
            if not about.items() <= index.index.items():
                raise ValueError(f"the index in {args.index} was not made by {args.model}: give the model that made it")
            decoder, how = ClipDecoder(model.config["sample_rate"], model.clip_samples), index.index
            # As it was done for the index, so that a sound which is in it has the cosine 1.
            embed, embed_text = embedders(model, args.model, backend)
            embed_file = file_embedder(decoder, embed, how["max_clips"], how["batch_size"])
            vectors = torch.stack([(embed_file if is_sound(query) else embed_text)(query) for query in queries])
            found = index.nearest(vectors.numpy(), args.top_k, lambda: backend.mark("searching"))
            quantizer = load(ResidualQuantizer, args.quantizer, backend)[0] if args.quantizer else None
            codes = quantizer.encode(vectors.to(backend.device)).tolist() if quantizer else [()] * len(queries)
            for answer in map(Answer, queries, found, codes):
                print(answer.as_json() if args.json else answer.as_table(), flush=True)
    return 0


def stages_of(args: argparse.Namespace) -> list[Callable[..., int]]:
    """What was asked for, in order. Raises UserMistake, in one line, about flags that lack another."""
    searching = bool(args.query or args.query_file)
    asked = {"audio": bool(args.audio), "query": searching, "fit_quantizer": bool(args.fit_quantizer)}
    args.index = args.index or args.output
    for flag, others in NEEDS.items():
        if not asked[flag] and (unused := [name for name in others if name in args.explicit]):
            raise distributed.UserMistake(f"--{unused[0]} is for --{flag}; leave it out, or say --{flag}")
    if not (any(asked.values()) or args.quantizer):
        raise distributed.UserMistake("nothing to do: say --audio, --query, --fit_quantizer or --quantizer")
    if (args.audio or searching) and not args.model:
        raise distributed.UserMistake("--audio and --query need --model, the model/ folder of a run of train_mulan.py")
    if (args.audio and not args.output) or not args.index:
        raise distributed.UserMistake("which index? say --index, or --output beside --audio to make one")
    quantizing = args.quantizer and not searching
    stages = {make_index: args.audio, fit_quantizer: args.fit_quantizer, write_codes: quantizing, search: searching}
    return [stage for stage, is_asked in stages.items() if is_asked]


def main(argv: Sequence[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse(argv)
    args.fresh = args.fresh and not distributed.launched_again()
    # The layer plans the batches of a training; here none is shared.
    no_training = {"grad_accum_steps": 1, "max_grad_norm": 0.0, "max_skipped_updates": 0, "compile": False}
    layer = {**vars(args), **no_training, "batch_size": 0, "explicit": args.explicit - {"batch_size"}}
    try:
        stages = stages_of(args)
        with distributed.from_args(argparse.Namespace(**layer)) as backend:
            import torch

            from training.run.run import ASKED_TO_STOP

            torch.set_num_threads(args.cpu_threads)
            report = functools.partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
            say: Say = report if backend.is_root else (lambda text: None)
            for stage in stages:
                if shards_left := stage(args, backend, say):
                    say(f"asked to stop: the same command goes on with the {shards_left} shards that are left")
                    sys.exit(ASKED_TO_STOP)
    except distributed.UserMistake as mistake:
        parser.error(str(mistake))


if __name__ == "__main__":
    main()
