"""Files of the averaged weights at some saves (`Run.save`), of which other averages can be computed (post-hoc EMA)."""

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

from tandem.io.reading import READ_ERRORS, error_text, parse_json
from tandem.io.renamed import rename_weights
from tandem.io.writing import delete, replacing, sync
from tandem.training.power_function import Profile, coefficients, exponent_of

from .format import Tree

_NAME = re.compile(r"step_([0-9]{8,})_(\w[\w.-]*)_([0-9][0-9.e-]*)\.safetensors")
_UNFINISHED = ".tmp"
_READ_ERRORS: tuple[type[Exception], ...] = (*READ_ERRORS, SafetensorError)
_HEADER = "average"


class EMAFiles:
    """Files such as `step_00000100_ema_0.05.safetensors`, named by update, part of the checkpoint, and length of the
    average. Each holds fp32 weights and, in its header, the length and the number of averaged updates, for a cascade
    that of each Unet. Newer files do not replace older ones.

    Args:
        folder: Holds the files; the first write creates it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], states: Mapping[str, Tree]) -> None:
        """Write the files of one save, each atomically.

        Args:
            tensors: All tensors of the checkpoint by part and name, on the CPU; only averages are written.
            states: JSON values of the parts; averages are in the states of `training.ema.WeightAverages` with "powers".
        """
        for part, state in states.items():
            counts = state.get("updates")
            if not any(counts.values() if isinstance(counts, dict) else [counts]):
                continue  # no average, or all updates were skipped so far
            for length in state.get("powers", ()):
                prefix = f"powers/{length}/weights/"
                weights = {name.removeprefix(prefix): w for name, w in tensors[part].items() if name.startswith(prefix)}
                self.folder.mkdir(exist_ok=True)
                with replacing(self.folder / f"step_{step:08d}_{part}_{length}.safetensors") as unfinished:
                    # One entry, because the library writes several in any order, and the same run should write the same
                    # bytes.
                    profile = json.dumps({"updates": counts, "length": float(length)})
                    save_file(weights, unfinished, metadata={_HEADER: profile})
        if self.folder.exists():
            sync(self.folder)

    def cut_back(self, step: int) -> list[str]:
        """Delete the files of updates after `step`, from which the run resumes, and unfinished files of a killed run.
        Returns a line for each file that could not be deleted."""
        errors = []
        for path in self.folder.glob("*"):
            match = _NAME.fullmatch(path.name)
            is_obsolete = path.name.endswith(_UNFINISHED) or (match and int(match[1]) > step)
            if is_obsolete and (reason := delete(path)):
                errors.append(f"cannot delete {path}: {reason}")
        return errors

    def newest(self, part: str) -> dict[str, Tensor]:
        """The weights of the newest file of a part.

        Raises:
            ValueError: one line, if there is none or it is damaged.
        """
        return _read(self._list_files(part)[-1].path)

    def reconstruct(self, part: str, length: float, like: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int, float]:
        """The average of another length, up to the update of the last save.

        Args:
            part: Name of the averages in the checkpoint.
            length: Relative length, as for `tandem.training.power_function.exponent_of`.
            like: The tensors to average, by name; only their shapes matter.

        Returns:
            fp32 tensors by name (a Unet that was not trained is unchanged); the number of updates; and the distance of
            the profile from the requested one, see `power_function.coefficients`. If that profile is stored, the
            weights are the stored ones, bit for bit.

        Raises:
            ValueError: one line, if no average has that length, or a file is missing, damaged or of another model.
        """
        files, exponent = self._list_files(part), exponent_of(length)
        last, distance = files[-1], 0.0
        newest_only = [0.0] * (len(files) - 1) + [1.0]
        by_prefix: dict[str, list[float]] = {}  # the coefficients of all files, by prefix of the weights' names
        for prefix, updates in last.updates.items():
            indices = [index for index, file in enumerate(files) if file.updates[prefix]]
            by_prefix[prefix] = [0.0] * len(files) if indices else newest_only
            if indices:
                profiles = [Profile(files[index].updates[prefix], files[index].exponent) for index in indices]
                values, error = coefficients(profiles, Profile(updates, exponent))
                distance = max(distance, error)
                for index, value in zip(indices, values.tolist(), strict=True):
                    by_prefix[prefix][index] = value
        by_name = {
            name: next((c for prefix, c in by_prefix.items() if name.startswith(prefix)), newest_only) for name in like
        }
        sums: dict[str, Tensor] = {}
        for index, file in enumerate(files):
            if not any(file_coefficients[index] for file_coefficients in by_name.values()):
                continue
            weights = _read(file.path)
            for name, tensor in like.items():
                if name not in weights or weights[name].shape != tensor.shape:
                    raise ValueError(f"{file.path} holds an average of another model: see its {name}")
                if coefficient := by_name[name][index]:
                    term = weights[name].double() * coefficient
                    if not term.isfinite().all():
                        raise ValueError(f"{file.path} is damaged: {name} is not finite")
                    sums[name] = sums[name] + term if name in sums else term
        return {name: total.float() for name, total in sums.items()}, max(last.updates.values()), distance

    def _list_files(self, part: str) -> list[_AverageFile]:
        """The averages of a part, oldest first."""
        files = [
            _open_average(path)
            for path in self.folder.glob("*.safetensors")
            if (match := _NAME.fullmatch(path.name)) and match[2] == part and path.is_file()
        ]
        if not files:
            raise ValueError(
                f"{self.folder} holds no averages: only a run with --ema_power writes them, every --save_every_n_steps"
            )
        prefixes = {prefix for file in files for prefix in file.updates} - {""}
        if prefixes:  # a file of an earlier version has one count for all Unets
            files = [
                file._replace(updates=dict.fromkeys(prefixes, file.updates[""])) if "" in file.updates else file
                for file in files
            ]
        if any(file.updates.keys() != files[0].updates.keys() for file in files):
            raise ValueError(f"{self.folder} holds averages of several models: leave those of one there")
        return sorted(files, key=lambda file: (max(file.updates.values()), file.path.name))


class _AverageFile(NamedTuple):
    """A file, the exponent of its profile, and the number of updates that it averages, by prefix of weights' names."""

    path: Path
    exponent: float
    updates: dict[str, int]


def _open_average(path: Path) -> _AverageFile:
    with _one_line_errors(path), safe_open(path, framework="pt") as file:
        header = parse_json(file.metadata()[_HEADER].encode())
        counts, exponent = header["updates"], exponent_of(float(header["length"]))
        updates = {name: int(count) for name, count in (counts if isinstance(counts, dict) else {"": counts}).items()}
        if not 1 <= max(updates.values()) < 1 << 53 or min(updates.values()) < 0:
            raise ValueError(f"it averages {counts} updates")
        return _AverageFile(path, exponent, updates)


def _read(path: Path) -> dict[str, Tensor]:
    with _one_line_errors(path):
        return rename_weights(load_file(path))


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """Turn every error of reading a file into a ValueError of one line."""
    try:
        yield
    except _READ_ERRORS as error:
        raise ValueError(f"cannot read {path}: {error_text(error)}") from None
