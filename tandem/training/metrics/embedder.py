"""Embeddings of sounds and texts for validation and evaluate.py, in chunks that need no more memory than training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem.devices import to_device

if TYPE_CHECKING:
    from tandem.data.tokenizers import Tokenizer

_WIDTH_MULTIPLE = 8  # of a batch's columns of tokens, because every new shape is compiled anew
_TEXTS_AT_A_TIME = 256


def width_of(lengths: Sequence[int]) -> int:
    """Columns of tokens that a batch of texts of these lengths needs, rounded up to a multiple of 8."""
    return math.ceil(max(lengths) / _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


def text_inputs(tokens: Tensor, lengths: Sequence[int]) -> dict[str, Tensor]:
    """The arguments of `encode_text`: tokens (b, t') cut to `width_of` columns, and lengths (b,)."""
    return {"tokens": tokens[:, : width_of(lengths)], "lengths": to_device(torch.tensor(lengths), tokens.device)}


class Embedder:
    """Computes embeddings of a `MuLaN` without noise and gradients, `rows` sounds (a micro-batch) per forward pass.
    Forward passes run in the context that `autocast` returns."""

    def __init__(
        self, model: Any, tokenizer: Tokenizer, rows: int, device: torch.device,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self.model, self._tokenizer, self._rows, self._device = model, tokenizer, rows, device
        self._autocast = autocast

    @torch.no_grad()
    def pairs(self, batch: Mapping[str, Any]) -> Any:
        """The model's output for a batch of pairs: waveforms (b, n), tokens (b, t), lengths."""
        outputs = []
        for start in range(0, len(batch["waveforms"]), self._rows):
            rows = slice(start, start + self._rows)
            texts = text_inputs(batch["tokens"][rows], batch["lengths"][rows])
            with self._autocast():
                outputs.append(self.model(batch["waveforms"][rows], **texts))
        audio, text = (torch.cat([getattr(out, name) for out in outputs]) for name in ("audio", "text"))
        return outputs[0]._replace(audio=audio, text=text)

    @torch.no_grad()
    def sounds(self, waveforms: Tensor) -> Tensor:
        """Waveforms (b, n) -> unit vectors (b, d)."""
        with self._autocast():
            return torch.cat([self.model.encode_audio(chunk) for chunk in waveforms.split(self._rows)])

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> Tensor:
        """Sentences -> unit vectors (n, d)."""
        embeddings = []
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            tokens, lengths = self._tokenizer.encode(list(texts[start : start + _TEXTS_AT_A_TIME]))
            with self._autocast():
                embeddings.append(self.model.encode_text(**text_inputs(tokens.to(self._device), lengths)))
        return torch.cat(embeddings)
