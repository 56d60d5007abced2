"""Arrow and parquet files as the library datasets writes them: columns of media are structs of bytes and path, and the
schema's metadata says what they are (https://huggingface.co/docs/datasets/about_arrow)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def table(columns: Mapping[str, Sequence[Any]], features: Mapping[str, Any] | None = None) -> pa.Table:
    """A table; a column of {"bytes": ..., "path": ...} becomes a struct of binary and string."""
    media = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrays = {
        name: pa.array(values, media if any(isinstance(value, dict) for value in values) else None)
        for name, values in columns.items()
    }
    made = pa.table(arrays)
    if features is None:
        return made
    return made.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write_arrow(path: Path, made: pa.Table, per_batch: int = 3, **options: Any) -> Path:
    """A file of the streaming format, in record batches of a few rows."""
    with pa.ipc.new_stream(path, made.schema, **options) as writer:
        writer.write_table(made, max_chunksize=per_batch)
    return path


def save_to_disk(folder: Path, made: pa.Table, shards: int = 2) -> Path:
    """A folder as save_to_disk leaves it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    each = -(-made.num_rows // shards)
    for number, name in enumerate(names):
        write_arrow(folder / name, made.slice(number * each, each))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_parquet(folder: Path, made: pa.Table, shards: int = 2, rows: int = 3) -> Path:
    """A folder of parquet files as the hub has them, with row groups of a few rows."""
    folder.mkdir(parents=True)
    each = -(-made.num_rows // shards)
    for number in range(shards):
        part = made.slice(number * each, each)
        pq.write_table(part, folder / f"train-{number:05d}-of-{shards:05d}.parquet", row_group_size=rows)
    return folder
