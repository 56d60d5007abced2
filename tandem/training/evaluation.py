"""What a script passes to the loop: how its models are evaluated, and what else happens every n updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from .ema import WeightAverages

if TYPE_CHECKING:
    from tandem.data.feed import ValidationBatches
    from tandem.training.run_folder.best import BestModel
    from tandem.training.visuals.images import Sample


@dataclass(frozen=True)
class Action:
    """Something that happens after every n-th update and after the last one, on every process.

    Args:
        name: Its name in a dry run.
        every: The number n of updates; 0: only at the end.
        do: The function that does it; returns values by name if it measures, else None.
        measures: Whether it is an evaluation, whose values are written as a line of metrics of their own. As it may
            take long, the checkpoint of the same update comes first; a run that ends in between does this action at its
            next start.
        is_requested: Returns whether it happens after this update in any case.
    """

    name: str
    every: int
    do: Callable[[], Mapping[str, Any] | None]
    measures: bool = False
    is_requested: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Evaluation:
    """How the model of a run is validated, how a picture of its results is made, and how it is written to files.

    `validate` and `draw` run without gradients.

    Args:
        validate: (model, batches, step) -> values by name, numbers for the log and pictures for the trackers. Called on
            every process, for the trained weights ("valid/psnr") and for their averages ("valid/ema/psnr"). `step` is
            the number of the newest update, from 0, as the loop yields it.
        draw: ({"online": model, **averages}, samples of `TrainingData.preview`, step) -> the picture for samples/,
            alone or with further files (`Sample`). The averages, if there are any, have the keys of
            `average.averages()`: "ema", or "ema_0.05" for each length. Called on the root alone, so it must not contain
            collectives; see `is_collective_draw`.
        write: Path in the run folder -> function of (model, path) that writes the model there at the end of the run.
            The first one also writes best/. The model is that of `ema.final_weights`.
        discriminator: The engine of the discriminator, which is written, as trained, into a folder in the first path of
            `write`; None: there is none.
        best: Saves the model of the best validation; None: it is not saved.
        picture_name: The picture's name in the trackers.
        next_command: A command that uses the model, for the last line of the run: the script and its flags besides
            --model, which names the first path of `write`; empty: none.
        watch: (completed updates, line of metrics) -> warnings to print, each in one line. Called on every process for
            every line, which holds the same reduced values everywhere, those of `validate` among them.
        is_collective_draw: Call `draw` on every process, so that it may contain collectives. Only the root's picture is
            written.
    """

    engine: Any
    average: WeightAverages
    validate: Callable[[Any, ValidationBatches, int], Mapping[str, Any]]
    draw: Callable[[Mapping[str, Any], Any, int], Image.Image | Sample]
    write: Mapping[str, Callable[[Any, Path], Any]] = field(default_factory=dict)
    discriminator: Any = None
    best: BestModel | None = None
    picture_name: str = "reconstructions"
    next_command: Sequence[str] = ()
    watch: Callable[[int, Mapping[str, Any]], Sequence[str]] = lambda step, line: ()
    is_collective_draw: bool = False

    def __post_init__(self) -> None:
        assert self.write or not self.best, "best/ is written by the first function of `write`"


def final_model(models: Mapping[str, Any]) -> Any:
    """The model of the run among the models of `Evaluation.draw`: the first average if there is one."""
    return next((model for name, model in models.items() if name != "online"), models["online"])
