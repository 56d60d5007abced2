"""CLIP (Radford et al. 2021), frozen: embeddings of images and encodings of texts, for models conditioned on them.

The network is open_clip's. Its weights come from the user's file, or are those that open_clip's list names on the
Hugging Face Hub.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.io.fetching import fetch_from_hub
from tandem.io.installed import how_to_install
from tandem.io.published import read_state_dict
from tandem.io.reading import READ_ERRORS, one_line, read_json
from tandem.models.building import build_with_weights, check_arguments

# Of the colours, in [0, 1], of the images that OpenAI trained on; an open_clip_config.json may state others.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class Clip(nn.Module):
    """Both towers of a CLIP. They stay in eval mode, have no gradients, and compute in fp32 unless under autocast;
    results are fp32. Made by `from_file`.

    Attributes:
        embed_dim: Width d of embeddings of images and of texts.
        text_shape: (L, text_dim): tokens of a text, and the width of the encoding of a token.
        tokenize: b texts -> int64 (b, L), by the tokenizer that this model was trained with; longer texts are cut off.
        cosines: Keys of the result of `pairs_to_compare`.
        file: The path of its weights.
        origin: {"name", "weights", "sha256"}, which identify this CLIP in the config of a model that is trained with
            it. A path is reduced to the name of the file, because that config may be published. "sha256" is that of
            the file of the weights.
    """

    cosines: Sequence[str] = ("clip_score", "clip_image_score")
    file: str
    origin: dict[str, str]

    _mean: Tensor
    _std: Tensor

    def __init__(
        self, network: Any, tokenize: Any, embed_dim: int, mean: Sequence[float] = _MEAN, std: Sequence[float] = _STD
    ) -> None:
        super().__init__()
        self.network, self.tokenize, self.embed_dim = network, tokenize, embed_dim
        for name, values in (("_mean", mean), ("_std", std)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)
        size = network.visual.image_size
        self._side: int = size if isinstance(size, int) else size[0]
        self.text_shape = (int(network.context_length), int(self._last_norm.normalized_shape[0]))
        self.requires_grad_(False)
        self.eval()

    @classmethod
    def from_file(
        cls, name: str, weights: str | Path | None, device: torch.device | str = "cpu",
        heartbeat: Callable[[], None] = lambda: None,
    ) -> Clip:  # fmt: skip
        """The model with its weights.

        Args:
            name: A model of open_clip, such as "ViT-L-14-quickgelu" (OpenAI's weights need "quickgelu"), whose images
                are normalised as open_clip says of its published weights, else as OpenAI's; or the path of an
                open_clip_config.json, which may normalise differently.
            weights: A .safetensors file or a plain state dict (.pt, .pth, .bin); or open_clip's name of published
                weights, such as "laion2b_s32b_b82k" (None: "openai"), which are fetched from the Hugging Face Hub
                unless its cache holds them.
            heartbeat: Called repeatedly while the weights are fetched and read.

        Raises:
            ValueError: one line, if open_clip is missing or cannot be imported, the model is unknown or gives no
                encodings of CLIP's own tokens, or the weights are missing, damaged, hostile or of another model.
        """
        open_clip = _open_clip()
        config, preprocessing = _read_configuration(name)
        text_config = config.get("text_cfg") or {}
        _check_text(name, config, text_config)
        tag = str(weights or "openai")
        model_class = open_clip.CustomTextCLIP if config.pop("custom_text", False) else open_clip.CLIP
        if not name.lower().endswith(".json") and (published := _find_published(name, tag, config)):
            preprocessing = published
            model_name, _, file_name = published["hf_hub"].rpartition("/")  # USER/NAME/FILE, or USER/NAME/
            file_name = file_name or "open_clip_model.safetensors"
            weights = fetch_from_hub(f"the weights of --clip {name}", model_name, file_name, heartbeat)
        elif weights is None:
            raise ValueError(f"--clip {name} needs the file of its weights: give --clip_weights")
        try:
            state = read_state_dict(Path(weights))
            check_arguments(config, state)
            network = build_with_weights(lambda: model_class(**copy.deepcopy(config)), state)
        except ValueError as error:
            raise ValueError(f"{weights} holds no weights of --clip {name}: {error}") from None
        try:
            options = text_config.get("tokenizer_kwargs") or {}
            tokenizer = open_clip.SimpleTokenizer(context_length=text_config.get("context_length", 77), **options)
        except READ_ERRORS as error:
            raise ValueError(f"--clip {name} has no tokenizer of such options: {one_line(error)}") from None
        if (vocabulary := text_config.get("vocab_size", tokenizer.vocab_size)) < tokenizer.vocab_size:
            raise ValueError(f"--clip {name} knows {vocabulary} tokens, but its tokenizer {tokenizer.vocab_size}")
        mean, std = (preprocessing.get(key) or default for key, default in (("mean", _MEAN), ("std", _STD)))
        model = cls(network, tokenizer, config["embed_dim"], mean, std).to(device)
        model.file = str(weights)
        names = {"name": Path(name).name if name.lower().endswith(".json") else name, "weights": Path(tag).name}
        model.origin = {**names, "sha256": _sha256(model.file, heartbeat)}
        return model

    @property
    def _last_norm(self) -> nn.LayerNorm:
        return getattr(self.network, "text", self.network).ln_final  # open_clip has two kinds of models

    def train(self, mode: bool = True) -> Clip:
        """Ignore ``mode`` and stay in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def embed_images(self, images: Tensor) -> Tensor:
        """Images (b, 3, h, w) of any size, uint8 or in [0, 1] -> unit vectors (b, d)."""
        return F.normalize(self.network.encode_image(self.preprocess(images)).float(), dim=-1)

    def preprocess(self, images: Tensor) -> Tensor:
        """Images (b, 3, h, w), uint8 or in [0, 1] -> the input of the network (b, 3, side, side): shrunk or enlarged by
        antialiased bicubic interpolation, and normalised."""
        x = images.float() / 255 if images.dtype == torch.uint8 else images.float()
        if x.shape[-2:] != (self._side, self._side):
            x = F.interpolate(x, size=(self._side, self._side), mode="bicubic", antialias=True).clamp(0, 1)
        return (x - self._mean) / self._std

    @torch.no_grad()
    def embed_text(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (b, L) -> unit vectors (b, d), and the encodings of all tokens after the last LayerNorm,
        (b, L, text_dim), zeros after the token that ends the text."""
        outputs: list[Tensor] = []
        hook = self._last_norm.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            embeddings = self.network.encode_text(tokens)
        finally:
            hook.remove()
        is_end = tokens == self.tokenize.eot_token_id
        is_padding = is_end.cumsum(1) - is_end.long() > 0
        encodings = outputs[-1].float().masked_fill(is_padding[..., None], 0)
        return F.normalize(embeddings.float(), dim=-1), encodings

    def pairs_to_compare(self, pictures: Tensor, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
        """Pairs of unit vectors (n, d) for generated pictures (b, 3, h, w) in [0, 1]: clip_score, those of the pictures
        that have a caption and of their captions (Hessel et al. 2021); clip_image_score, those of the b pictures and of
        the batch's images."""
        embeds, tokens = self.embed_images(pictures), batch["tokens"]
        rows = [row for row, caption in enumerate(batch["captions"]) if caption]
        texts = self.embed_text(tokens[rows])[0] if rows else embeds[:0]
        return {"clip_score": (embeds[rows], texts), "clip_image_score": (embeds, self.embed_images(batch["images"]))}


def with_embeddings(batch: Mapping[str, Any], clip: Clip | None, condition_on: Collection[str]) -> dict[str, Any]:
    """A batch with the embeddings that CLIP, if there is one, computes of it, by at most one call of each tower.

    Args:
        batch: "images" uint8 (b, 3, h, w), and "tokens" int64 (b, L) of the captions.
        condition_on: "image" adds image_embed (b, d) of the images, "text" text_encodings (b, L, text_dim) of the
            tokens.
    """
    embedded_batch = dict(batch)
    if clip is not None and "image" in condition_on:
        embedded_batch["image_embed"] = clip.embed_images(batch["images"])
    if clip is not None and "text" in condition_on:
        embedded_batch["text_encodings"] = clip.embed_text(batch["tokens"])[1]
    return embedded_batch


def is_published(origin: Mapping[str, str]) -> bool:
    """Whether `Clip.from_file` can load the names in this `Clip.origin` without files of a user."""
    is_file = origin["name"].lower().endswith(".json") or Path(origin["weights"]).suffix or "/" in origin["weights"]
    return not is_file


def _sha256(path: str, heartbeat: Callable[[], None]) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            heartbeat()
            digest.update(chunk)
    return digest.hexdigest()


def _open_clip() -> Any:
    """The module. Raises ValueError, in one line, if it is missing or cannot be imported."""
    try:
        import open_clip
    except ImportError as error:
        package = "open_clip_torch" if error.name == "open_clip" else error.name
        raise ValueError(f"--clip needs the package {package}: {how_to_install('clip')}") from None
    except RuntimeError as error:  # torchvision raises it where it was built for another PyTorch
        raise ValueError(
            f"--clip: open_clip cannot be imported ({one_line(error)}); torchvision and PyTorch {torch.__version__} "
            "may not belong together: install both anew, pip install --upgrade torch torchvision"
        ) from None
    return open_clip


def _read_configuration(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of open_clip's model, and its preprocessing ("mean" and "std"). Raises ValueError, in one line."""
    if name.lower().endswith(".json"):
        try:
            content = read_json(name)
            config, preprocessing = content.get("model_cfg", content), content.get("preprocess_cfg", {})
            if not {"embed_dim", "vision_cfg", "text_cfg"} <= config.keys():
                raise ValueError("it has not all of embed_dim, vision_cfg and text_cfg")
            text = config["text_cfg"]
            sections = preprocessing, config["vision_cfg"], text, text.get("tokenizer_kwargs")
            if not all(isinstance(section, dict) for section in sections if section is not None):
                raise ValueError("its parts are no objects")
            if config["vision_cfg"].get("timm_model_pretrained"):
                raise ValueError("it would download weights: set timm_model_pretrained to false")
        except OSError as error:
            raise ValueError(f"cannot read --clip {name}: {error.strerror}") from None
        except (ValueError, AttributeError) as error:
            raise ValueError(f"--clip {name} is no configuration of open_clip: {one_line(error)}") from None
        return config, preprocessing
    import open_clip

    model_names = open_clip.list_models()
    if (model_name := name.replace("/", "-")) not in model_names:
        close = difflib.get_close_matches(model_name, model_names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "give one of its names, or an open_clip_config.json"
        raise ValueError(f"open_clip has no model {name!r}: {hint}")
    return open_clip.get_model_config(model_name), {}


def _find_published(name: str, tag: str, config: dict[str, Any]) -> dict[str, Any] | None:
    """open_clip's entry ("hf_hub", "mean", "std", ...) for published weights of a model; None if the tag is the path of
    a file, or looks like one. Raises ValueError, in one line, if there is no such entry, or it is of a model of another
    name."""
    import open_clip

    if os.path.lexists(tag) or Path(tag).suffix or "/" in tag:
        return None
    tags = open_clip.list_pretrained_tags_by_model(name.replace("/", "-"))
    published: dict[str, Any] = open_clip.get_pretrained_cfg(name.replace("/", "-"), tag)
    if not published.get("hf_hub"):
        choices = f"give --clip_weights, a file or one of {', '.join(tags)}" if tags else "give a file"
        raise ValueError(f"open_clip has no published weights {tag!r} of --clip {name}: {choices}")
    if published.get("quick_gelu") and not config.get("quick_gelu"):
        raise ValueError(f"the weights {tag} need the model of another name: give --clip {name}-quickgelu")
    return published


def _check_text(name: str, config: dict[str, Any], text_config: dict[str, Any]) -> None:
    """Raise ValueError, in one line, unless the text tower has CLIP's tokens and an encoding for each of them."""
    if "hf_model_name" in text_config or "hf_tokenizer_name" in text_config or "siglip" in name.lower():
        raise ValueError(f"the tokenizer of --clip {name} is not in open_clip: use a model with CLIP's own tokenizer")
    if "multimodal_cfg" in config or text_config.get("embed_cls"):
        raise ValueError(f"--clip {name} is no plain CLIP: use a model without embed_cls and multimodal_cfg")
