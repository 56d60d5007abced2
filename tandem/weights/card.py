"""The model card of a run: README.md of a model on the Hugging Face Hub, which its author completes.

The card is public, so it names no hosts, paths or keys: it contains numbers, switches and choices of the configuration,
but no free text of the user. The format of the front matter: https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.autoencoder_training import DISCRIMINATOR
from tandem.io.installed import installed_command
from tandem.io.reading import counted
from tandem.reporting.curves import MetricsFile
from tandem.training.metrics.directions import COSTS, FAULTS, better_direction
from tandem.training.run_folder.starts import describe_placement, last_start

CARD, PICTURE = "README.md", "sample.png"

_NUMBERS = re.compile(r"[0-9][0-9eE.,+-]*")
_DEMONSTRATION = re.compile(r"demo:[a-z]+(:[0-9]+)?")
_PATH_SIGNS = re.compile(r"[/\\~$]")
_HIDDEN_METRICS = {*FAULTS, "grad_norm"}


@dataclass(frozen=True)
class Kind:
    """The texts of a card that depend on the model's class alone.

    Args:
        description: "a discrete VAE, which ...": continues "This is".
        script: The training script.
        data: The flag of the training data, and a noun for the data.
        command: The command of the installed package that uses the model, with {} for its name.
        tags: For the Hub's search.
    """

    description: str
    script: str
    data: tuple[str, str]
    command: str
    tags: tuple[str, ...]


_IMAGES, _VIDEOS = ("image_folder", "images"), ("video_folder", "videos")
KINDS = {
    "DiscreteVAE": Kind(
        "a discrete VAE like that of DALL-E (Ramesh et al. 2021), which turns an image into a grid of codes and back",
        "train_vae.py", _IMAGES, "tandem-encode --model {} --image_folder DIR --output codes/",
        ("tandem", "image-tokenizer", "discrete-vae"),
    ),
    "VQGAN": Kind(
        "a VQGAN (Esser et al. 2021), which turns an image into a grid of codes, or of continuous latents, and back",
        "train_vqgan.py", _IMAGES, "tandem-encode --model {} --image_folder DIR --output encoded/",
        ("tandem", "image-tokenizer", "vqgan"),
    ),
    "MuLaN": Kind(
        "a MuLan (Huang et al. 2022), which embeds sounds and texts in one space",
        "train_mulan.py", ("audio_data", "sounds with captions"), "tandem-embed --model {} --audio DIR --output index/",
        ("tandem", "audio-text", "contrastive", "mulan"),
    ),
    "VideoTokenizer": Kind(
        "a causal tokenizer of videos and images, which turns them into grids of codes, or of continuous latents, and "
        "back",
        "train_tokenizer.py", _VIDEOS, "tandem-encode --model {} --video_folder DIR --output encoded/",
        ("tandem", "video-tokenizer", "magvit2"),
    ),
    "Decoder": Kind(
        "a cascade of diffusion models like the decoder of DALL-E 2 (Ramesh et al. 2022), which draws images",
        "train_decoder.py", _IMAGES, "tandem-sample --model {} --output pictures/",
        ("tandem", "diffusion", "dalle2-decoder"),
    ),
}  # fmt: skip


def model_card(
    name: str, model: str, weights: str, kind: Kind, run: Path | None, settings: Mapping[str, Any], *,
    has_picture: bool, has_discriminator: bool, version: str,
) -> str:  # fmt: skip
    """The text of a card.

    Args:
        name: USER/NAME on the Hub.
        model: The class of the model.
        weights: A description of them, which continues "Its weights are".
        run: The folder of the run that trained it, or None if it is not known.
        settings: `public_settings` of the run; empty without one.
        has_picture: Whether PICTURE lies beside the card.
        has_discriminator: Whether the folder of the discriminator does.
        version: Of the package that writes the model.
    """
    tags = "".join(f"- {tag}\n" for tag in (*kind.tags, "safetensors"))
    sections = [
        f"---\n# license: to be chosen by the author, such as mit or cc-by-4.0\nlibrary_name: tandem\ntags:\n{tags}---",
        f"# {name.split('/')[-1]}\n\nThis is {kind.description}. Its weights are {weights}.",
        f"![A sample of the training run]({PICTURE})" if has_picture else "",
        _usage(name, model, kind, has_discriminator, version),
    ]
    if run:
        metrics = MetricsFile(run / "metrics.jsonl")
        metrics.read()
        sections += [_training(kind, settings, metrics), _metrics(metrics), _environment(last_start(run))]
    sections.append("## License\n\nThe author has not said yet under which license this model may be used.")
    return "\n\n".join(filter(None, sections)) + "\n"


def public_settings(
    parser: argparse.ArgumentParser, settings: Mapping[str, Any], model_arguments: Collection[str]
) -> dict[str, Any]:
    """The settings of a run that may be published: numbers, switches, choices, demonstrations, and arguments of the
    model without a path."""
    choices = {action.dest: action.choices or () for action in parser._actions}

    def is_public(name: str, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(is_public(name, element) for element in value)
        if not isinstance(value, str):
            return isinstance(value, (bool, int, float))
        if value in choices.get(name, ()) or _NUMBERS.fullmatch(value) or _DEMONSTRATION.fullmatch(value):
            return True
        return name in model_arguments and not _PATH_SIGNS.search(value)

    return {name: value for name, value in settings.items() if is_public(name, value)}


def newest_picture(run: Path) -> Path | None:
    """The last picture of a run; None if there is none."""
    return max((run / "samples").glob("step_*.png"), default=None)


def _usage(name: str, model: str, kind: Kind, has_discriminator: bool, version: str) -> str:
    train = installed_command(kind.script)
    discriminator = (
        f"`{DISCRIMINATOR}/` holds the discriminator as trained, not averaged, with which the last command goes on "
        "(`--no-init_discriminator`: with a new one); its `config.json` has the settings of all losses.\n\n"
    )
    return f"""## Use

The model is a folder of `model.safetensors` and `config.json`, written by the Python package `tandem-training`
{version}. Its commands, with huggingface_hub installed, download the model by its name; in a checkout of its
sources, `{train}` is `python {kind.script}`, and the others likewise:

    {kind.command.format(name)}
    {train} --init_from {name} --{kind.data[0]} DIR --output_dir runs/more   # trains on from these weights

{discriminator if has_discriminator else ""}In Python:

```python
from tandem.models import {model}

model = {model}.from_pretrained("{name}")
```"""


def _training(kind: Kind, settings: Mapping[str, Any], metrics: MetricsFile) -> str:
    import yaml

    flag, data = kind.data
    demonstration = settings.get(flag)
    text = (
        f"It was trained on the demonstration `{demonstration}`, which the script draws itself."
        if demonstration
        else f"It was trained on {data} (`--{flag}`). The author should say here which they are, and what is "
        "known about their rights and biases."
    )
    last_samples, last_epoch = (metrics.clock[name].as_json()["last"] for name in ("samples", "epoch"))
    if last_samples and last_epoch:
        (samples, update), (epoch, _) = last_samples, last_epoch
        text += f" The run saw {samples:,} samples in {counted(update, 'update')} ({epoch:.3g} epochs)."
    data_option = "" if demonstration else f" --{flag} DIR"
    config_text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=1000).rstrip()
    return f"""## Training

{text} With the configuration below in `config.yaml`, this command trains such a model:

    {installed_command(kind.script)} --config config.yaml{data_option} --output_dir runs/new

<details><summary>Configuration</summary>

```yaml
{config_text}
```

</details>"""


def _metrics(metrics: MetricsFile) -> str:
    """The section about the metrics of the validation or, without one, of the training; "" without any."""
    curves = {
        name: curve.as_json() for name, curve in metrics.curves.items()
        if name not in {*_HIDDEN_METRICS, *COSTS} and not name.startswith("lr") and re.fullmatch(r"[\w/.@-]+", name)
    }  # fmt: skip
    names = [name for name in curves if name.startswith(("valid/", "valid_whole/"))] or list(curves)
    rows = []
    for name in names:
        if last := curves[name]["last"]:  # [value, update], as the highest and lowest are
            best = curves[name][better_direction(name)] if better_direction(name) else None
            rows.append(f"| {name} | {last[0]:.5g} " + (f"| {best[0]:.5g} | {best[1]} |" if best else "| | |"))
    header = "## Metrics\n\n| metric | last | best | update of the best |\n|---|---|---|---|\n"
    return header + "\n".join(rows) if rows else ""


def _environment(start: Mapping[str, Any]) -> str:
    """The section about the last start of the run, without hosts, paths and commands; "" if the start is unknown."""
    facts: dict[str, Any] = {}
    if machine := describe_placement(start):
        facts["processes"] = f"{machine}, {start.get('precision')}"
    packages = start.get("packages")
    facts |= {"Python": start.get("python"), **(packages if isinstance(packages, dict) else {})}
    if isinstance(commit := start.get("git_commit"), str):
        facts["commit of the scripts"] = commit
    return "\n".join(["## Environment\n", *(f"- {name}: {value}" for name, value in facts.items())]) if start else ""
