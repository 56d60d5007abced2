"""The configuration of a `MuLaN`, whose fields are flags of train_mulan.py. Imports no PyTorch."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.converters import (
    FOLDER,
    PATH,
    any_float,
    fraction,
    non_negative_float,
    positive_float,
    size,
    size_or_0,
    width,
)
from tandem.config.fields import above_0, check_whole, flag, given, specs_of, when, without

from .autoencoders import RecomputingConfig, check_choices
from .towers import AUDIO_KINDS, SAMPLE_RATE, TEXT_KINDS, check_tower, max_tokens

MAX_SCALE = 100.0  # of the similarities of a MuLaN (Radford et al. 2021, section 2.5)
_OWN_TEXT, _OWN_AUDIO = without("text_tower"), without("audio_tower")  # the tower is not a pretrained one
_BANDS = (when("spectrogram", "log_mel"), _OWN_AUDIO)
_MUSICLM_FIXED = {"spectrogram": "power", "spectrogram_padding": "reflect", "hierarchical_spacing": "even"}
_MUSICLM_WINDOWS = {"n_fft": 128, "win_length": 24, "hop_length": 12}
#: Arguments of the model that a file of musiclm-pytorch does not hold.
NOT_IN_MUSICLM_FILE = ("sample_rate", "n_fft", "hop_length")


@dataclass
class MuLaNConfig(RecomputingConfig):
    """Configuration of a `MuLaN`. If heads or dim_head of a tower are None, they are those for both towers; a
    win_length of None is n_fft. `text_tower` and `audio_tower` are the configurations of a `PretrainedTextTower` and a
    `PretrainedAudioTower`, from which sizes, vocabulary and spectrogram then follow.

    Raises:
        ValueError: one line, if a value, or the configuration of a pretrained tower, is not valid.
    """

    layout: str = flag(
        "tandem",
        "tandem: this project's model; musiclm: that of musiclm-pytorch, which loads its weights",
        choices=("tandem", "musiclm"),
        architecture=True,
        title="model",
    )
    dim_latent: int = flag(128, "width of the space that sounds and texts share", width, architecture=True)
    sample_rate: int = flag(
        16000, "all sounds are resampled to this rate", size, metavar="HZ", title="sounds and texts", architecture=True
    )
    clip_seconds: float = flag(
        10.0,
        "length of the clip cut from a sound: at a random place in training, from the middle in validation",
        positive_float,
        metavar="SECONDS",
    )
    max_text_tokens: int = flag(
        256, "texts are cut off after so many tokens", size, metavar="TOKENS", architecture=True
    )
    n_fft: int = flag(
        1024,
        "length of the Fourier transform",
        size,
        metavar="SAMPLES",
        architecture=True,
        title="spectrogram",
        aliases="spec_n_fft",
        requires=_OWN_AUDIO,
    )
    win_length: int | None = flag(
        None,
        "length of the Hann window, with zeros on both sides up to --n_fft (default: --n_fft)",
        size,
        metavar="SAMPLES",
        architecture=True,
        aliases="spec_win_length",
        requires=_OWN_AUDIO,
    )
    hop_length: int = flag(
        160,
        "distance between two windows of the Fourier transform",
        size,
        metavar="SAMPLES",
        architecture=True,
        aliases="spec_hop_length",
        requires=_OWN_AUDIO,
    )
    spectrogram: str = flag(
        "log_mel",
        "kind of spectrogram that the model is given",
        choices=("log_mel", "power"),
        architecture=True,
        requires=_OWN_AUDIO,
    )
    spectrogram_padding: str = flag(
        "silence",
        "padding of a sound before its spectrogram: silence, or the sound itself, mirrored",
        choices=("silence", "reflect"),
        architecture=True,
        requires=_OWN_AUDIO,
        aliases="spec_pad_mode",
    )
    n_mels: int = flag(64, "number of mel bands", size, architecture=True, requires=_BANDS)
    fmin: float = flag(
        0.0, "lowest frequency of the mel bands", non_negative_float, metavar="HZ", architecture=True, requires=_BANDS
    )
    fmax: float | None = flag(
        None,
        "highest frequency of the mel bands (default: half of --sample_rate)",
        positive_float,
        metavar="HZ",
        architecture=True,
        requires=_BANDS,
    )
    time_mask_fraction: float = flag(0.2, "SpecAugment: mask up to this fraction of the time", fraction)
    frequency_mask_fraction: float = flag(0.25, "SpecAugment: mask up to this fraction of the frequencies", fraction)
    audio_dim: int = flag(
        512, "width of the audio tower", width, title="towers", architecture=True, requires=_OWN_AUDIO
    )
    audio_depth: int = flag(6, "layers of the audio tower", size, architecture=True, requires=_OWN_AUDIO)
    text_dim: int = flag(512, "width of the text tower", width, architecture=True, requires=_OWN_TEXT)
    text_depth: int = flag(6, "layers of the text tower", size, architecture=True, requires=_OWN_TEXT)
    heads: int = flag(8, "attention heads of both towers", size, architecture=True)
    dim_head: int = flag(64, "width of an attention head", width, architecture=True)
    audio_heads: int | None = flag(
        None, "heads of the audio tower (default: --heads)", size, architecture=True, requires=_OWN_AUDIO
    )
    audio_dim_head: int | None = flag(
        None, "width of a head of the audio tower (default: --dim_head)", width, architecture=True, requires=_OWN_AUDIO
    )
    text_heads: int | None = flag(
        None, "heads of the text tower (default: --heads)", size, architecture=True, requires=_OWN_TEXT
    )
    text_dim_head: int | None = flag(
        None, "width of a head of the text tower (default: --dim_head)", width, architecture=True, requires=_OWN_TEXT
    )
    ff_mult: int = flag(
        4,
        "inner width of the feed-forwards as a multiple of the tower's, before GEGLU takes 2/3 of it",
        size,
        architecture=True,
    )
    attn_dropout: float = flag(0.0, "dropout of the attention weights and of the outputs of attention", fraction)
    ff_dropout: float = flag(0.0, "dropout of the inner activations of the feed-forwards", fraction)
    patch_size: int = flag(
        16, "side of a patch of the spectrogram", size, metavar="BINS", architecture=True, requires=_OWN_AUDIO
    )
    patch_dropout: float = flag(
        0.25,
        "fraction of the patches that is left out in training",
        fraction,
        aliases="patch_dropout_prob",
        requires=_OWN_AUDIO,
    )
    hierarchical_layers: int = flag(
        0,
        "apply the loss to the outputs of so many layers before the last as well",
        size_or_0,
        architecture=True,
        aliases="hierarchical_contrastive_loss_layers",
    )
    hierarchical_spacing: str = flag(
        "last",
        "layers of --hierarchical_layers: those next to the last, or spaced evenly from the first one on",
        choices=("last", "even"),
        architecture=True,
        requires=above_0("hierarchical_layers"),
    )
    freeze_text_tower: bool = flag(
        False,
        "do not train the weights of --text_tower",
        fixed_on_resume=True,
        title="pretrained towers",
        requires=given("text_tower", "PATH"),
    )
    freeze_audio_tower: bool = flag(
        False,
        "do not train the weights of --audio_tower",
        fixed_on_resume=True,
        requires=given("audio_tower", "PATH"),
    )
    init_logit_scale: float = flag(
        math.log(10.0),
        "natural logarithm of the factor on the cosines at the start (the inverse of the papers' temperature; metrics "
        "call the factor itself `temperature`); it is learned, and the factor is at most 100 (default: ln 10, that is "
        "%(default).4g)",
        any_float,
        title="loss",
    )
    init_bias: float = flag(
        -10.0,
        "added to the scaled cosines at the start; learned (sigmoid)",
        any_float,
        requires=when("loss", "sigmoid"),
    )
    vocab_size: int = 49408
    # Configurations; the flags of the same names are paths.
    text_tower: Any = None
    audio_tower: Any = None

    def __post_init__(self) -> None:
        for tower in ("audio", "text"):
            for name in ("heads", "dim_head"):
                if getattr(self, f"{tower}_{name}") is None:
                    setattr(self, f"{tower}_{name}", getattr(self, name))
            config = getattr(self, f"{tower}_tower")
            if config is not None:
                check_tower(f"{tower}_tower", config, AUDIO_KINDS if tower == "audio" else TEXT_KINDS)
                dim, heads = config["hidden_size"], config["num_attention_heads"]
                sizes = {"dim": dim, "depth": config["num_hidden_layers"], "heads": heads, "dim_head": dim // heads}
                for name, value in sizes.items():
                    setattr(self, f"{tower}_{name}", value)
        if self.text_tower:
            self.vocab_size = self.text_tower["vocab_size"]
        if self.win_length is None:
            self.win_length = self.n_fft

    @classmethod
    def architecture_of(cls, model: Mapping[str, Any], args: Any) -> dict[str, Any]:
        for name in ("text_tower", "audio_tower"):
            if model.get(name) and not getattr(args, name):
                raise ValueError(f"{args.init_from} has a pretrained tower: give the file of that tower as --{name}")
        arguments = super().architecture_of(model, args)
        arguments |= {"tokenizer": model["tokenizer"]} if "tokenizer" in model else {}
        if "assumed" in model:  # a file of musiclm-pytorch: flags may set what it lacks
            arguments["clip_seconds"] = model["clip_seconds"]
            set_by_flags = args.explicit.intersection(NOT_IN_MUSICLM_FILE)
            return {name: value for name, value in arguments.items() if name not in set_by_flags}
        return arguments

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        """For the layout "musiclm", set the values that it requires and, unless a flag sets a window, its windows. Then
        fill in the sizes that no flag sets."""
        if args.layout == "musiclm":
            windows = {} if args.explicit & _MUSICLM_WINDOWS.keys() else _MUSICLM_WINDOWS
            for name, value in {**_MUSICLM_FIXED, **windows}.items():
                if name not in args.explicit:
                    setattr(args, name, value)
        MuLaNConfig.derive_missing(args)

    def tower_arguments(self, tower: str) -> dict[str, Any]:
        """Arguments of the `Transformer` of the "audio" or the "text" tower."""
        sizes = {name: getattr(self, f"{tower}_{name}") for name in ("dim", "depth", "heads", "dim_head")}
        dropout = {"attn_dropout": self.attn_dropout, "ff_dropout": self.ff_dropout}
        return {**sizes, "ff_mult": self.ff_mult, **dropout, "recompute": self.gradient_checkpointing}

    def check(self) -> None:
        """Raise a ValueError, in one line that names the field, if there is no such model."""
        for field in dataclasses.fields(self):
            if str(field.type).startswith("int"):
                check_whole(field.name, getattr(self, field.name), 0 if field.name == "hierarchical_layers" else 1)
        check_choices(self)
        for name, spec in specs_of(type(self)).items():
            if spec.convert is fraction and not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} {value} is not in [0, 1)")
        depth = min(self.audio_depth, self.text_depth)
        if self.hierarchical_layers >= depth:
            limit = f"a tower of {depth} layers has {depth - 1} below its output"
            advice = f"use at most {depth - 1}, or give the towers more layers"
            raise ValueError(f"hierarchical_layers {self.hierarchical_layers}: {limit}; {advice}")
        if not 0 < self.clip_seconds < math.inf:
            raise ValueError(f"clip_seconds {self.clip_seconds} is no positive length")
        visible = (1 - self.time_mask_fraction) * (1 - self.frequency_mask_fraction)
        if visible <= self.patch_dropout:
            problem = f"the largest masks leave {visible:.2g} of a spectrogram, all of which could be dropped"
            advice = "lower it, time_mask_fraction or frequency_mask_fraction"
            raise ValueError(f"patch_dropout {self.patch_dropout}: {problem}; {advice}")
        if not -math.inf < self.init_logit_scale <= math.log(MAX_SCALE):
            limit = f"give at most {math.log(MAX_SCALE):.5g}, the logarithm of the largest factor, {MAX_SCALE:g}"
            raise ValueError(f"init_logit_scale {self.init_logit_scale}: {limit}")
        if not math.isfinite(self.init_bias):
            raise ValueError(f"init_bias {self.init_bias} is not finite")
        text, audio = self.text_tower, self.audio_tower
        if self.layout == "musiclm":
            for name, fixed in _MUSICLM_FIXED.items():
                if (value := getattr(self, name)) != fixed:
                    raise ValueError(f"{name} {value}: layout musiclm has only {fixed}; leave it out")
            if text or audio:
                name = "text_tower" if text else "audio_tower"
                raise ValueError(f"{name} is for layout tandem; musiclm has its own towers")
        if text and self.max_text_tokens > (tower_tokens := max_tokens(text)):
            tower_limit = f"the text tower takes up to {tower_tokens} tokens"
            raise ValueError(f"max_text_tokens {self.max_text_tokens}: {tower_limit}; lower it")
        if audio and self.sample_rate != SAMPLE_RATE:
            raise ValueError(
                f"sample_rate {self.sample_rate}: the audio tower takes sounds of {SAMPLE_RATE} Hz; use that"
            )


@dataclass
class TowerFlags:
    """Flags for the files of pretrained towers, whose configurations are fields of `MuLaNConfig`."""

    text_tower: str | None = flag(
        None,
        "pretrained text tower: an open_clip state dict, or a transformers folder of CLIP, BERT or RoBERTa",
        PATH,
        title="pretrained towers",
        fixed_on_resume=bool,
    )
    text_tower_quick_gelu: bool = flag(
        False,
        "the model in the state dict --text_tower has the activation quick_gelu, as those of OpenAI",
        requires=given("text_tower", "PATH"),
    )
    audio_tower: str | None = flag(
        None, "pretrained audio tower: a transformers folder of an AST", FOLDER, fixed_on_resume=bool
    )

    @classmethod
    def validate(cls, args: argparse.Namespace, parser: Any) -> None:
        """Take the tokenizer in the folder of the text tower, unless --tokenizer is given."""
        if args.text_tower and "tokenizer" not in args.explicit:
            folder = Path(args.text_tower).expanduser()
            if (folder / "tokenizer.json").is_file():
                args.tokenizer = str(folder / "tokenizer.json")
            elif folder.is_dir() and not (folder / "open_clip_config.json").is_file():
                tower = f"--text_tower {args.text_tower}"
                parser.error(f"{tower} has no tokenizer.json: give --tokenizer FILE, or --tokenizer clip")
