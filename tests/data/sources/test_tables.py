"""Arrow and parquet files and manifests as sources of records; damaged and forged ones."""

from __future__ import annotations

import csv
import io
import json
import math
import pickle
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.data.sources import index
from tandem.data.sources import table as tables
from tandem.data.sources.manifest import ManifestSource
from tandem.data.sources.record import FieldSpec, Files
from tandem.data.sources.rows import time_ranges
from tandem.data.sources.table import TableSource, saved_files, tables_below
from tests.data.helpers import one_line
from tests.data.sources.tables import save_to_disk, table, write_arrow, write_parquet

N = 14
IMAGE = FieldSpec("image", "image", (".jpg", ".png"), ("image", "img", "jpg"), "Image")
SOUND = FieldSpec("sound", "sound", (".wav",), ("audio", "sound", "wav"), "Audio")
TEXTS = FieldSpec("texts", "caption", (".txt",), ("caption", "captions", "caption_1", "text", "label"), as_cells=True)
EMBED = FieldSpec("image_embed", "image embedding", (".npy",), ("image_embed",))
ENCODINGS = FieldSpec("text_encodings", "text encoding", (".text.npy",), ("text_encodings",))


def content(number: int) -> bytes:
    return bytes([number]) * (100 + number)


def images(**columns: Any) -> pa.Table:
    return table(
        {"image": [{"bytes": content(i), "path": f"{i}.img"} for i in range(N)],
         "text": [f"picture {i}" for i in range(N)], **columns},
        {"image": {"_type": "Image"}, "text": {"dtype": "string", "_type": "Value"}},
    )  # fmt: skip


@pytest.fixture(params=["arrow", "parquet"])
def write(request: pytest.FixtureRequest) -> Any:
    return save_to_disk if request.param == "arrow" else write_parquet


def opened(path: Path, *wanted: FieldSpec) -> TableSource:
    files = Files([str(path)]) if path.is_file() else saved_files(str(path)) or tables_below(str(path))
    assert files is not None
    return TableSource(files, wanted or (IMAGE,))


def read(source: Any, index: int, name: str = "image") -> bytes:
    return source.record(index)[name].read(1 << 20)


def test_rows_of_all_files_are_records_in_order_for_any_process(write, tmp_path):
    source = opened(write(tmp_path / "table", images()), IMAGE, TEXTS)
    assert len(source) == N and [read(source, i) for i in range(N)] == [content(i) for i in range(N)]
    assert [read(source, i) for i in (9, 3, 13, 0)] == [content(i) for i in (9, 3, 13, 0)]
    record = source.record(8)
    assert record["image"].name == "8.img" and record["texts"] == {"text": "picture 8"}
    assert source.shards == [range(7), range(7, 14)] and opened(Path(source.describe(8)[:-3])).shards is None
    assert source.describe(8).endswith("[1]") and source.name(8).endswith("/000000001")
    sent = pickle.dumps(source)
    again = pickle.loads(sent)
    assert again.fingerprint == source.fingerprint and read(again, 5) == content(5)
    assert len(sent) < 5000, "paths, not contents"
    assert [*source.examples("image")] == [*range(N)] and not source.examples("nothing")


def test_numbers_of_classes_are_replaced_by_names_and_empty_cells_are_left_out(write, tmp_path):
    sounds = table(
        {"audio": [{"bytes": content(i), "path": None} for i in range(N)],
         "captions": [[f"sound {i}", "a sound"] for i in range(N)], "text": [None] * 7 + ["spoken"] * 7,
         "label": [i % 3 - 1 for i in range(N)]},
        {"audio": {"_type": "Audio"}, "label": {"_type": "ClassLabel", "names": ["dog", "cat"]}},
    )  # fmt: skip
    source = opened(write(tmp_path / "table", sounds), SOUND, TEXTS)
    assert source.record(4)["texts"] == {"captions": ["sound 4", "a sound"], "label": "dog"}
    assert source.record(9)["texts"] == {"captions": ["sound 9", "a sound"], "text": "spoken"}, "-1 stands for none"


def test_lists_of_numbers_are_embeddings(write, tmp_path):
    rows = [np.arange(3.0) + i for i in range(N)]
    halves = pa.array([row.astype(np.float16) for row in rows], pa.list_(pa.float16(), 3))
    tokens = [[[1.0, i], [2.0, i], [3.0, i]][: 1 + i % 3] if i != 5 else [[1.0], [2.0, 3.0]] for i in range(N)]
    made = images(text_encodings=tokens).append_column("image_embed", halves)
    source = opened(write(tmp_path / "table", made), IMAGE, EMBED, ENCODINGS)
    assert source.record(4)["image_embed"].tolist() == [4, 5, 6]
    assert source.record(4)["text_encodings"].tolist() == [[1, 4], [2, 4]]
    assert "its text encoding" in one_line(source.record, 5) and len(source.examples("text_encodings")) == N
    npys = opened(write(tmp_path / "files", images(image_embed=[content(i) for i in range(N)])), IMAGE, EMBED)
    assert read(npys, 3, "image_embed") == content(3)


def test_a_path_without_bytes_is_a_file_below_the_folder(write, tmp_path):
    cells = [{"bytes": None, "path": "files/a.png"}, {"bytes": content(1), "path": None}, None, {"bytes": None}]
    folder = write(tmp_path / "table", table({"image": [*cells, {"bytes": None, "path": "a\0b"}, *cells]}))
    (folder / "files").mkdir()
    (folder / "files" / "a.png").write_bytes(content(7))
    source = opened(folder)
    assert read(source, 0) == read(source, 5) == content(7) and read(source, 1) == content(1)
    assert one_line(source.record, 2) == one_line(source.record, 3) == "the row holds no image"
    assert one_line(source.record, 4) == 'it has no "path" of its image'


def test_plain_binary_columns_and_large_ones_are_read(tmp_path):
    contents = [content(i) for i in range(N)]
    large = pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())])
    for number, column in enumerate((
        pa.array(contents), pa.array(contents, pa.large_binary()),
        pa.array([{"bytes": content, "path": ""} for content in contents], large),
    )):  # fmt: skip
        path = write_arrow(tmp_path / f"{number}.arrow", pa.table({"jpg": column, "key": [str(i) for i in range(N)]}))
        assert read(opened(path), 5) == content(5), number


def test_files_that_are_no_tables_are_counted_and_splits_are_not_mixed(tmp_path):
    folder = write_parquet(tmp_path / "hub" / "data", images())
    (folder / "README.md").touch()
    assert opened(folder).skipped.split("; ")[0] == f"1 file is skipped in {str(folder)!r}: 1 .md"
    (folder / "test-00000-of-00001.parquet").write_bytes((folder / "train-00000-of-00002.parquet").read_bytes())
    assert "test, train" in one_line(tables_below, str(tmp_path / "hub"))
    saved = tmp_path / "dict"
    save_to_disk(saved / "train", images())
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    text = one_line(saved_files, str(saved))
    assert "train, test" in text and f"'{saved}/train'" in text and len(opened(saved / "train")) == N


def test_what_the_library_datasets_writes_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=["dog", "cat"]),
        text_encodings=datasets.Array2D((2, 2), "float32"),
    )  # fmt: skip
    rows = {"image": [{"bytes": content(i), "path": None} for i in range(N)], "label": [i % 2 for i in range(N)],
            "text_encodings": [[[i, 1.0], [2.0, 3.0]] for i in range(N)]}  # fmt: skip
    made = datasets.Dataset.from_dict(rows, features=features)
    made.select([3, 1, 2]).save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "pq" / "train.parquet")
    for path, first in ((tmp_path / "saved", 3), (tmp_path / "pq", 0)):
        source = opened(path, IMAGE, TEXTS, ENCODINGS)
        record = source.record(0)
        assert read(source, 0) == content(first) and record["texts"] == {"label": "cat" if first else "dog"}
        assert record["text_encodings"].tolist() == [[first, 1], [2, 3]]


# What is refused.


def test_a_damaged_file_is_one_line(write, tmp_path):
    folder = write(tmp_path / "table", images())
    path = sorted(folder.glob("data-*") if write is save_to_disk else folder.glob("*.parquet"))[1]
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1], b"", bytes(1000), b"ARROW1" + bytes(100)):
        path.write_bytes(damaged)
        assert one_line(opened, folder).startswith(f"cannot read {str(path)!r}: "), damaged[:8]


def test_a_damaged_row_group_costs_its_rows(tmp_path):
    folder = write_parquet(tmp_path / "table", images(), shards=1)
    source = opened(folder)
    (path,) = folder.glob("*.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(200) + whole[204:])
    assert one_line(source.record, 0).startswith("the rows beside it cannot be read: ")
    assert read(source, N - 1) == content(N - 1)


def test_a_table_without_a_fitting_column_is_one_line_that_names_the_columns(tmp_path):
    write_arrow(tmp_path / "a.arrow", table({"caption": ["a"], "n": [1]}))
    assert "it has caption, n" in one_line(opened, tmp_path / "a.arrow")
    two = [{"bytes": content(0), "path": None}]
    write_arrow(tmp_path / "b.arrow", table({"left": two, "right": two}))
    assert "several columns of images, left, right" in one_line(opened, tmp_path / "b.arrow")
    write_arrow(tmp_path / "d.arrow", table({"audio": two}, {"audio": {"_type": "Audio"}}))
    assert "has no column of images" in one_line(opened, tmp_path / "d.arrow")
    write_arrow(tmp_path / "e.arrow", table({"image": two}).slice(1))
    assert one_line(opened, tmp_path / "e.arrow") == f"'{tmp_path}/e.arrow' holds no rows"


def test_what_a_start_or_a_sample_would_read_whole_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_MAX_GROUP_BYTES", 100)
    folder = write_parquet(tmp_path / "parquet", images(), shards=1)
    assert "its row group 3 has 0.0 GB, and all of it is read for one sample" in one_line(opened, folder)
    for codec in ("lz4", "zstd"):
        path = write_arrow(tmp_path / "a.arrow", images(), options=pa.ipc.IpcWriteOptions(compression=codec))
        assert "it is compressed" in one_line(opened, path)
    path = write_arrow(tmp_path / "b.arrow", pa.table({"image": pa.array([b"a"]).dictionary_encode()}))
    assert "has dictionaries" in one_line(opened, path)


def test_the_parts_of_files_are_known_from_the_columns_of_times_alone_and_a_bad_one_is_a_bad_sample(write, tmp_path):
    times = [None, 1.5, -1.0, *[None] * (len(images()) - 3)]
    source = opened(write(tmp_path / "table", images(start_seconds=times)))
    read, columns = source._read_part, set[str]()
    source._read_part = lambda number, chosen: columns.update(chosen) or read(number, chosen)
    assert [*time_ranges(source)][:3] == ["0.0 inf", "1.5 inf", "[None, None, -1.0, None]"]
    assert columns == {"start_seconds"}
    assert "which is no time" in one_line(source.record, 2) and source.record(1)["image"].start_seconds == 1.5
    assert not [*time_ranges(opened(write(tmp_path / "whole", images(start_seconds=[None] * len(images())))))]


def test_a_cell_that_a_small_file_repeats_is_read_once(tmp_path):
    cells = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array([b"x" * (1 << 20)]))
    folder = tmp_path / "parquet"
    folder.mkdir()
    pq.write_table(pa.table({"image": cells}), folder / "a.parquet", store_schema=False, compression="zstd")
    source, before = opened(folder), pa.total_allocated_bytes()
    assert read(source, 299) == b"x" * (1 << 20) and pa.total_allocated_bytes() - before < 1 << 24


def test_a_cell_that_is_said_to_lie_outside_of_the_file_is_one_line(tmp_path):
    """Arrow adds offsets to a place in memory without looking at them, unless it is asked to."""
    whole = content(0)
    for end in (1 << 30, -5):
        offsets = pa.py_buffer(np.array([0, end, len(whole)], np.int32).tobytes())
        column = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(whole)])
        source = opened(write_arrow(tmp_path / "a.arrow", pa.table({"jpg": column})))
        assert str(end) in one_line(source.record, 0)


def test_state_json_that_was_made_to_do_harm_is_refused(tmp_path):
    folder = save_to_disk(tmp_path / "table", images())
    for state, said in {
        '{"_data_files": [{"filename": "../x.arrow"}]}': "no file of its folder",
        '{"_data_files": [3]}': "cannot read",
        "[": "cannot read",
        '{"_data_files": [{"filename": "a"}], "_indices_data_files": [{"filename": "i"}]}': "flatten_indices",
    }.items():
        (folder / "state.json").write_text(state)
        assert said in one_line(saved_files, str(folder))


def test_an_arrow_file_to_which_another_was_appended_is_refused(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", images())
    content = path.read_bytes()
    path.write_bytes(content * 2)
    said = one_line(opened, path)
    assert str(path) in said and f"{len(content)} bytes follow the end of its stream" in said


def test_files_with_other_columns_are_refused(tmp_path):
    folder = write_parquet(tmp_path / "table", images(), shards=1)
    pq.write_table(pa.table({"image": ["a"]}), folder / "train-00001-of-00002.parquet")
    assert "has the columns image: string" in one_line(opened, folder)


# Manifests.


def manifest(path: Path, content: str, *wanted: FieldSpec) -> ManifestSource:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return ManifestSource(str(path), wanted or (SOUND, TEXTS))


SAME_ROWS = {
    "set.csv": '\ufeffpath, caption,label\r\nclips/a.wav,"a bell, loud",bell\r\n\r\nclips/b.wav,ünïcode,\r\n',
    "set.tsv": "file_name\tcaption\tlabel\nclips/a.wav\ta bell, loud\tbell\nclips/b.wav\tünïcode\t\n",
    "set.jsonl": '{"path": "clips/a.wav", "caption": "a bell, loud", "label": "bell"}\n'
    '\n{"caption": "ünïcode", "path": "clips/b.wav", "other": [1]}\n',
}
SAME_ROWS["set.ndjson"] = SAME_ROWS["set.json"] = SAME_ROWS["set.jsonl"]


@pytest.mark.parametrize("name", SAME_ROWS)
def test_manifest_of_every_kind_says_the_same(tmp_path, name):
    source = manifest(tmp_path / name, SAME_ROWS[name], SOUND, TEXTS, EMBED)
    assert source.record(0)["texts"] == {"caption": "a bell, loud", "label": "bell"}
    assert source.record(1) == {"sound": source.record(1)["sound"], "texts": {"caption": "ünïcode"}}
    assert [source.describe(i) for i in range(2)] == [f"{tmp_path}/clips/{name}.wav" for name in "ab"]
    assert [source.name(i) for i in range(len(source))] == ["clips/a.wav", "clips/b.wav"]
    assert [len(source.examples(name)) for name in ("sound", "texts", "image_embed")] == [2, 2, 0]
    assert pickle.loads(pickle.dumps(source)).record(1) == source.record(1)


def test_paths_are_relative_to_the_manifest_or_absolute_and_name_what_stands_beside(tmp_path):
    rows = f'path,image_embed\na.wav,e/a.npy\n../b.wav,"[1, 2.5]"\n{tmp_path}/b.wav,\n'
    source = manifest(tmp_path / "lists" / "set.csv", rows, SOUND, EMBED)
    assert [source.describe(i) for i in range(3)] == [
        f"{tmp_path}/lists/a.wav", f"{tmp_path}/lists/../b.wav", f"{tmp_path}/b.wav"
    ]  # fmt: skip
    assert source.record(0)["image_embed"].path == f"{tmp_path}/lists/e/a.npy"
    assert source.record(1)["image_embed"].tolist() == [1, 2.5] and "image_embed" not in source.record(2)
    lines = '{"path": "a.wav", "text_encodings": [[1, 2], [3, 4]]}\n{"path": "a.wav", "text_encodings": [[1], [2, 3]]}'
    source = manifest(tmp_path / "set.jsonl", lines, SOUND, ENCODINGS)
    assert source.record(0)["text_encodings"].tolist() == [[1, 2], [3, 4]]
    assert "its text encoding" in one_line(source.record, 1)


def test_a_file_is_found_whether_letters_and_accents_are_composed_in_its_name_or_not(tmp_path):
    """Written on one system, listed on another: also where folders and files came from different ones."""
    names = ["ü/é.wav", "ü/ñ.wav", "a/가.wav"]
    forms = [("NFD", "NFC"), ("NFD", "NFD"), ("NFC", "NFD")]  # of folder and file
    for name, form in zip(names, forms, strict=True):
        path = tmp_path / Path(*map(unicodedata.normalize, form, Path(name).parts))
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    source = manifest(tmp_path / "set.csv", "path\n" + "\n".join([*names, "é.wav"]))
    records = [source.record(number)["sound"] for number in range(4)]
    assert [record.read(100).decode() for record in records[:3]] == names
    assert records[3].path == str(tmp_path / "é.wav"), "what is not there has the name that the row says"
    assert [source.name(number) for number in range(3)] == names


@pytest.mark.parametrize("cell", ["[{}]", "[[1], [1, 2]]", "{}", '{"bytes": {}}', "[1" + "0" * 400 + "]", "5", "true"])
def test_a_cell_that_is_no_embedding_is_one_line_and_a_number_has_no_dimensions(cell, tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"path": "a.png", "image_embed": {cell}}}\n{{"path": "b.png"}}')
    source = ManifestSource(str(tmp_path / "a.jsonl"), [IMAGE, EMBED])
    if cell == "{}":
        assert [*source.record(0)] == ["image"]
    elif cell in ("5", "true"):
        assert source.record(0)["image_embed"].shape == ()
    else:
        assert "its image embedding is no list of numbers" in one_line(source.record, 0)
    assert [*source.record(1)] == ["image"]


def test_rows_may_be_parts_of_one_long_file(tmp_path):
    rows = "path,start_seconds,end_seconds,start_s\na.wav,2,3,9\na.wav,8,,9\na.wav,,,\n"
    source = manifest(tmp_path / "set.csv", rows)
    entries = [source.record(i)["sound"] for i in range(3)]
    assert [(entry.start_seconds, entry.end_seconds) for entry in entries] == [(2, 3), (8, math.inf), (0, math.inf)]
    public = manifest(tmp_path / "music.csv", "file_name,ytid,start_s,end_s,caption\na.wav,x,1,2,a song\n")
    assert public.record(0)["sound"][3:5] == (1, 2) and public.record(0)["texts"] == {"caption": "a song"}


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.csv", "file,caption\na.wav,one\n", "it has file, caption"), ("a.csv", "path,caption\n", "has no rows"),
        ("a.csv", "path,caption\na.wav,one\n,two\n", "line 3"), ("a.csv", "", "it has nothing"),
        ("a.csv", "path,caption\na.wav,a bell, loud\n",
         "line 2: it has 3 cells, but the first line names 2 columns: put a cell with"),
        ("a.csv", 'path,caption\na.wav,"' + ("x" * 1000 + "\n") * 1100, "it is no table"),
        ("a.csv", "path,caption\na.wav," + "x" * (1 << 20), "line 2: it is longer than"),
        ("a.csv", "path,caption,start_seconds\na.wav,one,nan\n", "line 2: its start_seconds is 'nan'"),
        ("a.csv", "path,caption,start_seconds\na.wav,one,inf\n", "line 2: its start_seconds is 'inf'"),
        ("a.csv", "path,caption,end_s\na.wav,one,inf\n", "line 2: its end_seconds is 'inf'"),
        ("a.csv", "path,caption,start_seconds,end_seconds\na.wav,one,5,5\n",
         "line 2: it ends at 5 s, not after its start at 5 s"),
        ("a.jsonl", '{"path": "a.wav", "caption": "one"}\n{"path": "b', "line 2: it is no JSON object"),
        ("a.jsonl", '3\n', 'line 1: it is no JSON object: write {"path": "...", "caption": "..."}, one per line'),
        ("a.jsonl", '{"path": "a\\u0000.wav", "caption": "one"}', "line 1"),
        ("a.jsonl", '{"path": "a\\ud83d.wav", "caption": "one"}', "line 1"),
        ("a.jsonl", '{"path": "a.wav", "start_seconds": ' + "9" * 4000 + "}", f"start_seconds is {'9' * 40}"),
        ("a.jsonl", '{"path": "a.wav", "start_seconds": true}', "start_seconds is True"),
        ("a.jsonl", "[" * 100_000, "line 1"),
        # A quotation mark that would swallow rows.
        ("a.csv", 'path,caption\n1.wav,"stop" sign\n2.wav,',
         "a.csv, line 2: it is no table (',' expected after '\"')"),
        ("a.csv", 'path,caption\n1.wav,"quiet\n2.wav,one\n3.wav,"two"\n', "a.csv, lines 2 to 4: it is no table"),
        ("a.csv", 'path,caption\n1.wav,"quiet\n2.wav,one\n', "a.csv, lines 2 to 3: it is no table"),
        ("a.csv", 'path,caption\n1.wav,"quiet\n2.wav,one\n3.wav,"\n',
         "a.csv, lines 2 to 4: a quotation mark that is not closed"),
        ("a.tsv", 'path\tcaption\n1.wav\t"two\nlines"\n',
         "a.tsv, line 3: a cell in quotes goes on over several lines"),
    ],
)  # fmt: skip
def test_manifest_that_cannot_be_understood_is_refused_with_its_line(tmp_path, name, content, expected):
    path = tmp_path / name
    text = one_line(manifest, path, content)
    assert str(path) in text and expected in text


def test_columns_that_are_not_read_are_named(tmp_path):
    """In which the captions may stand."""
    rows = [
        {"path": "a.wav", "sentence": "one", "text": "two", "start_s": 1},
        {"file_name": "b.wav", "votes": 3, "": 1},
    ]
    for _ in range(2):
        source = manifest(tmp_path / "set.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        assert source.skipped == f"columns of {str(tmp_path / 'set.jsonl')!r} that are not read: sentence, votes"
    many = ",".join(f"c{number}" for number in range(300))
    assert manifest(tmp_path / "many.csv", f"path,{many}\na.wav{',x' * 300}\n").skipped.endswith("c6, c7, ...")
    assert manifest(tmp_path / "all.csv", "path,caption,label\na.wav\n").skipped == ""
    path = tmp_path / "a.parquet"
    pq.write_table(images(sentence=["a"] * N, start_seconds=[0.0] * N), path)
    assert opened(path).skipped == f"columns of {str(path)!r} that are not read: text, sentence"


# Captions in which a quotation mark begins, ends or stands anywhere.
QUOTED = ['"stop" sign', '"quiet please', '12" pan', '"', 'a "small" dog', 'the end"', '"the end', "a line", '""x']


@pytest.mark.parametrize("name", ["a.tsv", "a.csv", "a.jsonl"])
def test_a_quotation_mark_in_a_caption_swallows_no_row(name, tmp_path):
    """Written as the kind of file wants it; a .tsv by programs that quote nothing, and by others."""
    rows = [{"path": f"{number}.wav", "caption": caption} for number, caption in enumerate(QUOTED)]
    texts = {"a.jsonl": ["".join(json.dumps(row) + "\n" for row in rows)], "a.csv": [], "a.tsv": []}[name]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL) if not texts else ():
        file = io.StringIO()
        table = csv.DictWriter(file, ["path", "caption"], delimiter=",\t"[name == "a.tsv"], quoting=quoting)
        table.writeheader()
        table.writerows(rows)
        texts.append(file.getvalue())
    if name == "a.tsv":
        texts.append("path\tcaption\n" + "".join(f"{row['path']}\t{row['caption']}\n" for row in rows))
    for text in texts:
        source = manifest(tmp_path / name, text)
        assert [source.cells(index)["caption"] for index in range(len(source))] == QUOTED


def test_a_caption_of_a_csv_may_have_several_lines(tmp_path):
    source = manifest(tmp_path / "a.csv", 'path,caption\na.wav,"one,\n\ntwo ""three"""\nb.wav,four\n')
    assert [source.cells(i)["caption"] for i in range(2)] == ['one,\n\ntwo "three"', "four"]


def test_secrets_are_in_no_name(tmp_path):
    source = manifest(tmp_path / "set.csv", "path\nhttp://me:hunter2@host/a.wav?sig=hunter2\n")
    assert (source.describe(0), source.name(0)) == ("http://host/a.wav",) * 2
    assert source.record(0)["sound"].path == "http://me:hunter2@host/a.wav?sig=hunter2"


def test_a_cell_of_a_csv_may_be_a_long_list(tmp_path):
    numbers = [round(0.0001 * i, 4) for i in range(40_000)]
    source = manifest(tmp_path / "set.csv", f'path,image_embed\na.wav,"{numbers}"\n', SOUND, EMBED)
    assert source.record(0)["image_embed"].shape == (40_000,)


def test_manifest_that_is_no_text_is_refused(tmp_path):
    for before in (1, 5000):  # in the first block that is decoded, and in a later one
        (tmp_path / "a.csv").write_bytes(b"path\n" + b"a.wav\n" * before + b"\xff.wav\n")
        line = one_line(ManifestSource, str(tmp_path / "a.csv"), (SOUND,))
        assert f"a.csv, line {before + 2}: it is no UTF-8 text" in line
    assert "No such file" in one_line(ManifestSource, str(tmp_path / "b.csv"), (SOUND,))


def test_the_rows_of_a_long_manifest_are_kept_and_read_again_if_it_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_CLOCK_TICK_NS", 0)  # of a manifest that has changed just now no rows are kept
    rows = [json.dumps({"path": f"{i}.wav", "caption": str(i)}) for i in range(12_000)]
    first = manifest(tmp_path / "set.jsonl", "\n".join(rows))
    (cached_index,) = tmp_path.glob(".set.jsonl.*")
    again = ManifestSource(str(tmp_path / "set.jsonl"), (SOUND, TEXTS))
    assert again.record(11_999) == first.record(11_999) and again.fingerprint == first.fingerprint
    cached_index.write_bytes(
        cached_index.read_bytes().replace(b'{"path": "0.wav", "caption": "0"}', b"[" + b" " * 31 + b"]")
    )
    forged = ManifestSource(str(tmp_path / "set.jsonl"), (SOUND, TEXTS))
    assert forged.name(1) == "1.wav" and "was damaged or replaced: delete it" in one_line(forged.record, 0)
    changed = manifest(tmp_path / "set.jsonl", "\n".join(reversed(rows)))
    assert changed.name(0) == "11999.wav"
    other = manifest(tmp_path / "set.jsonl", "\n".join(rows).replace('"caption": "0"', '"caption": "other"'))
    assert len({first.fingerprint, changed.fingerprint, other.fingerprint}) == 3
