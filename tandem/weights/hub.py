"""Models on the Hugging Face Hub: their names, the download into the local cache, and the upload.

A model on the Hub is a model folder, or a folder of diffusers. Only safetensors and JSON files are downloaded, into the
cache of the library huggingface_hub (HF_HOME). They are untrusted, and no code in them is run.
"""

from __future__ import annotations

import os
import re
from fnmatch import fnmatch
from pathlib import Path

from tandem.io.fetching import TIMEOUT_SECONDS, hub_library
from tandem.io.reading import error_text, one_line
from tandem.io.writing import say
from tandem.models.base import CONFIG_FILE, holds_weights, read_config
from tandem.weights.formats.diffusers import diffusers_folder, read_folder_config, weight_files

LONGEST_NAME = 96  # of a model on the Hub, with its user
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\w[\w./-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Files of a model folder, besides a card and a picture, and of a folder of diffusers.
_FILES = (
    CONFIG_FILE, "tokenizer.json", "model*.safetensors", "model.safetensors.index.json", "discriminator/config.json",
    "discriminator/model.safetensors", "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model-*-of-*.safetensors",
)  # fmt: skip
# Names with these endings are paths of files, and are not looked for on the Hub.
_FILE_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".json", ".yaml")

_folders: dict[str, Path] = {}  # name of a model that this process downloaded -> its folder


def parse_name(name: str) -> tuple[str, str | None] | None:
    """("USER/NAME", revision or None) from USER/NAME or USER/NAME@REVISION; None for any other text."""
    match = _NAME.fullmatch(name)
    if match is None or len(match[1]) > LONGEST_NAME or match[1].endswith(_FILE_ENDINGS) or ".." in name:
        return None
    return match[1], match[2]


def is_on_hub(name: str) -> bool:
    """Whether a name means a model on the Hub: it has the form USER/NAME, and is no path on this machine. If USER is a
    folder here, the name is taken for a misspelt path in it."""
    return parse_name(name) is not None and not os.path.lexists(name) and not os.path.isdir(name.partition("/")[0])


def local_path(path: Path) -> Path:
    """The path itself; for the name of a model on the Hub its folder in the cache, which the first call downloads.

    Raises:
        ValueError: one line, if `is_on_hub` and the Hub has no such model or does not answer.
    """
    name = str(path)
    if name not in _folders and is_on_hub(name):
        _folders[name] = download(name)
    return _folders.get(name, path)


def set_folder(name: str, folder: Path) -> None:
    """Let `local_path` return this folder for a name, written as USER/NAME or as ./USER/NAME."""
    _folders[str(Path(name))] = folder


def download(name: str) -> Path:
    """Download a model on the Hub, except for files of its commit that are in the cache. Returns its folder in the
    cache, which is named by the commit. If the Hub does not answer, the cache's copy of the revision is used, and a
    line says so.

    Args:
        name: USER/NAME or USER/NAME@REVISION: a branch, a tag or a commit.

    Raises:
        ValueError: one line, if there is no such model, no answer, or huggingface_hub is not installed.
    """
    repository, revision = parse_name(name) or (name, None)
    library = hub_library(f"{name} does not exist here, and looking for it on the Hugging Face Hub")
    failure: Exception | None = None  # of the connection to the Hub
    try:
        if not (revision and _COMMIT.fullmatch(revision)):
            try:
                library.HfApi().model_info(repository, revision=revision, timeout=TIMEOUT_SECONDS)
            except Exception as error:  # of requests or httpx, depending on the version of huggingface_hub
                if _has_answered(error):
                    raise
                failure = error
        options = {"local_files_only": failure is not None}
        folder = Path(library.hf_hub_download(repository, CONFIG_FILE, revision=revision, **options)).parent
        check = read_folder_config if diffusers_folder(folder) else read_config
        check(folder)  # before gigabytes of another kind of model are downloaded
        library.snapshot_download(repository, revision=folder.name, allow_patterns=_FILES, **options)
        if not (holds_weights(folder) or all(path.is_file() for path in weight_files(folder))):
            raise ValueError("it has no weights, or the Hub did not answer and the cache lacks some of them")
    except Exception as error:
        endpoint = library.constants.ENDPOINT
        raise ValueError(
            f"{name} does not exist here, and is not available on the Hub ({endpoint}): {_describe(failure or error)}"
        ) from None
    if failure and not library.constants.HF_HUB_OFFLINE:
        say(f"{_describe(failure)}; {repository} is read from the cache, commit {folder.name}")
    return folder


def upload(folder: Path, repository: str, message: str, *, is_private: bool = False, branch: str | None = None) -> str:
    """Upload a model folder in one commit, which also deletes the files of an earlier model of this repository that the
    folder lacks. Returns the address of the commit.

    Args:
        branch: To commit to; made if it does not exist. None: main.
        is_private: Make the repository private; one that exists and is public is refused.

    Raises:
        ValueError: one line, if it failed. Then the Hub's model is as it was, unless the answer to the commit was lost.
    """
    library = hub_library("convert.py push")
    api = library.HfApi()
    try:
        api.create_repo(repository, private=True if is_private else None, exist_ok=True)
        if is_private and not api.model_info(repository, timeout=TIMEOUT_SECONDS).private:
            raise ValueError("it exists already and is public, so --private is not possible; nothing was pushed")
        if branch:
            api.create_branch(repository, branch=branch, exist_ok=True)
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        stale_names = [name for name in api.list_repo_files(repository, revision=branch) if name not in paths]
        stale_names = [name for name in stale_names if any(fnmatch(name, pattern) for pattern in _FILES)]
        # One commit; upload_folder may make several.
        operations = [library.CommitOperationAdd(name, path) for name, path in sorted(paths.items())]
        operations += [library.CommitOperationDelete(name) for name in stale_names]
        commit = api.create_commit(repository, operations, commit_message=message, revision=branch)
    except Exception as error:
        endpoint = library.constants.ENDPOINT
        raise ValueError(f"cannot push {repository} to the Hub ({endpoint}): {_describe(error)}") from None
    return str(commit.commit_url)


def _find_cause(error: Exception) -> tuple[Exception, int | None]:
    """The original error, and the HTTP status of the Hub's answer, if there was one."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the error says that the cache lacks a file, its cause why the Hub sent none
    return error, getattr(getattr(error, "response", None), "status_code", None)


def _has_answered(error: Exception) -> bool:
    """Whether the Hub works, and its answer is that there is no such model or that this user may not read it. Without a
    status, a ValueError is huggingface_hub's own answer: the Hub cannot have a model of this name."""
    error, status = _find_cause(error)
    return isinstance(error, ValueError) if status is None else status < 500 and status != 429


def _describe(error: Exception) -> str:
    """Why a request to the Hub failed, in one line."""
    error, status = _find_cause(error)
    if type(error) is ValueError:
        return one_line(error)
    if status is None:
        return f"no answer ({type(error).__name__}: {one_line(error)})"
    login = "; for a private or gated model, log in with `hf auth login`, or set HF_TOKEN"
    answer = one_line(ValueError(error_text(error)))  # cut off
    return f"the Hub answers HTTP {status}: {answer}{login if status in (401, 403, 404) else ''}"
