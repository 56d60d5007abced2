"""Models on the Hugging Face Hub: their names, the download into the local cache, and the upload.

A model on the Hub is a model folder, a folder of diffusers, alone or as vae/ of a pipeline, or one file of weights of
another package. Of a folder, only safetensors and JSON files are downloaded, into the cache of the library
huggingface_hub (HF_HOME). All are untrusted, and no code in them is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tandem.io.fetching import TIMEOUT_SECONDS, hub_library
from tandem.io.reading import error_text, one_line
from tandem.io.weights import WEIGHT_ENDINGS
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
_FOLDERS = ("", "vae/", "vqvae/")  # of the configuration: in the repository of a model, and in that of a pipeline
# Names with these endings are paths of files, and are not looked for on the Hub.
_FILE_ENDINGS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".json", ".yaml")

_folders: dict[str, Path] = {}  # name of a model that this process downloaded -> its folder or file


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
    """The path itself; for the name of a model on the Hub its folder or file in the cache, which the first call
    downloads.

    Raises:
        ValueError: one line, if `is_on_hub` and the Hub has no such model or does not answer.
    """
    name = str(path)
    if name not in _folders and is_on_hub(name):
        _folders[name] = download(name)
    return _folders.get(name, path)


def set_folder(name: str, folder: Path) -> None:
    """Let `local_path` return this folder or file for a name, written as USER/NAME or as ./USER/NAME."""
    _folders[str(Path(name))] = folder


def download(name: str, filename: str | None = None, *, revision: str | None = None, **options: Any) -> Path:
    """Download a model on the Hub, except for files of its commit that are in the cache. If the Hub does not answer,
    the cache's copy of the revision is used, and a line says so.

    Args:
        name: USER/NAME or USER/NAME@REVISION.
        filename: A file of weights in the repository; None: the model's folder, or without one the only such file.
        revision: A branch, a tag or a commit.
        options: token, cache_dir, force_download and local_files_only of ``huggingface_hub.hf_hub_download``.

    Returns:
        In the cache, the folder of the commit or a file in it; see `snapshot_of`.

    Raises:
        ValueError: one line, if there is no such model, no answer, or huggingface_hub is not installed.
    """
    repository, named_revision = parse_name(name) or (name, None)
    revision = revision or named_revision
    library = hub_library(f"{name} does not exist here, and looking for it on the Hugging Face Hub")
    options["revision"] = revision
    api = library.HfApi(token=options.get("token"))
    failure: Exception | None = None  # of the connection to the Hub
    try:
        if not (options.get("local_files_only") or (revision and _COMMIT.fullmatch(revision))):
            try:
                api.model_info(repository, revision=revision, timeout=TIMEOUT_SECONDS)
            except Exception as error:  # of requests or httpx, depending on the version of huggingface_hub
                if _has_answered(error):
                    raise
                failure, options["local_files_only"] = error, True
        if filename:
            location = Path(library.hf_hub_download(repository, filename, **options))
        else:
            location = _fetch_model(library, api, repository, options)
    except Exception as error:
        endpoint = library.constants.ENDPOINT
        raise ValueError(
            f"{name} does not exist here, and is not available on the Hub ({endpoint}): {_describe(failure or error)}"
        ) from None
    if failure and not library.constants.HF_HUB_OFFLINE:
        say(f"{_describe(failure)}; {repository} is read from the cache, commit {snapshot_of(location).name}")
    return location


def snapshot_of(location: Path) -> Path:
    """The folder of the commit, by which it is named, of what `download` returned."""
    return next(folder for folder in (location, *location.parents) if _COMMIT.fullmatch(folder.name))


def _fetch_model(library: Any, api: Any, repository: str, options: Mapping[str, Any]) -> Path:
    """The folder of a commit with a model and its configuration, or the only file of weights in it. ``options``: of
    ``hf_hub_download``. Raises its errors, and ValueError, in one line, if there is no such model."""
    missing: Exception | None = None
    for prefix in _FOLDERS:
        try:
            config = Path(library.hf_hub_download(repository, prefix + CONFIG_FILE, **options))
        except library.errors.EntryNotFoundError as error:
            if isinstance(error, library.errors.LocalEntryNotFoundError) and not options.get("local_files_only"):
                raise  # no answer
            missing = missing or error
            continue
        folder = config.parents[1 if prefix else 0]
        diffusers_model = diffusers_folder(folder)
        # Before gigabytes of another kind of model are downloaded:
        read_folder_config(diffusers_model) if diffusers_model else read_config(folder)
        patterns = [prefix + name for name in _FILES]
        library.snapshot_download(repository, **{**options, "revision": folder.name}, allow_patterns=patterns)
        if not (holds_weights(folder) or all(path.is_file() for path in weight_files(diffusers_model or folder))):
            raise ValueError("it has no weights, or the Hub did not answer and the cache lacks some of them")
        return folder
    if options.get("local_files_only"):
        cache = Path(library.snapshot_download(repository, **options))
        names = [path.relative_to(cache).as_posix() for path in cache.rglob("*")]
    else:
        names = api.list_repo_files(repository, revision=options["revision"])
    files = [name for name in names if name.endswith(WEIGHT_ENDINGS)]
    if len(files) > 1:
        advice = f"give one of them, {', '.join(files)[:200]}, in Python as filename, or its path after `hf download`"
        raise ValueError(f"it has no {CONFIG_FILE} and {len(files)} files of weights: {advice}")
    if not files and missing:
        raise missing
    return Path(library.hf_hub_download(repository, files[0], **options))


def upload(
    folder: Path, repository: str, message: str, *, private: bool | None = None, token: str | bool | None = None,
    branch: str | None = None, create_pr: bool | None = None, allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None, delete_patterns: list[str] | str | None = None,
    protected: Collection[str] = (),
) -> str:  # fmt: skip
    """Upload a model folder in one commit, which also deletes the files of an earlier model of this repository that the
    folder lacks. Returns the address of the commit, or of the pull request.

    Args:
        private: Make the repository private; one that exists and is public is refused. None: as the account has it.
        branch: To commit to; made if it does not exist. None: main.
        create_pr: Make a pull request of the commit.
        allow_patterns, ignore_patterns: Upload files with names that match one of the first and none of the second,
            and delete nothing but by delete_patterns.
        delete_patterns: Delete files with such names, too.
        protected: Patterns of files that stay as they are if the repository has them.

    Raises:
        ValueError: one line, if it failed. Then the Hub's model is as it was, unless the answer to the commit was lost.
    """
    library = hub_library("uploading a model")
    api, select = library.HfApi(token=token), library.utils.filter_repo_objects
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        if private and not api.model_info(repository, timeout=TIMEOUT_SECONDS).private:
            raise ValueError("it exists already and is public, so --private is not possible; nothing was pushed")
        if branch:
            api.create_branch(repository, branch=branch, exist_ok=True)
        paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        present_names = api.list_repo_files(repository, revision=branch)
        others = [name for name in present_names if name not in paths]
        deleted = [delete_patterns] if isinstance(delete_patterns, str) else list(delete_patterns or ())
        is_whole = allow_patterns is None and ignore_patterns is None
        stale_names = {*select(others, allow_patterns=_FILES, ignore_patterns=[*protected])} if is_whole else set()
        stale_names |= {*select(others, allow_patterns=deleted)}
        protected_names = {*select(present_names, allow_patterns=[*protected])}
        new_names = sorted(paths.keys() - protected_names)
        new_names = select(new_names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        # One commit; upload_folder may make several.
        operations = [library.CommitOperationAdd(name, paths[name]) for name in new_names]
        operations += [library.CommitOperationDelete(name) for name in sorted(stale_names)]
        commit = api.create_commit(repository, operations, commit_message=message, revision=branch, create_pr=create_pr)
    except Exception as error:
        endpoint = library.constants.ENDPOINT
        raise ValueError(f"cannot push {repository} to the Hub ({endpoint}): {_describe(error)}") from None
    return str(commit.pr_url or commit.commit_url)


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
    from huggingface_hub.errors import HFValidationError

    error, status = _find_cause(error)
    if type(error) in (ValueError, HFValidationError):  # of this file; or the Hub cannot have such a name
        return one_line(error)
    if status is None:
        return f"no answer ({type(error).__name__}: {one_line(error)})"
    login = "; for a private or gated model, log in with `hf auth login`, or set HF_TOKEN"
    answer = one_line(ValueError(error_text(error)))  # cut off
    return f"the Hub answers HTTP {status}: {answer}{login if status in (401, 403, 404) else ''}"
