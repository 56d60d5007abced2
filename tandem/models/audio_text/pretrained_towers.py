"""Towers of MuLan that are published encoders: of texts, CLIP (Radford et al. 2021), BERT (Devlin et al. 2019) and
RoBERTa (Liu et al. 2019); of sounds, AST (Gong et al. 2021). The networks are those of the package transformers.

They are trained or frozen; in both cases they have no dropout. `weights.formats.towers` reads the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from tandem.config.models.towers import AUDIO_KINDS, FIELDS, SAMPLE_RATE, TEXT_KINDS, first_position, max_tokens
from tandem.io.installed import missing_package
from tandem.models.layers.attention import SDPA_KERNELS, at_least_fp32, output_layers
from tandem.models.layers.recompute import recompute_in_backward

from .log_mel import check_waveforms
from .text_transformer import mask_tokens

_CLASSES = TEXT_KINDS | AUDIO_KINDS
_FRAME, _HOP, _N_FFT = 400, 160, 512  # samples: 25 ms, 10 ms, and the next power of two
_LOWEST_HZ, _PREEMPHASIS = 20.0, 0.97
_MIN_ENERGY = 2.0**-23  # lower limit of the energies: fp32's epsilon


def import_transformers(purpose: str = "a pretrained tower") -> Any:
    """The package, which `purpose` needs, with an attention "tandem" registered, whose kernels give the same bits with
    and without autograd. Raises ValueError, in one line, if it is not installed."""
    try:
        import transformers
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise missing_package(purpose, error.name or "transformers", "towers") from None

    def attention(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPA_KERNELS):
            return sdpa_attention_forward(*args, **kwargs)

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.AttentionInterface.register("tandem", attention)
    transformers.AttentionMaskInterface.register("tandem", sdpa_mask)
    return transformers


def get_constructor(config: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """For the configuration of a tower, the class of transformers' model, and the arguments of its constructor: its
    configuration, and keyword arguments."""
    with torch.device("cpu"):  # modules create constants when they are imported
        model_class = getattr(import_transformers(), _CLASSES[config["model_type"]])
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"), 0.0)
    fields = {name: config[name] for name in FIELDS if name in config}
    options = {"add_pooling_layer": False} if "type_vocab_size" in config else {}
    return model_class, model_class.config_class(**fields, **dropout, attn_implementation="tandem"), options


class _Tower(nn.Module):
    """The base of both kinds of towers. The weights of `encoder` come from a file. The `norms` of the layers below the
    last are trained even if the tower is frozen.

    Args:
        num_lower: Number of layers below the last whose outputs are returned, too.
        recompute: In training, compute each layer again in the backward pass instead of keeping its activations.
        spacing: See `output_layers`.
        frozen: Give the weights of `encoder` no gradient.
    """

    def __init__(self, config: Mapping[str, Any], num_lower: int, recompute: bool, spacing: str, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        network_class, network_config, options = get_constructor(config)
        self.encoder = network_class(network_config, **options).requires_grad_(not frozen)
        if recompute and not frozen:
            self.encoder.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
            for module in self.encoder.modules():
                if hasattr(module, "_gradient_checkpointing_func"):
                    module._gradient_checkpointing_func = partial(recompute_in_backward, when=True)
        for module in self.encoder.modules():
            module.register_forward_pre_hook(_view_inputs)
        self.layers = output_layers(config["num_hidden_layers"], num_lower, spacing)
        self.norms = nn.ModuleList(nn.LayerNorm(config["hidden_size"], bias=False) for _ in self.layers[1:])

    def _features(self, pool: Callable[[Tensor], Tensor], **inputs: Any) -> Tensor:
        """Features (b, 1 + num_lower, dim) of `layers`. ``pool`` turns the output (b, n, dim) of a layer into (b, dim);
        that of the last layer has passed the encoder's own norm."""
        with torch.no_grad() if self.frozen else nullcontext():
            out = self.encoder(**inputs, output_hidden_states=len(self.layers) > 1)
            outputs = [out.last_hidden_state, *(out.hidden_states[1 + layer] for layer in self.layers[1:])]
            last, *lower = (pool(output) for output in outputs)
        return torch.stack([last, *(norm(output) for norm, output in zip(self.norms, lower, strict=True))], dim=1)


def _view_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Views of a module's inputs. Through a view, autograd first sums the gradients that come from inside the module,
    and then adds those of others that use the input. ZeRO 3, FSDP and recomputation always sum in this order, so that
    bits are the same with and without them."""
    return tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in inputs)


class PretrainedTextTower(_Tower):
    """Tokens to the features of the token that stands for the text: the last one of CLIP, which marks the end, and the
    first of BERT and RoBERTa. It has the interface of `TextTransformer`.

    Args:
        config: One that `check_tower` accepts: "model_type", one of TEXT_KINDS, and those of FIELDS that transformers'
            configuration of that type has.
        frozen: Give the weights no gradient.
    """

    def __init__(self, config: Mapping[str, Any], num_lower: int, recompute: bool, spacing: str, frozen: bool) -> None:
        super().__init__(config, num_lower, recompute, spacing, frozen)
        self.is_clip, self.vocab_size = config["model_type"] == "clip_text_model", config["vocab_size"]
        self.max_tokens, self.first_position = max_tokens(config), first_position(config)

    def forward(self, tokens: Tensor, lengths: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """As that of `TextTransformer`; the dropout_keys are not used."""
        tokens, is_token = mask_tokens(tokens, lengths, self.vocab_size, self.max_tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        row_indices = torch.arange(len(tokens), device=tokens.device)
        inputs = {"input_ids": tokens, "position_ids": (self.first_position + positions)[None]}
        if self.is_clip:  # no token sees a later one
            read_positions = (lengths - 1).clamp(min=0)
        else:
            read_positions = torch.zeros_like(lengths)
            # The first token is never hidden, so that no row is empty.
            inputs |= {"attention_mask": (is_token | (positions == 0))[:, None, None, :],
                       "token_type_ids": torch.zeros_like(tokens)}  # fmt: skip
        return self._features(lambda output: output[row_indices, read_positions], **inputs)


class PretrainedAudioTower(_Tower):
    """Log-mel spectrograms to the mean of the features of AST's two class tokens. It has the interface of
    `AudioTransformer`, but no patch dropout.

    Args:
        config: One that `check_tower` accepts: "model_type", one of AUDIO_KINDS, those of FIELDS that transformers'
            configuration of that type has (clips shorter than "max_length" frames are padded as by transformers'
            extractor), and "mean" and "std" of `Fbank`.
        frozen: Give the weights no gradient.
    """

    def __init__(self, config: Mapping[str, Any], num_lower: int, recompute: bool, spacing: str, frozen: bool) -> None:
        super().__init__(config, num_lower, recompute, spacing, frozen)
        self.frames = config["max_length"]
        self.padding = -config["mean"] / (2 * config["std"])  # a log energy of 0, normalised

    def grid(self, bands: int, frames: int) -> tuple[int, int]:
        """(0, 0): the tower drops no patches, so it needs no noise."""
        return 0, 0

    def crop(self, spectrograms: Tensor) -> Tensor:
        """The part of spectrograms (b, bands, frames) that the tower takes: up to config["max_length"] frames."""
        return spectrograms[..., : self.frames]

    def forward(self, spectrograms: Tensor, noise: Tensor | None = None, dropout_keys: Tensor | None = None) -> Tensor:
        """Spectrograms (b, bands, frames) of `Fbank` -> (b, 1 + num_lower, dim), [:, 0] that of the final output.
        Noise and dropout_keys are not used."""
        x = self.crop(spectrograms)
        x = F.pad(x, (0, self.frames - x.shape[-1]), value=self.padding).mT
        x = x.to(self.encoder.embeddings.position_embeddings.dtype)
        return self._features(lambda output: output[:, :2].mean(dim=1), input_values=x)


class Fbank:
    """Waveforms (b, n) at 16 kHz to the log-mel spectrograms of Kaldi, as transformers' ASTFeatureExtractor makes them
    one by one on the CPU: frames inside the clip, each without its mean, with a pre-emphasis and a symmetric Hann
    window; natural logarithms of the energies in bands; minus a mean and over twice a standard deviation.

    All clips are computed at once, on their device; the extractor takes 50 ms of a CPU for a clip of 10 s. Always in
    fp32 (in fp64 for fp64 waveforms), whatever the precision of the model around it. It has the interface of
    `log_mel.Spectrogram`, and like it is no module with buffers, because some backends cast buffers.

    Args:
        config: That of a `PretrainedAudioTower`; "num_mel_bins", "mean" and "std" are used.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.sample_rate, self.bands = SAMPLE_RATE, int(config["num_mel_bins"])
        self.mean, self.std = config["mean"], config["std"]
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def num_frames(self, samples: int) -> int:
        """Number of frames of a clip with this number of samples; a clip shorter than a frame is padded to one."""
        return 1 + (max(samples, _FRAME) - _FRAME) // _HOP

    def __call__(self, waveforms: Tensor) -> Tensor:
        """Waveforms (b, n) in [-1, 1] -> (b, bands, frames), in fp32 or fp64.

        Raises:
            ValueError: waveforms that are not of two dimensions.
        """
        check_waveforms(waveforms)
        with torch.autocast(waveforms.device.type, enabled=False):
            waveforms = at_least_fp32(waveforms)
            waveforms = F.pad(waveforms, (0, max(0, _FRAME - waveforms.shape[1])))
            window, filters = self.prepare(waveforms.device, waveforms.dtype)
            frames = waveforms.unfold(1, _FRAME, _HOP)
            frames = frames - frames.mean(dim=-1, keepdim=True)
            previous = F.pad(frames[..., :-1], (1, 0))  # the window is 0 at the first sample, which has none
            spectrum = torch.fft.rfft((frames - _PREEMPHASIS * previous) * window, _N_FFT)
            power = spectrum.real.square() + spectrum.imag.square()
            bands = (power @ filters).clamp(min=_MIN_ENERGY).log().mT
            return (bands - self.mean) / (2 * self.std)

    def prepare(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """The window (400,) and the filters (257, bands), made once for each device and dtype."""
        key = device, dtype
        if key not in self._constants:
            import_transformers()
            from transformers.audio_utils import mel_filter_bank

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # AST's lowest bands are narrower than a bin
                filters = mel_filter_bank(
                    num_frequency_bins=_N_FFT // 2 + 1, num_mel_filters=self.bands, min_frequency=_LOWEST_HZ,
                    max_frequency=SAMPLE_RATE / 2, sampling_rate=SAMPLE_RATE, mel_scale="kaldi",
                    triangularize_in_mel_space=True,
                )  # fmt: skip
            with torch.inference_mode(False):  # training, too, uses these cached tensors
                window = torch.hann_window(_FRAME, periodic=False, dtype=torch.float64, device="cpu")
                self._constants[key] = window.to(*key), torch.from_numpy(filters).to(*key)
        return self._constants[key]
