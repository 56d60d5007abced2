"""Updates of the public packages' own trainers, with models as large as those of the scripts' arguments.

The trainers are those of the packages, except for DALLE-pytorch's, whose loop is a script and not a part of the
package. Their data loaders are replaced by batches that are in memory. Imports that no update needs may be missing:
see `unused`."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_BATCHES = 4
_NEVER = 10**9
_TOKENS = 24  # of a text of the demonstration of train_mulan.py, its padding included


class _Unused(ModuleType):
    """A module whose every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


def unused(names: Sequence[str]) -> None:
    """Let these modules be imported without being installed: a package imports them, but the updates never use them."""
    for name in names:
        sys.modules[name] = _Unused(name)


def dalle_pytorch(args: argparse.Namespace, precision: str, folder: Path) -> Iterator[None]:
    """DALLE-pytorch's discrete VAE, with PyTorch's default Adam."""
    from dalle_pytorch import DiscreteVAE

    vae = DiscreteVAE(
        image_size=args.image_size, num_layers=args.num_layers, num_tokens=args.num_tokens,
        codebook_dim=args.codebook_dim,
        hidden_dim=args.hidden_dim, num_resnet_blocks=args.num_resnet_blocks, kl_div_loss_weight=args.kl_loss_weight,
    )  # fmt: skip
    adam = torch.optim.Adam(vae.parameters(), lr=args.learning_rate)
    for step, images in enumerate(itertools.cycle(_images(args.batch_size, args.image_size))):
        with _autocast(precision):
            loss, _ = vae(images, return_loss=True, return_recons=True, temp=args.starting_temp)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if step % 10 == 0:
            print(loss.item())
        yield


def muse_maskgit(args: argparse.Namespace, precision: str, folder: Path) -> Iterator[None]:
    """VQGanVAETrainer of muse-maskgit-pytorch; its perceptual loss is the squared difference of the pixels."""
    from muse_maskgit_pytorch import VQGanVAE, VQGanVAETrainer
    from torchvision.utils import save_image

    images = _images(args.batch_size, args.image_size)
    (folder / "images").mkdir()
    for number in range(20):  # it insists on a folder with a part for validation
        save_image(images[0][0], folder / "images" / f"{number}.png")
    vae = VQGanVAE(
        dim=args.dim, layers=args.num_layers, codebook_size=args.codebook_size, discr_layers=args.discr_layers,
        vgg=nn.Identity(),
    )  # fmt: skip
    trainer = VQGanVAETrainer(
        vae, folder=str(folder / "images"), num_train_steps=_NEVER, batch_size=args.batch_size,
        image_size=args.image_size, lr=args.learning_rate, results_folder=str(folder / "results"),
        save_results_every=_NEVER, save_model_every=_NEVER, accelerate_kwargs=_accelerate(precision),
    )  # fmt: skip
    trainer.dl_iter = itertools.cycle(images)
    return _steps(trainer.train_step)


def musiclm(args: argparse.Namespace, precision: str, folder: Path) -> Iterator[None]:
    """MuLaNTrainer of musiclm-pytorch, with spectrograms of as many patches as the script's."""
    from musiclm_pytorch import AudioSpectrogramTransformer, MuLaN, MuLaNTrainer, TextTransformer

    from data.tokenizers import open_tokenizer

    heads = {"heads": args.heads, "dim_head": args.dim_head}
    sound = AudioSpectrogramTransformer(
        dim=args.audio_dim, depth=args.audio_depth, patch_size=args.patch_size, patch_dropout_prob=args.patch_dropout,
        spec_n_fft=args.n_fft, spec_win_length=args.n_fft, spec_hop_length=args.hop_length, **heads,
    )  # fmt: skip
    vocabulary = open_tokenizer(args.tokenizer, args.max_text_tokens).vocab_size
    text = TextTransformer(
        dim=args.text_dim, depth=args.text_depth, num_tokens=vocabulary, max_seq_len=args.max_text_tokens, **heads
    )
    samples = [
        (torch.randn(args.batch_size, int(args.sample_rate * args.clip_seconds)) / 10,
         torch.randint(1, vocabulary, (args.batch_size, _TOKENS)))
        for _ in range(_BATCHES)
    ]  # fmt: skip
    trainer = MuLaNTrainer(
        MuLaN(sound, text, dim_latent=args.dim_latent),
        torch.utils.data.TensorDataset(*(torch.cat(parts) for parts in zip(*samples, strict=True))),
        num_train_steps=_NEVER, batch_size=args.batch_size, valid_frac=0, lr=args.learning_rate, betas=args.betas,
        max_grad_norm=args.max_grad_norm, save_model_every=_NEVER, results_folder=str(folder / "results"),
        force_clear_prev_results=False, accelerate_kwargs=_accelerate(precision),
    )  # fmt: skip
    trainer.dl_iter = itertools.cycle(samples)
    return _steps(trainer.train_step)


def magvit2(args: argparse.Namespace, precision: str, folder: Path) -> Iterator[None]:
    """VideoTokenizerTrainer of magvit2-pytorch, without its discriminator."""
    from magvit2_pytorch import VideoTokenizer, VideoTokenizerTrainer

    layers = [layer.split(":") for layer in str(args.layers).split(",")]
    kernel = (args.input_kernel,) * 3
    tokenizer = VideoTokenizer(
        image_size=args.image_size, init_dim=args.init_dim, input_conv_kernel_size=kernel,
        layers=tuple((name, int(width[0])) if width else name for name, *width in layers),
        codebook_size=args.codebook_size, perceptual_loss_weight=0.0, use_gan=False,
        discr_kwargs={"dim": 8, "max_dim": 8, "image_size": args.image_size},  # built though nothing uses it
    )  # fmt: skip
    videos = torch.rand(_BATCHES, args.batch_size, 3, args.num_frames, args.image_size, args.image_size)
    trainer = VideoTokenizerTrainer(
        tokenizer, batch_size=args.batch_size, num_train_steps=_NEVER, learning_rate=args.learning_rate,
        dataset=torch.utils.data.TensorDataset(videos.flatten(0, 1)), valid_frac=0.0, num_frames=args.num_frames,
        checkpoints_folder=str(folder / "checkpoints"), results_folder=str(folder / "results"),
        accelerate_kwargs=_accelerate(precision),
    )  # fmt: skip
    batches = itertools.cycle([(video,) for video in videos])
    return _steps(lambda: trainer.train_step(batches))


def dalle2(args: argparse.Namespace, precision: str, folder: Path) -> Iterator[None]:
    """DecoderTrainer of DALLE2-pytorch: every update is one of each Unet."""
    from accelerate import Accelerator
    from dalle2_pytorch import Decoder, DecoderTrainer, Unet

    from data.demo import WIDTH

    unets = [
        Unet(
            dim=args.dim[0], dim_mults=mults, image_embed_dim=WIDTH, cond_dim=args.cond_dim[0], channels=3,
            num_resnet_blocks=args.num_resnet_blocks[0][0], attn_heads=args.attn_heads[0],
            attn_dim_head=args.attn_dim_head[0], memory_efficient=True, init_cross_embed=False,
            cond_on_image_embeds=number == 0, lowres_cond=number > 0,
        )
        for number, mults in enumerate(args.dim_mults)
    ]  # fmt: skip
    decoder = Decoder(
        tuple(unets), image_sizes=tuple(args.image_sizes), random_crop_sizes=(None, *args.random_crop_sizes[-1:]),
        predict_x_start=True, learned_variance=False,
    )  # fmt: skip
    trainer = DecoderTrainer(
        decoder, accelerator=Accelerator(**_accelerate(precision)), lr=args.learning_rate[0], wd=args.weight_decay[0],
        max_grad_norm=args.max_grad_norm, ema_beta=args.ema_decay,
    )  # fmt: skip
    batches = [(images, torch.randn(len(images), WIDTH)) for images in _images(args.batch_size, args.image_sizes[-1])]
    for step, (images, embeddings) in enumerate(itertools.cycle(batches)):
        for number in range(1, len(unets) + 1):
            loss = trainer(images, image_embed=embeddings, unet_number=number)
            trainer.update(unet_number=number)
        if step % 10 == 0:
            print(loss)
        yield


def _steps(step: Callable[[], Any]) -> Iterator[None]:
    while True:
        step()
        yield


def _images(batch: int, side: int) -> list[Tensor]:
    return [torch.rand(batch, 3, side, side) for _ in range(_BATCHES)]


def _accelerate(precision: str) -> dict[str, Any]:
    return {"mixed_precision": "no" if precision == "fp32" else precision, "cpu": not torch.cuda.is_available()}


def _autocast(precision: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
