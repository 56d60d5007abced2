"""MuLan (Huang et al. 2022) in one file: a sound and a sentence about it become unit vectors with a large cosine.

    python reference/mulan.py sounds/                     # has a manifest.csv with the columns path and caption
    python reference/mulan.py digits/ --clip_seconds 0.7 --hop_length 80 --patch_size 8 --audio_dim 96 --audio_depth 3 \
        --text_dim 96 --text_depth 2 --heads 4 --dim_head 24 --learning_rate 1e-3 --lr_warmup_steps 50

The weights, mulan.safetensors, have the names of train_mulan.py's model. A text is read byte by byte.
"""

import argparse
import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import soundfile
import soxr
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Settings:  # flags of train_mulan.py, with its defaults but for max_steps, which it derives from the data
    sample_rate: int = 16000
    clip_seconds: float = 10.0
    n_fft: int = 1024
    hop_length: int = 160
    n_mels: int = 64
    time_mask_fraction: float = 0.2
    frequency_mask_fraction: float = 0.25
    patch_size: int = 16
    patch_dropout: float = 0.25
    audio_dim: int = 512
    audio_depth: int = 6
    text_dim: int = 512
    text_depth: int = 6
    heads: int = 8
    dim_head: int = 64
    max_text_tokens: int = 256
    dim_latent: int = 128
    init_logit_scale: float = math.log(10.0)
    batch_size: int = 32
    max_steps: int = 600
    learning_rate: float = 3e-4
    lr_warmup_steps: int = 500
    weight_decay: float = 0.01
    max_grad_norm: float = 0.5


def normalize(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-8).rsqrt()  # zeros have a finite gradient


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim, bias=False)
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.q_scale, self.k_scale = nn.Parameter(torch.ones(dim_head)), nn.Parameter(torch.ones(dim_head))
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.to_qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = normalize(q) * self.q_scale, normalize(k) * self.k_scale  # for small logits (Henry et al. 2020)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=8.0)
        return self.to_out(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        inner, self.norm = 4 * dim * 2 // 3, nn.LayerNorm(dim, bias=False)  # 2/3: a gated unit has a third matrix
        self.expand, self.contract = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.expand(self.norm(x)).chunk(2, dim=-1)
        return self.contract(values * F.gelu(gates))  # GEGLU (Shazeer 2020)


class Transformer(nn.Module):
    def __init__(self, dim: int, depth: int, s: Settings) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attention(dim, s.heads, s.dim_head) for _ in range(depth))
        self.feed_forward = nn.ModuleList(FeedForward(dim) for _ in range(depth))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # tokens (b, n, dim), bias of the logits (b, heads, n, n)
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x = x + attention(x, bias)
            x = x + feed_forward(x)
        return x


def log_mel(waveforms: Tensor, s: Settings) -> Tensor:
    """Waveforms (b, n) in [-1, 1] -> decibels (b, n_mels, frames), at most 80 below the loudest, of triangles of area 1
    on Slaney's mel scale (1998): 3 mel for 200 Hz up to 1 kHz, and 27 mel for each factor of 6.4 above."""
    mels = torch.linspace(0, 15 + 27 * math.log(s.sample_rate / 2000, 6.4), s.n_mels + 2, dtype=torch.float64)[:, None]
    edges = torch.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
    low, centre, high = edges[:-2], edges[1:-1], edges[2:]
    hz = torch.linspace(0, s.sample_rate / 2, s.n_fft // 2 + 1, dtype=torch.float64)
    triangles = torch.minimum((hz - low) / (centre - low), (high - hz) / (high - centre)).clamp(min=0)
    filters, window = triangles * 2 / (high - low), torch.hann_window(s.n_fft, dtype=torch.float64).to(waveforms)
    spectra = torch.stft(waveforms, s.n_fft, s.hop_length, window=window, pad_mode="constant", return_complex=True)
    decibels = 10 * (filters.to(waveforms) @ spectra.abs().square()).clamp(min=1e-10).log10()
    return (decibels.maximum(decibels.amax((1, 2), keepdim=True) - 80) + 20) / 40  # loud music: about [-1, 1]


def random_mask(noise: Tensor, size: int, fraction: float) -> Tensor:
    """SpecAugment (Park et al. 2019): a range of up to fraction x size places in each row; (b, 2) -> bool (b, size)."""
    length = (noise[:, :1] * (int(fraction * size) + 1)).floor()
    start = (noise[:, 1:] * (size - length + 1)).floor()
    position = torch.arange(size, device=noise.device)
    return (start <= position) & (position < start + length)


class AudioTransformer(nn.Module):  # Gong et al. 2021, AST
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.s, dim, patch, width = s, s.audio_dim, s.patch_size**2, max(32, s.audio_dim // 4)
        self.embed = nn.ModuleDict({"norm_before": nn.LayerNorm(patch), "project": nn.Linear(patch, dim)})
        self.embed.update({"levels": nn.Linear(2, dim, bias=False), "norm_after": nn.LayerNorm(dim)})
        layers = nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, s.heads)
        self.relative_bias = nn.ModuleDict({"mlp": nn.Sequential(*layers)})
        self.transformer = Transformer(dim, s.audio_depth, s)
        self.norms = nn.Sequential(nn.LayerNorm(dim, bias=False))

    def forward(self, waveforms: Tensor, noise: Tensor | None) -> Tensor:
        """(b, n) -> (b, dim). Uniform noise (b, 4 + patches) chooses masks and patches to leave out; None: neither."""
        s, p, x = self.s, self.s.patch_size, log_mel(waveforms, self.s)
        rows, columns = x.shape[1] // p, x.shape[2] // p
        x, indices = x[:, : rows * p, : columns * p], torch.arange(rows * columns, device=x.device)[None]
        if noise is not None:
            frames = random_mask(noise[:, :2], columns * p, s.time_mask_fraction)
            bands = random_mask(noise[:, 2:4], rows * p, s.frequency_mask_fraction)
            x = x.masked_fill(frames[:, None, :] | bands[:, :, None], 0.0)
            count = rows * columns - int(rows * columns * s.patch_dropout)
            indices = noise[:, 4:].argsort(dim=1, stable=True)[:, :count]
        patches = F.unfold(x[:, None], p, stride=p).mT.take_along_dim(indices[..., None], dim=1)
        # A norm before and after the projection (Kumar et al. 2023). The first removes the level, which is added back.
        levels = torch.stack([patches.mean(-1), patches.std(-1, correction=0)], dim=-1).asinh()
        projected = self.embed["project"](self.embed["norm_before"](patches)) + self.embed["levels"](levels)
        # Fixed positions: half of the width encodes the row, half the column (Vaswani et al. 2017, section 3.5).
        row, column, quarter = indices // columns, indices % columns, s.audio_dim // 4
        frequencies = torch.exp(torch.arange(quarter, device=x.device) * (-math.log(1e4) / quarter))
        sinusoids = [wave(axis[..., None] * frequencies) for axis in (row, column) for wave in (torch.sin, torch.cos)]
        # Relative ones: a small network makes a bias for each head of a displacement d, given as sign(d) ln(1 + |d|).
        all_d = torch.cartesian_prod(torch.arange(1 - rows, rows), torch.arange(1 - columns, columns)).to(x.device)
        table = self.relative_bias["mlp"](all_d.sign() * all_d.abs().log1p())
        dy, dx = (axis[:, :, None] - axis[:, None, :] for axis in (row, column))
        bias = table[(dy + rows - 1) * (2 * columns - 1) + dx + columns - 1].permute(0, 3, 1, 2)
        tokens = self.embed["norm_after"](projected) + torch.cat(sinusoids, dim=-1)
        return self.norms(self.transformer(tokens, bias).mean(dim=1))


class TextTransformer(nn.Module):  # bidirectional, read out at a class token (Devlin et al. 2019, BERT)
    def __init__(self, vocab_size: int, s: Settings) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, s.text_dim), nn.Embedding(s.max_text_tokens, s.text_dim)
        self.cls = nn.Parameter(torch.empty(s.text_dim))
        for weight in (self.tokens.weight, self.positions.weight, self.cls):
            nn.init.normal_(weight, std=0.02)
        self.transformer = Transformer(s.text_dim, s.text_depth, s)
        self.norms = nn.Sequential(nn.LayerNorm(s.text_dim, bias=False))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:  # (b, t), padded, and the true lengths (b,)
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = torch.cat([self.cls.expand(len(tokens), 1, -1), self.tokens(tokens) + self.positions(position)], dim=1)
        is_padding = F.pad(position >= lengths[:, None], (1, 0))[:, None, None]  # the class token is no padding
        return self.norms(self.transformer(x, torch.where(is_padding, -torch.inf, 0.0))[:, 0])


class MuLaN(nn.Module):
    def __init__(self, vocab_size: int, s: Settings) -> None:
        super().__init__()
        self.audio, self.text = AudioTransformer(s), TextTransformer(vocab_size, s)
        self.audio_latents = nn.ModuleDict({"projections": nn.Sequential(nn.Linear(s.audio_dim, s.dim_latent))})
        self.text_latents = nn.ModuleDict({"projections": nn.Sequential(nn.Linear(s.text_dim, s.dim_latent))})
        self.logit_scale = nn.Parameter(torch.tensor([s.init_logit_scale]))
        self.bias = nn.Parameter(torch.tensor([-10.0]))  # of the sigmoid loss, which is left out here

    def forward(self, batch: Mapping[str, Tensor], noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        audio, text = self.audio(batch["waveforms"], noise), self.text(batch["tokens"], batch["lengths"])
        return normalize(self.audio_latents["projections"](audio)), normalize(self.text_latents["projections"](text))


def train(
    model: MuLaN, batches: Iterable[Mapping[str, Tensor]], noise: Callable[[int, int], Tensor], s: Settings
) -> Iterator[dict[str, Tensor]]:
    """Update once for each batch (see `main`). noise: (step, b) -> (b, 4 + patches), uniform in [0, 1)."""
    matrices, vectors = ([w for w in model.parameters() if (w.ndim > 1) == is_matrix] for is_matrix in (True, False))
    optimizer = torch.optim.AdamW(matrices, betas=(0.9, 0.99), weight_decay=s.weight_decay, fused=True)
    optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
    warmup = min(s.lr_warmup_steps, s.max_steps // 2)
    for step, batch in zip(range(s.max_steps), batches, strict=False):
        cosine = 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (s.max_steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = s.learning_rate * ((step + 1) / warmup if step < warmup else cosine)
        audio, text = model(batch, noise(step, len(batch["waveforms"])))
        scale, excluded = model.logit_scale.exp(), batch["caption_ids"][:, None] == batch["caption_ids"]
        logits = scale * audio @ text.T
        # Cross-entropy of each sound among all texts and of each text among all sounds. The denominators leave out the
        # pair itself (decoupled contrastive learning, Yeh et al. 2022), and other pairs of the same caption.
        negatives = logits.masked_fill(excluded, -torch.inf)
        losses = (negatives.logsumexp(dim=1) + negatives.logsumexp(dim=0)) / 2 - logits.diagonal()
        loss = torch.where(excluded.all(dim=1), 0.0, losses).mean()  # a pair without negatives has no loss
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
        optimizer.step()
        model.logit_scale.data.clamp_(max=math.log(100))  # as in CLIP: a larger factor is unstable
        yield {"loss": loss.detach(), "grad_norm": norm, "temperature": scale.detach()}


def draw_noise(s: Settings, b: int, device: str) -> Tensor:
    """For `train`: uniform noise (b, 4 + patches) in [0, 1) for b pairs."""
    columns = (round(s.clip_seconds * s.sample_rate) // s.hop_length + 1) // s.patch_size
    return torch.rand(b, 4 + s.n_mels // s.patch_size * columns, device=device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for field in fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    args = vars(parser.parse_args())
    folder, s, device = args.pop("folder"), Settings(**args), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    waves, texts, samples = [], [], round(s.clip_seconds * s.sample_rate)
    for row in csv.DictReader((folder / "manifest.csv").open()):
        wave, rate = soundfile.read(folder / row["path"], dtype="float32", always_2d=True)
        mono = torch.from_numpy(soxr.resample(wave.mean(axis=1), rate, s.sample_rate))
        waves.append(mono.repeat(1 + samples // len(mono))[:samples])  # its beginning; a short one is repeated
        texts.append(row["caption"].encode()[: s.max_text_tokens])
    tokens = nn.utils.rnn.pad_sequence([torch.tensor([*text]) for text in texts], batch_first=True)
    lengths, ids = torch.tensor([*map(len, texts)]), torch.tensor([*map(texts.index, texts)])  # equal texts, equal ids
    pairs = {"waveforms": torch.stack(waves), "tokens": tokens, "lengths": lengths, "caption_ids": ids}

    def take_batch(rows: Tensor) -> dict[str, Tensor]:
        return {name: entries[rows].to(device) for name, entries in pairs.items()}

    test_rows, train_rows = torch.randperm(len(texts)).tensor_split([max(1, len(texts) // 10)])
    batches = (take_batch(train_rows[torch.randperm(len(train_rows))[: s.batch_size]]) for _ in range(s.max_steps))
    model = MuLaN(256, s).to(device)
    for step, values in enumerate(train(model, batches, lambda _, b: draw_noise(s, b, device), s)):
        if step % 50 == 0:
            print(step, {name: round(value.item(), 4) for name, value in values.items()})
    save_file(model.state_dict(), "mulan.safetensors")
    with torch.no_grad():
        audio, text = model(take_batch(test_rows))
    test_ids = ids[test_rows]
    is_right = test_ids[(audio @ text.T).argmax(dim=1).cpu()] == test_ids
    print(f"R@1 of {len(is_right)} unheard sounds, {len(test_ids.unique())} texts: {is_right.double().mean():.2f}")


if __name__ == "__main__":
    main()
