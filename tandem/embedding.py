"""A trained MuLaN that embeds clips and sentences, for embed.py and evaluate.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem import distributed
from tandem.data.decoding.sounds import ClipDecoder
from tandem.data.tokenizers import Tokenizer, open_tokenizer
from tandem.devices import to_device
from tandem.distributed import ProcessGroup
from tandem.models.building import require_room
from tandem.weights.load import open_model


class Embedder(NamedTuple):
    """A MuLaN on the device of the run.

    identity: the model's "config" and "weights_sha256", see `tandem.weights.load.Trained`.
    dim: length of an embedding.
    decoder: reads clips of the model's length from sounds.
    embed_clips: waveforms (b, n) in [-1, 1] -> unit vectors (b, dim), fp32 on the device of the run; they are computed
        in the precision of the run.
    embed_text: a sentence -> its unit vector (dim,). Each sentence is a batch of its own, so that no bit of its vector
        depends on other sentences.
    """

    identity: dict[str, Any]
    dim: int
    decoder: ClipDecoder
    embed_clips: Callable[[Tensor], Tensor]
    embed_text: Callable[[str], Tensor]


def open_embedder(path: str, batch_size: int, processes: ProcessGroup, precision: str) -> Embedder:
    """The MuLaN at a path or name. Raises ValueError, in one line, if there is none or the memory does not suffice for
    a batch."""
    model, identity, tokenizer_path, assumed = open_model(path, "MuLaN")
    if assumed:
        processes.say(assumed)
    require_room(f"a batch of {batch_size} clips", batch_size, model.clip_elements)
    model.to(processes.device)
    config = model.config

    @torch.no_grad()
    def embed_clips(waveforms: Tensor) -> Tensor:
        processes.heartbeat("embedding")
        with distributed.autocast(precision, processes.device):
            return model.encode_audio(to_device(waveforms, processes.device)).float()

    @functools.cache
    def tokenizer() -> Tokenizer:
        tokenizer_name, vocab_size = str(tokenizer_path or "clip"), config["vocab_size"]
        opened = open_tokenizer(tokenizer_name, config["max_text_tokens"], model.adds_special_tokens)
        if opened.vocab_size > vocab_size or (opened.vocab_size < vocab_size and not config.get("text_tower")):
            raise ValueError(
                f"the model takes {vocab_size} tokens, but the tokenizer {tokenizer_name} has "
                f"{opened.vocab_size}: put the tokenizer.json that it was trained with into its folder"
            )
        return opened

    @torch.no_grad()
    def embed_text(text: str) -> Tensor:
        processes.heartbeat("embedding")
        tokens, lengths = tokenizer().encode([text])
        tokens = tokens[:, : lengths[0]].to(processes.device)
        return model.encode_text(tokens, torch.tensor(lengths, device=processes.device))[0].float().cpu()

    decoder = ClipDecoder(config["sample_rate"], model.clip_samples)
    return Embedder(identity, config["dim_latent"], decoder, embed_clips, embed_text)


def unit_means(vectors: Sequence[Tensor]) -> Tensor:
    """The embeddings (k, d) of the clips of each of n sounds -> float32 (n, d): the normalized means. Raises ValueError
    if one is not finite."""
    means = torch.stack([clip_vectors.double().mean(0) for clip_vectors in vectors])
    if not means.isfinite().all():
        raise ValueError("the model gives embeddings that are not finite: with fp16, try --precision bf16 or fp32")
    return torch.nn.functional.normalize(means, dim=1).float()
