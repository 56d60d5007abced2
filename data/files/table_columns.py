"""The columns of Arrow and parquet files: which one holds the files of samples, and which the texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tandem.files.reading import DAMAGES, check_regular

_MEDIA = ("Image", "Audio", "Video")


class Media(NamedTuple):
    """A kind of files in a column. `noun`: what messages call one; `feature`: its type in the metadata of datasets;
    `names`: columns that are taken for it where the metadata does not say."""

    noun: str
    feature: str
    names: tuple[str, ...]


IMAGES = Media("image", "Image", ("image", "img", "jpg", "jpeg", "png", "webp"))
SOUNDS = Media("sound", "Audio", ("audio", "sound", "wav", "flac", "mp3", "ogg", "opus"))


def damages() -> tuple[type[BaseException], ...]:
    import pyarrow as pa

    return (pa.ArrowException, *DAMAGES)


def one_line(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split()) or type(error).__name__


def unreadable(path: str, error: BaseException) -> ValueError:
    return ValueError(f"cannot read {path!r}: {one_line(error)}")


def schema_of(path: str) -> Any:
    """The columns of a file. Raises ValueError, in one line."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        check_regular(Path(path))
        if path.lower().endswith(".parquet"):
            return pq.read_schema(path)
        with pa.memory_map(path) as mapped:
            if mapped.size() >= 6 and mapped.read_at(6, 0) == b"ARROW1":
                raise ValueError("it is an Arrow file of the random access format: write it as a stream, or as parquet")
            return pa.ipc.open_stream(mapped).schema
    except damages() as error:
        raise unreadable(path, error) from None


def features_of(schema: Any) -> dict[str, Any]:
    """What datasets says of the columns."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except DAMAGES:
        return {}
    return features if isinstance(features, dict) else {}


def column_of(schema: Any, features: Mapping[str, Any], media: Media, path: str) -> str:
    """The column that holds the files."""
    said = {name: feature.get("_type") for name, feature in features.items() if isinstance(feature, Mapping)}
    fitting = {name: _form(schema.field(name).type) for name in schema.names if said.get(name) not in _MEDIA}
    structs = [name for name, form in fitting.items() if form == "struct"]
    named = [name for name, form in fitting.items() if form and name.lower() in media.names]
    stated = [name for name in schema.names if said.get(name) == media.feature and _form(schema.field(name).type)]
    for found in (stated, named, structs):
        found = [name for name in found if name in media.names[:1]] or found
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{path!r} has several columns of {media.noun}s, {', '.join(found)}: call the one to train on "
                f"{media.names[0]}"
            )
    raise ValueError(
        f"{path!r} has no column of {media.noun}s, a struct of bytes and path or a binary one called "
        f"{media.names[0]}; it has {', '.join(schema.names[:20]) or 'none'}"
    )


def _form(kind: Any) -> str:
    """ "struct" of bytes and path, "binary", or "" for a column that holds no files."""
    import pyarrow.types as types

    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return "struct" if _is_binary(kind.field("bytes").type) else ""
    return "binary" if _is_binary(kind) else ""


def _is_binary(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def is_text(kind: Any) -> bool:
    """Whether cells are texts, lists of texts, or numbers of classes."""
    import pyarrow.types as types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind))


def label_names(feature: Any) -> list[str]:
    names = feature.get("names") if isinstance(feature, Mapping) else None
    return [str(name) for name in names] if isinstance(names, list) else []
