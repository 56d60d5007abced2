"""Draw pictures with a decoder of the demonstration (train_decoder.py without flags) and read what they show.

    python scripts/study_decoder.py runs/decoder-demo/model --output pictures/

Prints tables of how often shape, colour and place are right (guidance, samplers, seen and unseen combinations, wrong
and no conditions), and writes pictures: attributes.png, where each row has one noise and one attribute goes through
its values; cascade.png, where real, small and large pictures stand side by side; guidance.png, accuracy against
guidance (needs `pip install matplotlib`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts stand beside the package, not in it

import torch
from PIL import Image
from torch import Tensor

from data.images.embeddings import IMAGE
from data.images.scenes import Scenes, condition_of, drawing, triples_of
from data.images.shapes import COLOURS, PLACES, SHAPES
from models import Decoder
from models.decoder import Sampling
from training.generation import CHUNK, noise_of
from training.measures.shapes_reader import ShapesReader
from training.pictures.images import grid

SCALES = (1.0, 1.5, 2.0, 3.0, 5.0)
INTERVAL = (0.2, 5.0)  # as in the configuration of the demonstration
SEED = 1  # of scenes that no run of the demonstration has seen, and of the noise
CPU = torch.device("cpu")


class Study:
    """Reads what a decoder draws for scenes of one shape.

    Args:
        count: Pictures for each row of a table.
    """

    def __init__(self, decoder: Decoder, count: int) -> None:
        self.decoder, self.count = decoder, count
        self._readers = [ShapesReader(side, **drawing()) for side in decoder.image_sizes]

    def conditions(self, held_out: bool = False) -> Tensor:
        """Attributes of scenes, (count, 30)."""
        scenes = Scenes(self.count, image_size=self.decoder.image_sizes[-1], seed=SEED, held_out=held_out)
        attributes = scenes.embeddings(IMAGE)
        return torch.stack([attributes.load(index) for index in range(self.count)])

    def draw(self, conditions: Tensor | None, numbers: Sequence[int], stop_at: int = 1, **sampling: Any) -> Tensor:
        """Pictures (b, 3, s, s) in [0, 1]; that of a number has always the same noise."""
        drawn = []
        for begin in range(0, len(numbers), CHUNK):
            part = list(numbers[begin : begin + CHUNK])
            given = {} if conditions is None else {"image_embed": conditions[begin : begin + CHUNK]}
            how = Sampling(**{"steps": [20], "cond_scale": [3.0, 1.0], "interval": INTERVAL, **sampling})
            drawn.append(self.decoder.sample(given, noise_of(SEED, part, CPU), how, batch=len(part), stop_at=stop_at))
        return torch.cat(drawn)

    def accuracy(
        self, wanted: Tensor, conditions: Tensor | None, stop_at: int = 1, **sampling: Any
    ) -> dict[str, float]:
        """Shares of pictures in which shape, colour and place are as in ``wanted`` (count, 30)."""
        pictures = self.draw(conditions, range(self.count), stop_at, **sampling)
        right = self._readers[stop_at - 1].accuracy(pictures, triples_of(wanted))
        return {name: float(value.mean()) for name, value in right.items()}

    def tables(self) -> Iterator[tuple[str, str, Mapping[str, float], float]]:
        """Rows: table, what was drawn, accuracies, seconds."""
        seen, unseen = self.conditions(), self.conditions(held_out=True)
        shuffled = seen.roll(1, 0)
        last = len(self.decoder.image_sizes)
        rows: list[tuple[str, str, dict[str, Any]]] = [
            ("guidance", f"{scale:g}", {"conditions": seen, "cond_scale": [scale, 1.0]}) for scale in SCALES
        ]
        rows += [
            ("conditions", "seen combinations", {"conditions": seen}),
            ("conditions", "unseen combinations", {"conditions": unseen, "wanted": unseen}),
            ("conditions", "those of other pictures", {"conditions": shuffled}),
            ("conditions", "none", {"conditions": None}),
            ("sampler", "dpmpp_2m, 20 steps", {"conditions": seen}),
            ("sampler", "ddim, 250 steps", {"conditions": seen, "sampler": "ddim", "steps": [250]}),
            ("size", f"{self.decoder.image_sizes[-1]} px", {"conditions": seen, "stop_at": last}),
        ]
        for table, name, how in rows:
            begun = time.perf_counter()
            yield table, name, self.accuracy(**{"wanted": seen, **how}), time.perf_counter() - begun

    def attributes(self) -> Image.Image:
        """Rows of pictures with one noise, in which one attribute goes through its values."""
        sweeps = {
            "colour": [f"{colour} circle on the left" for colour in COLOURS],
            "shape": [f"red {shape} in the centre" for shape in SHAPES],
            "place": [f"blue star {place}" for place in PLACES],
        }
        rows = {}
        for number, (name, texts) in enumerate(sweeps.items()):
            conditions = torch.stack([condition_of(text)["image_embed"] for text in texts])
            rows[name] = self.draw(conditions, [number] * len(texts), len(self.decoder.image_sizes))
        return grid({name: _enlarged(row) for name, row in rows.items()})

    def cascade(self, count: int = 8) -> Image.Image:
        """Real pictures, what each Unet draws for their attributes, and captions."""
        scenes = Scenes(count, image_size=self.decoder.image_sizes[-1], seed=SEED)
        columns = [torch.stack([scenes.load(index) for index in range(count)]).float() / 255]
        for number in range(1, len(self.decoder.image_sizes) + 1):
            columns.append(self.draw(self.conditions()[:count], range(count), number))
        columns = [_enlarged(column) for column in columns]
        return grid({
            scenes.caption(index): torch.stack([column[index] for column in columns]) for index in range(count)
        })  # fmt: skip


def _enlarged(pictures: Tensor, side: int = 96) -> Tensor:
    return torch.nn.functional.interpolate(pictures, size=(side, side), mode="nearest")


def plot(rows: Mapping[float, Mapping[str, float]], path: Path) -> None:
    """A picture of accuracies against guidance."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for name in next(iter(rows.values())):
        axes.plot(list(rows), [row[name] for row in rows.values()], marker="o", label=name)
    axes.set(xlabel="guidance", ylabel="share of pictures that are right", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="model/ folder of a run")
    parser.add_argument("--output", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--count", type=int, default=256, help="pictures for each row of a table (default: 256)")
    args = parser.parse_args()
    study = Study(Decoder.from_pretrained(args.model).eval(), args.count)
    args.output.mkdir(parents=True, exist_ok=True)
    study.attributes().save(args.output / "attributes.png")
    study.cascade().save(args.output / "cascade.png")
    by_scale = {}
    print("| | | shape | colour | place | seconds |\n|---|---|---|---|---|---|")
    for table, name, right, seconds in study.tables():
        if table == "guidance":
            by_scale[float(name)] = right
        shares = " | ".join(f"{value:.3f}" for value in right.values())
        print(f"| {table} | {name} | {shares} | {seconds:.0f} |", flush=True)
    try:
        plot(by_scale, args.output / "guidance.png")
    except ImportError:
        print("no guidance.png: pip install matplotlib")


if __name__ == "__main__":
    main()
