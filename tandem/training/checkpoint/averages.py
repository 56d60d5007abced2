"""The averages of a run's weights at all its saves, from which an average of another length is made afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.io.reading import DAMAGES, parse_json, words_of
from tandem.io.writing import delete, replacing, sync
from tandem.training.power_function import Profile, coefficients, exponent_of

from .format import Tree

_NAME = re.compile(r"step_([0-9]{8,})_(\w[\w.-]*)_([0-9][0-9.e-]*)\.safetensors")
_UNFINISHED = ".tmp"
_DAMAGES: tuple[type[Exception], ...] = (*DAMAGES, SafetensorError)
_HEADER = "average"


class AverageFiles:
    """Files `step_00000100_ema_0.05.safetensors`: update, part of the checkpoint, and length of the average. They hold
    its weights in fp32, and in their header the number of updates that it averages, of a cascade those of each Unet.
    None is ever replaced by a newer one.

    Args:
        folder: Holds them; the first one creates it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], states: Mapping[str, Tree]) -> None:
        """Write the files of one save, each atomically.

        Args:
            tensors: All tensors of the checkpoint by part and name, on the CPU, of which the averages are taken.
            states: JSON values of the parts; those whose averages are wanted are states of `training.ema.Average` with
                "powers".
        """
        for part, state in states.items():
            counts = state.get("updates")
            of_parts = counts if isinstance(counts, dict) else {"": counts}
            for length in state.get("powers", ()) if any(of_parts.values()) else ():  # 0 if all were skipped so far
                prefix = f"powers/{length}/weights/"
                weights = {name.removeprefix(prefix): w for name, w in tensors[part].items() if name.startswith(prefix)}
                self.folder.mkdir(exist_ok=True)
                with replacing(self.folder / f"step_{step:08d}_{part}_{length}.safetensors") as unfinished:
                    # One entry, because the library writes several in any order, and the same run should give the same
                    # bytes.
                    profile = json.dumps({"updates": counts, "length": float(length)})
                    save_file(weights, unfinished, metadata={_HEADER: profile})
        if self.folder.exists():
            sync(self.folder)

    def cut_back(self, step: int) -> list[str]:
        """Delete the files of later updates than `step`, which a run that goes on from there makes again, and those
        that a killed run left unfinished. Returns a line for each that could not be deleted."""
        left = []
        for path in self.folder.glob("*"):
            found = _NAME.fullmatch(path.name)
            is_unwanted = path.name.endswith(_UNFINISHED) or (found and int(found[1]) > step)
            if is_unwanted and (reason := delete(path)):
                left.append(f"cannot delete {path}: {reason}")
        return left

    def newest(self, part: str) -> dict[str, Tensor]:
        """The weights of an average at the last save.

        Raises:
            ValueError: one line, if there is none or it is damaged.
        """
        return _read(self._stored(part)[-1].path)

    def of_length(self, part: str, length: float, like: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int, float]:
        """The average of another length, up to the update of the last save.

        Args:
            part: Name of the averages in the checkpoint.
            length: Relative length, as for `tandem.training.power_function.exponent_of`.
            like: The tensors to average, by name; only their shapes matter.

        Returns:
            fp32 tensors by name, those of a Unet that was not trained as they are; the number of updates; and how far
            the profile is from the one that was asked for, see `power_function.coefficients`. A profile that is
            stored returns the stored weights, with the same bits.

        Raises:
            ValueError: one line, if the length is none, or a file is missing, damaged or of another model.
        """
        stored, exponent = self._stored(part), exponent_of(length)
        last, distance = stored[-1], 0.0
        of_last = [0.0] * (len(stored) - 1) + [1.0]
        of_parts: dict[str, list[float]] = {}  # the share of each file, by the beginning of the names
        for beginning, updates in last.updates.items():
            used = [number for number, each in enumerate(stored) if each.updates[beginning]]
            of_parts[beginning] = [0.0] * len(stored) if used else of_last
            if used:
                profiles = [Profile(stored[number].updates[beginning], stored[number].exponent) for number in used]
                found, missed = coefficients(profiles, Profile(updates, exponent))
                distance = max(distance, missed)
                for number, share in zip(used, found.tolist(), strict=True):
                    of_parts[beginning][number] = share
        shares = {name: next((of_parts[of] for of in of_parts if name.startswith(of)), of_last) for name in like}
        sums: dict[str, Tensor] = {}
        for number, each in enumerate(stored):
            if not any(of_file[number] for of_file in shares.values()):
                continue
            weights = _read(each.path)
            for name, tensor in like.items():
                if name not in weights or weights[name].shape != tensor.shape:
                    raise ValueError(f"{each.path} holds an average of another model: see its {name}")
                if share := shares[name][number]:
                    term = weights[name].double() * share
                    sums[name] = sums[name] + term if name in sums else term
        return {name: total.float() for name, total in sums.items()}, max(last.updates.values()), distance

    def _stored(self, part: str) -> list[_Stored]:
        """The averages of a part, oldest first."""
        stored = [
            _open(path)
            for path in self.folder.glob("*.safetensors")
            if (found := _NAME.fullmatch(path.name)) and found[2] == part and path.is_file()
        ]
        if not stored:
            raise ValueError(f"{self.folder} holds no averages: only a run with --ema_power writes them, at each save")
        parts = {beginning for each in stored for beginning in each.updates} - {""}
        if parts:  # in a file of an earlier version one count is that of all Unets
            stored = [
                each._replace(updates=dict.fromkeys(parts, each.updates[""])) if "" in each.updates else each
                for each in stored
            ]
        if any(each.updates.keys() != stored[0].updates.keys() for each in stored):
            raise ValueError(f"{self.folder} holds averages of several models: leave those of one there")
        return sorted(stored, key=lambda of: (max(of.updates.values()), of.path.name))


class _Stored(NamedTuple):
    """A file, the exponent of its profile, and the updates that it averages, by the beginning of the weights' names."""

    path: Path
    exponent: float
    updates: dict[str, int]


def _open(path: Path) -> _Stored:
    with _errors_of(path), safe_open(path, framework="pt") as file:
        header = parse_json(file.metadata()[_HEADER].encode())
        counts, exponent = header["updates"], exponent_of(float(header["length"]))
        updates = {name: int(count) for name, count in (counts if isinstance(counts, dict) else {"": counts}).items()}
        if not 1 <= max(updates.values()) < 1 << 53 or min(updates.values()) < 0:
            raise ValueError(f"it averages {counts} updates")
        return _Stored(path, exponent, updates)


def _read(path: Path) -> dict[str, Tensor]:
    with _errors_of(path):
        return load_file(path)


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Turn every error of reading a file into a ValueError of one line."""
    try:
        yield
    except _DAMAGES as error:
        raise ValueError(f"cannot read {path}: {words_of(error)}") from None
