"""A bidirectional transformer over a caption, read out at a class token (Devlin et al. 2019, "BERT")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tandem.config.models.mulan import MuLaNConfig
from tandem.models.layers.attention import Transformer, output_layers

_INIT_STD = 0.02


class TextTransformer(nn.Module):
    """Tokens (b, t) in [0, vocab_size), t <= max_text_tokens, to the features of the class token, in the final output
    and in hierarchical_layers layers below it. In the layout "musiclm" no token attends to a token 0."""

    def __init__(self, config: MuLaNConfig) -> None:
        super().__init__()
        dim = config.text_dim
        self.vocab_size, self.max_tokens = config.vocab_size, config.max_text_tokens
        self.pad_token = 0 if config.layout == "musiclm" else None
        self.tokens = nn.Embedding(self.vocab_size, dim)
        self.positions = nn.Embedding(self.max_tokens, dim)
        self.cls = nn.Parameter(torch.empty(dim))
        self.transformer = Transformer(**config.tower_arguments("text"))
        self.layers = output_layers(config.text_depth, config.hierarchical_layers, config.hierarchical_spacing)
        self.norms = nn.ModuleList(nn.LayerNorm(dim, bias=False) for _ in self.layers)
        for weight in (self.tokens.weight, self.positions.weight, self.cls):
            nn.init.normal_(weight, std=_INIT_STD)

    def forward(self, tokens: Tensor, lengths: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """Tokens int64 (b, t) -> features (b, 1 + hierarchical_layers, dim); [:, 0] are those of the final output.

        Args:
            lengths: int64 (b,), number of tokens of each caption. Tokens beyond it are ignored.
            dropout_keys: int64 (b, 2), for the dropout in the transformer; None drops nothing.

        Raises:
            ValueError: tokens or lengths of another shape, more than max_tokens columns or, on the CPU, a token outside
                the vocabulary. A GPU checks no tokens, because the host would wait for it; there the embedding
                look-up stops the process.
        """
        tokens, is_token = mask_tokens(tokens, lengths, self.vocab_size, self.max_tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.pad_token is not None:
            is_token = is_token & (tokens != self.pad_token)
        x = self.tokens(tokens) + self.positions(positions)
        x = torch.cat([self.cls.expand(len(x), 1, -1).to(x.dtype), x], dim=1)
        bias = torch.zeros(is_token.shape, dtype=x.dtype, device=x.device).masked_fill(~is_token, float("-inf"))
        bias = nn.functional.pad(bias, (1, 0))[:, None, None]  # the class token is never hidden, so no row is empty
        outputs = self.transformer(x, bias, dropout_keys)
        pairs = zip(self.layers, self.norms, strict=True)
        return torch.stack([norm(outputs[layer][:, 0]) for layer, norm in pairs], dim=1)


def mask_tokens(tokens: Tensor, lengths: Tensor, vocab_size: int, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens (b, t) with 0 in place of those beyond lengths (b,), and a mask of the others, bool (b, t). Raises
    ValueError as `TextTransformer.forward`."""
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        shapes = f"tokens of shape {tuple(tokens.shape)} and lengths of shape {tuple(lengths.shape)}"
        raise ValueError(f"{shapes}: give (b, t), (b,)")
    if tokens.shape[1] > max_tokens:
        raise ValueError(f"{tokens.shape[1]} columns of tokens; this model takes up to {max_tokens}: cut them")
    is_token = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    tokens = tokens.where(is_token, 0)
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling() and tokens.numel():
        low, high = (int(extreme) for extreme in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            problem = f"token {low if low < 0 else high} is not in the vocabulary of {vocab_size}"
            raise ValueError(f"{problem}; this tokenizer does not belong to this model")
    return tokens, is_token
