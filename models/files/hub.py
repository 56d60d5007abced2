"""Models on the Hugging Face Hub: which names mean one, how one gets into the local cache, and how one is uploaded.

A model there is a model folder. Only its safetensors and JSON files are downloaded, into the cache of the library
huggingface_hub (HF_HOME), and they are read like those of a stranger's folder: nothing of them is run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.files.installed import how_to_install
from tandem.files.writing import say

from .errors import one_line
from .pretrained import CONFIG_FILE, holds_weights, read_config

SECONDS = 60.0  # to wait for the next answer or bytes of the Hub
LONGEST_NAME = 96  # of a model on the Hub, with its user
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Of what a model folder may hold, in the order of download. The weights come last, so that a folder with weights is
# complete.
_FILES = (
    re.compile(r"config\.json|tokenizer\.json|model\.safetensors\.index\.json|discriminator/config\.json"),
    re.compile(r"discriminator/model\.safetensors"),
    re.compile(r"model[\w.-]*\.safetensors", re.ASCII),
)
# A path that ends so is meant to be a file, and one that is missing is no reason to ask the Hub.
_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".json", ".yaml")

_folders: dict[str, Path] = {}  # of the names that this process has asked for


def split(name: str) -> tuple[str, str | None] | None:
    """USER/NAME and the revision of USER/NAME@REVISION, None without one; None for what is no name on the Hub."""
    found = _NAME.fullmatch(name)
    if found is None or len(found[1]) > LONGEST_NAME or found[1].endswith(_ENDINGS) or ".." in name:
        return None
    return found[1], found[2]


def is_on_hub(name: str) -> bool:
    """Whether a name means a model on the Hub: it has the form of one, and neither it nor its first part is a path
    here, so that nobody asks the Hub for a run whose name is misspelt."""
    return split(name) is not None and not os.path.lexists(name) and not os.path.isdir(name.partition("/")[0])


def local(path: Path) -> Path:
    """The path; for the name of a model on the Hub its folder in the cache, which the first call downloads.

    Raises:
        ValueError: one line, if the name has the form of one, and there is no such model or no answer.
    """
    name = str(path)
    if name not in _folders and is_on_hub(name):
        _folders[name] = download(name)
    return _folders.get(name, path)


def use(name: str, folder: Path) -> None:
    """Let `local` answer with this folder, also for ./USER/NAME, of which a path keeps USER/NAME alone."""
    _folders[str(Path(name))] = folder


def download(name: str, mark: Callable[[], None] = lambda: None) -> Path:
    """The folder in the cache of a model on the Hub, whose last part is its commit. What the cache holds of this commit
    is not downloaded again. If the Hub gives no answer, the cache's copy of the revision is taken, and a line says so.

    Args:
        name: USER/NAME or USER/NAME@REVISION: a branch, a tag or a commit.
        mark: Called before each file.

    Raises:
        ValueError: one line, if there is no such model, no answer, or no package that could ask for it.
    """
    model, revision = split(name) or (name, None)
    library = _library(f"{name} does not exist here, and looking for it on the Hugging Face Hub")
    try:
        return _download(library, model, revision, mark)
    except Exception as error:  # two HTTP libraries are below huggingface_hub, depending on its version
        copy = _cached(library, model, revision) if _is_without_answer(error) else None
        if copy is None:
            where = library.constants.ENDPOINT
            raise ValueError(
                f"{name} does not exist here, and cannot be had from the Hub ({where}): {_reason(error, name)}"
            ) from None
        if not library.constants.HF_HUB_OFFLINE:
            say(f"{_reason(error, name)}: taking {model} from the cache, commit {copy.name}")
        return copy


def upload(folder: Path, model: str, message: str, *, is_private: bool = False, branch: str | None = None) -> str:
    """Upload a model folder in one commit; what an earlier model of this repository left is deleted by it. Returns its
    address.

    Args:
        branch: To commit to; made if it does not exist. None: main.
        is_private: Make the repository private; one that exists and is public is refused.

    Raises:
        ValueError: one line, if it failed. Then the Hub's model is as it was, unless the answer to the commit was lost.
    """
    library = _library("convert.py push")
    api = library.HfApi()
    try:
        api.create_repo(model, private=True if is_private else None, exist_ok=True)
        info = api.model_info(model, timeout=SECONDS)
        if is_private and not info.private:
            raise ValueError("it exists already and is public, so --private is not possible; nothing was pushed")
        if branch:
            api.create_branch(model, branch=branch, exist_ok=True)
            info = api.model_info(model, revision=branch, timeout=SECONDS)
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        left = [name for name in _names(info) if _rank(name) is not None and name not in paths]
        operations = [library.CommitOperationAdd(name, path) for name, path in sorted(paths.items())]
        operations += [library.CommitOperationDelete(name) for name in left]
        commit = api.create_commit(model, operations, commit_message=message, revision=branch)
    except Exception as error:
        where = library.constants.ENDPOINT
        raise ValueError(f"cannot push {model} to the Hub ({where}): {_reason(error, model)}") from None
    return str(commit.commit_url)


def _library(purpose: str) -> Any:
    """The package huggingface_hub, silent in log files and with a limit on every wait; ValueError if it is missing."""
    try:
        import huggingface_hub
        from huggingface_hub.utils import disable_progress_bars, get_session, logging
    except ImportError as error:
        raise ValueError(
            f"{purpose} needs the package huggingface_hub: {how_to_install('hub')} ({one_line(error)})"
        ) from None
    logging.set_verbosity_error()  # each of its retries would print a line
    if not sys.stderr.isatty():
        disable_progress_bars()
    get_session().timeout = SECONDS  # it waits for ever otherwise
    return huggingface_hub


def _download(library: Any, model: str, revision: str | None, mark: Callable[[], None]) -> Path:
    if revision and _COMMIT.fullmatch(revision) and (copy := _cached(library, model, revision)):
        return copy
    names = _names(library.HfApi().model_info(model, revision=revision, timeout=SECONDS))
    if CONFIG_FILE not in names:
        raise ValueError(f"it holds no {CONFIG_FILE}, so it is no model folder of these scripts")
    # Asked for by the revision, this file makes the library remember the revision's commit, for when it is offline.
    folder = Path(library.hf_hub_download(model, CONFIG_FILE, revision=revision)).parent
    read_config(folder)  # before gigabytes of another kind of model are downloaded
    for name in sorted((name for name in names if _rank(name) is not None), key=lambda name: (_rank(name), name)):
        mark()
        library.hf_hub_download(model, name, revision=folder.name)
    return folder


def _cached(library: Any, model: str, revision: str | None) -> Path | None:
    """The folder of a model that is complete in the cache; None if there is none."""
    try:
        path = library.hf_hub_download(model, CONFIG_FILE, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    folder = Path(path).parent
    return folder if holds_weights(folder) else None


def _names(info: Any) -> list[str]:
    return [file.rfilename for file in info.siblings or ()]


def _rank(name: str) -> int | None:
    """The place of a model's file in the order of download; None for any other file."""
    return next((rank for rank, pattern in enumerate(_FILES) if pattern.fullmatch(name)), None)


def _cause(error: Exception) -> tuple[Exception, int | None]:
    """The error for which the library gave up, and the HTTP status that the Hub answered, if it did."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it says that the cache lacks a file, and its cause why the Hub gave none
    return error, getattr(getattr(error, "response", None), "status_code", None)


def _is_without_answer(error: Exception) -> bool:
    """Whether the Hub could not be asked, or is out of order: it has not said that there is no such model."""
    error, status = _cause(error)
    return status == 429 or status >= 500 if status is not None else not isinstance(error, ValueError)


def _reason(error: Exception, name: str) -> str:
    """Why the Hub did not do what was asked, in one line."""
    from huggingface_hub import errors

    error, status = _cause(error)
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {(split(name) or (name, None))[1] or 'main'}"
    if isinstance(error, errors.GatedRepoError):
        return "it is for those who accept its conditions; do so on its page, then log in with `hf auth login`"
    if status in (401, 403, 404):
        return (
            f"it is unknown there, or you may not do this without another login (HTTP {status}); log in with "
            "`hf auth login`, or set HF_TOKEN"
        )
    if status is not None:
        said = getattr(error, "server_message", None)
        return f"the Hub answers HTTP {status}" + (f": {one_line(ValueError(said))}" if said else "")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and the cache does not hold all of it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the cache does not hold all of it"
    if isinstance(error, (ValueError, OSError)):
        return one_line(error)
    return f"no answer ({type(error).__name__}: {one_line(error)})"
