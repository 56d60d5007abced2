"""The model card of a run: README.md of a model on the Hugging Face Hub, a text that a person completes.

The card is public, so it says nothing about the machine: of the configuration it shows numbers, switches and words that
the parser knows, but no text that a user typed, which may be a path, a key or a name. The format of the front matter:
https://huggingface.co/docs/hub/model-cards.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.files.installed import installed_command
from tandem.files.reading import parse_json, read_lines

from ..measures.directions import COSTS, better
from .starts import last_start

PICTURE = "sample.png"  # beside the card

_NUMBERS = re.compile(r"[0-9][0-9eE.,+-]*")
_DEMONSTRATION = re.compile(r"demo:[a-z]+(:[0-9]+)?")
_PATH_SIGNS = re.compile(r"[/\\~$]")
_NOT_SHOWN = {"step", "samples", "epoch", "bad_samples", "skipped_updates", "grad_norm"}


@dataclass(frozen=True)
class Kind:
    """What a card says about every model of a class.

    Args:
        what: "a discrete VAE, which ...": continues "This is".
        data: The flag that names the training data, and what it is called.
        use: The command of the installed package that uses the model, with {} for its name.
        tags: For the Hub's search.
    """

    what: str
    script: str
    data: tuple[str, str]
    use: str
    tags: tuple[str, ...]


def model_card(
    name: str, model: str, weights: str, kind: Kind, run: Path | None, settings: Mapping[str, Any], has_picture: bool,
    version: str,
) -> str:  # fmt: skip
    """The text of a card.

    Args:
        name: USER/NAME on the Hub.
        model: The class of the model.
        weights: What they are, in words.
        run: The folder of the run that trained it, or None if it is not known.
        settings: `public_settings` of the run; empty without one.
        has_picture: Whether PICTURE lies beside the card.
        version: Of the package that writes the model.
    """
    metrics = read_metrics(run) if run else []
    picture = [f"![A sample of the training run]({PICTURE})"] if has_picture else []
    sections = [
        _front_matter(kind.tags),
        f"# {name.split('/')[-1]}\n\nThis is {kind.what}. Its weights are {weights}.",
        *picture,
        _use(name, model, kind, version),
        *([_training(kind, settings, metrics[-1] if metrics else {})] if run else []),
        *([_metrics(metrics)] if _shown_metrics(metrics) else []),
        *([_environment(last_start(run))] if run and last_start(run) else []),
        "## License\n\nThe author has not said yet under which license this model may be used.",
    ]
    return "\n\n".join(sections) + "\n"


def public_settings(
    parser: argparse.ArgumentParser, settings: Mapping[str, Any], model_arguments: Collection[str]
) -> dict[str, Any]:
    """The settings of a run that a stranger may read: numbers, switches, choices, demonstrations, and what describes
    the model."""
    choices = {action.dest: action.choices or () for action in parser._actions}

    def is_public(name: str, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return all(is_public(name, each) for each in value)
        if not isinstance(value, str):
            return isinstance(value, (bool, int, float))
        if value in choices.get(name, ()) or _NUMBERS.fullmatch(value) or _DEMONSTRATION.fullmatch(value):
            return True
        return name in model_arguments and not _PATH_SIGNS.search(value)

    return {name: value for name, value in settings.items() if is_public(name, value)}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, without those that are damaged; empty if there is no such file."""
    found: list[dict[str, Any]] = []
    try:
        for text in read_lines(run / "metrics.jsonl"):
            try:
                line = parse_json(text)
            except ValueError:
                continue
            found += [line] if isinstance(line, dict) else []
    except (OSError, ValueError):
        pass
    return found


def newest_picture(run: Path) -> Path | None:
    """The picture that a run drew last; None if it drew none."""
    return max((run / "samples").glob("step_*.png"), default=None)


def _front_matter(tags: Collection[str]) -> str:
    lines = ["---", "# license: to be chosen by the author, such as mit or cc-by-4.0", "library_name: tandem", "tags:"]
    return "\n".join([*lines, *(f"- {tag}" for tag in tags), "- safetensors", "---"])


def _use(name: str, model: str, kind: Kind, version: str) -> str:
    return f"""## Use

The model is a folder of `model.safetensors` and `config.json`, written by the Python package `tandem-training`
{version}. Its commands, with huggingface_hub installed, download the model by its name; in a checkout of its
sources, `tandem-convert` is `python convert.py`, and the others likewise:

    {kind.use.format(name)}
    {installed_command("convert.py")} import {name} runs/more   # prints the command that trains on from these weights

In Python:

```python
from huggingface_hub import snapshot_download
from tandem.models import {model}

model = {model}.from_pretrained(snapshot_download("{name}"))
```"""


def _training(kind: Kind, settings: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    import yaml

    flag, data = kind.data
    demonstration = settings.get(flag)
    text = (
        f"It was trained on the demonstration `{demonstration}`, which the script draws itself."
        if demonstration
        else f"It was trained on {data} (`--{flag}`). Which they are, and what is known about their rights and biases, "
        "is for the author to add here."
    )
    if all(type(last.get(name)) in (int, float) for name in ("step", "samples", "epoch")):
        text += f" The run saw {last['samples']:,} samples in {last['step']:,} updates ({last['epoch']:.3g} epochs)."
    where = "" if demonstration else f" --{flag} DIR"
    block = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=1000).rstrip()
    return f"""## Training

{text} With the configuration below in `config.yaml`, this command trains such a model:

    {installed_command(kind.script)} --config config.yaml{where} --output_dir runs/new

<details><summary>Configuration</summary>

```yaml
{block}
```

</details>"""


def _shown_metrics(metrics: list[dict[str, Any]]) -> list[str]:
    """Names of the metrics of the validation; those of the training where there was none."""
    names = dict.fromkeys(
        name for line in metrics for name, value in line.items() if type(value) in (int, float)
        and name not in {*_NOT_SHOWN, *COSTS} and not name.startswith("lr") and re.fullmatch(r"[\w/.@-]+", name)
    )  # fmt: skip
    of_validation = [name for name in names if name.startswith(("valid/", "valid_whole/"))]
    return of_validation or list(names)


def _metrics(metrics: list[dict[str, Any]]) -> str:
    rows = ["| metric | last | best | update of the best |", "|---|---|---|---|"]
    for name in _shown_metrics(metrics):
        values = [(line[name], line.get("step")) for line in metrics if type(line.get(name)) in (int, float)]
        last = values[-1][0]
        best, step = _best(name, values)
        of_best = "| | |" if best is None else f"| {best:.5g} | {step} |"
        rows.append(f"| {name} | {last:.5g} {of_best}")
    return "## Metrics\n\n" + "\n".join(rows)


def _best(name: str, values: list[tuple[float, Any]]) -> tuple[float | None, Any]:
    """The best value of a metric and its update; None for a metric of which neither more nor less is better."""
    finite = [(value, step) for value, step in values if math.isfinite(value)]
    if not finite or not (end := better(name)):
        return None, None
    return (max if end == "high" else min)(finite, key=lambda pair: pair[0])


def _environment(start: Mapping[str, Any]) -> str:
    return "## Environment\n\n" + "\n".join(f"- {name}: {value}" for name, value in _facts(start))


def _facts(start: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is told about the last start of the run: no host, no path and no command."""
    if (count := start.get("world_size")) and (device := str(start.get("device", "")).split(":")[0]):
        yield "processes", f"{count} x {device}, {start.get('backend')}, {start.get('precision')}"
    yield "Python", str(start.get("python"))
    packages = start.get("packages")
    for package, version in packages.items() if isinstance(packages, dict) else ():
        yield str(package), str(version)
    if isinstance(commit := start.get("git_commit"), str):
        yield "commit of the scripts", commit
