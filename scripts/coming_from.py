"""Write docs/coming_from.md: the arguments of the public scripts and trainers beside the flags here.

python scripts/coming_from.py
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from training.flags.parser import ArgumentParser  # noqa: E402
from training.flags.public_names import PUBLIC  # noqa: E402

PAGE = ROOT / "docs" / "coming_from.md"
_INTRODUCTION = """\
# Coming from a public script or trainer

<!-- Written by `python scripts/coming_from.py`; a test compares it. -->

What each script trains is in one plain file: [reference/](../reference/). Its names are those of the flags.

Names on the left are taken as second names of the flags beside them, on the command line and in YAML files (of the
decoder, those of a key are without its section). A name without a flag is refused in one line that says what is in the
last column. An empty cell is no default. `configs/NAME/base.yaml` has the defaults, or where there are none the
example, of the public trainer. [arriving.md](arriving.md) shows six people arriving.

## Batch sizes

`--batch_size` is the number of samples of an update, over all processes and micro-batches; `--grad_accum_steps` cuts
it into so many micro-batches and does not change what is trained on. In the public trainers, which run on accelerate,
`batch_size` is that of one micro-batch of one process:

    --batch_size here = batch_size there x grad_accum_every x processes

So `batch_size 4, grad_accum_every 8` on 2 processes is `--batch_size 64 --grad_accum_steps 8`. A run that is given
`--grad_accum_every` says at its start what it trains on and this product. The learning rates then mean the same.
DALLE-pytorch counts as here with DeepSpeed, and one process with Horovod. `convert.py config` is told the number of
processes, and writes the product.

## What is not here, and why

- The perceptual loss of the VQGAN is that of VGG16's last convolution, not of its fully connected layers
  (`classifier[:-2]`), which know nothing of places; `lpips` compares five layers.
- VQGAN has no 1 or 4 channels in the script: grey images are trained on as RGB; `train_vae.py --transparent` has alpha.
- Texts that are tokens already, and ready spectrograms: both cost less to compute than to read, and a model that is
  loaded elsewhere then knows how. `--dataset` gives waveforms and texts.
- `encdec_layer_mults`, `first_conv_kernel_size`, `encdec_resnet_groups` and several codebooks of LFQ: no published
  model is known to use them; a file that has them is refused by name.
- `vq` always starts from k-means and revives codes that nobody uses; there is no rotation trick.
- Averages begin with the first update and follow each: no `update_after_step`, no `update_every`.
- A script that is started without data runs its demonstration, and says so in its first line.

## Weights & Biases

train_vae.py of DALLE-pytorch always logs to the project dalle_train_vae: `--report_to wandb --wandb_project
dalle_train_vae`. It logs histograms of the codes and the model as an artifact, and so do the scripts here; the
artifacts have the aliases final and best. The README of magvit2-pytorch calls its project magvit2. The decoder's
project, entity and name are read from its configuration.
"""


def text() -> str:
    """What the page has to be."""
    return page({script: importlib.import_module(script).build_parser() for script in PUBLIC})


def page(parsers: Mapping[str, ArgumentParser]) -> str:
    """docs/coming_from.md; `parsers` by the name of the script."""
    lines = [_INTRODUCTION]
    for script, public in PUBLIC.items():
        parser = parsers[script]
        lines += [f"## {public.trainer} of {public.package}: {script}.py", ""]
        lines += ["| there | default there | here | default here | what differs |", "|---|---|---|---|---|"]
        for argument in public.arguments:
            here, default = ("", "") if argument.flag is None else (f"`--{argument.flag}`", parser.shown(argument.flag))
            there = "" if argument.default is None or argument.default == "" else _text(argument.default)
            cells = (f"`{argument.name}`", there, here, default, argument.note)
            lines.append(f"| {' | '.join(cells)} |".replace("  ", " "))
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _text(default: Any) -> str:
    return str(default).replace("{}", "")


if __name__ == "__main__":
    PAGE.write_text(text())
