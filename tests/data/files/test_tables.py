"""Arrow and parquet files of images, sounds and captions: the same samples as in a folder; damaged ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data.images.captioned import open_captioned
from data.sets import open_images, open_sounds
from tests.data.files.tables import save_to_disk, table, write_arrow, write_parquet
from tests.data.helpers import one_line
from tests.data.sources import image, sound

N = 14


def picture(number: int) -> bytes:
    return next(iter(image(number).values()))


def images(**columns) -> pa.Table:
    return table(
        {"image": [{"bytes": picture(i), "path": f"{i}.img"} for i in range(N)],
         "text": [f"picture {i}" for i in range(N)], **columns},
        {"image": {"_type": "Image"}, "text": {"dtype": "string", "_type": "Value"}},
    )  # fmt: skip


def sounds() -> pa.Table:
    return table(
        {
            "audio": [{"bytes": sound(i)["wav"], "path": None} for i in range(N)],
            "captions": [[f"sound {i}", "a sound"] for i in range(N)],
            "text": ["what is spoken"] * N,
            "label": [i % 3 - 1 for i in range(N)],
        },
        {"audio": {"_type": "Audio"}, "label": {"_type": "ClassLabel", "names": ["dog", "cat"]}},
    )


@pytest.fixture(params=["arrow", "parquet"])
def write(request):
    return save_to_disk if request.param == "arrow" else write_parquet


def opened(spec: Path | str, **options):
    return open_images(str(spec), **{"image_size": 16, **options})


def hearing(spec: Path):
    return open_sounds(str(spec), sample_rate=8000, clip_seconds=0.2, seed=3)


def test_sounds_have_the_captions_and_labels_of_their_columns(write, tmp_path):
    rows = hearing(write(tmp_path / "table", sounds()))
    assert rows.texts(4) == ([f"sound {4}", "a sound"], "dog")
    assert [rows.texts(i).label for i in range(3)] == [None, "dog", "cat"], "-1 stands for none"


def test_captions_of_images_are_the_first_ones(write, tmp_path):
    made = images(caption_1=[f"first {i}" if i else None for i in range(N)], caption_2=["second"] * N)
    captioned = open_captioned(str(write(tmp_path / "table", made)), image_size=16)
    assert [captioned.caption(i) for i in range(3)] == ["second", "first 1", "first 2"], "the text is not read"
    text_alone = open_captioned(str(write(tmp_path / "text", images())), image_size=16)
    assert text_alone.caption(3) == "picture 3"


def test_a_path_without_bytes_is_a_file_below_the_folder(write, tmp_path):
    cells = [{"bytes": None, "path": "files/a.png"}, {"bytes": picture(1), "path": None}, None]
    folder = write(tmp_path / "table", table({"image": [*cells, *cells]}))
    (folder / "files").mkdir()
    (folder / "files" / "a.png").write_bytes(picture(7))
    rows = opened(folder if (folder / "state.json").exists() else folder / "*.parquet")
    assert torch.equal(rows.load(3), rows.load(0)) and not torch.equal(rows.load(0), rows.load(1))
    assert one_line(rows.load, 2) == "the row holds no image" and rows.describe(4).endswith("[1]")


def test_plain_binary_columns_and_large_ones_are_read(tmp_path):
    contents = [picture(i) for i in range(N)]
    large = pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())])
    for number, column in enumerate((
        pa.array(contents), pa.array(contents, pa.large_binary()),
        pa.array([{"bytes": content, "path": ""} for content in contents], large),
    )):  # fmt: skip
        path = write_arrow(tmp_path / f"{number}.arrow", pa.table({"jpg": column, "key": [str(i) for i in range(N)]}))
        assert torch.equal(opened(path).load(5), opened(tmp_path / "0.arrow").load(5)), number


def test_files_are_named_by_a_path_a_pattern_or_a_range(tmp_path):
    folder = write_parquet(tmp_path / "table", images())
    specs = {"*.parquet": N, "train-{00000..00001}-of-00002.parquet": N, "train-00001-of-00002.parquet": 7}
    for spec, n in specs.items():
        assert len(opened(folder / spec)) == n
    assert len(opened(folder)) == N
    (folder / "README.md").touch()
    assert opened(folder).skipped == f"1 file is skipped in {str(folder)!r}: 1 .md"


def test_splits_are_not_mixed(tmp_path):
    folder = write_parquet(tmp_path / "hub" / "data", images())
    (folder / "test-00000-of-00001.parquet").write_bytes((folder / "train-00000-of-00002.parquet").read_bytes())
    assert "test, train" in one_line(opened, tmp_path / "hub")
    saved = tmp_path / "dict"
    save_to_disk(saved / "train", images())
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    text = one_line(opened, saved)
    assert "train, test" in text and f"'{saved}/train'" in text
    assert len(opened(saved / "train")) == N


# What is refused.


def test_a_damaged_file_is_one_line(write, tmp_path):
    folder = write(tmp_path / "table", images())
    path = sorted(folder.glob("data-*") if write is save_to_disk else folder.glob("*.parquet"))[1]
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-1], b"", bytes(1000), b"ARROW1" + bytes(100)):
        path.write_bytes(damaged)
        assert one_line(opened, folder).startswith(f"cannot read {str(path)!r}: "), damaged[:8]


def test_a_table_without_a_fitting_column_is_one_line_that_names_the_columns(tmp_path):
    write_arrow(tmp_path / "a.arrow", table({"caption": ["a"], "n": [1]}))
    assert "it has caption, n" in one_line(opened, tmp_path / "a.arrow")
    two = [{"bytes": picture(0), "path": None}]
    write_arrow(tmp_path / "b.arrow", table({"left": two, "right": two}))
    assert "several columns of images, left, right" in one_line(opened, tmp_path / "b.arrow")
    heard = [{"bytes": sound(0)["wav"], "path": None}]
    write_arrow(tmp_path / "d.arrow", table({"audio": heard}, {"audio": {"_type": "Audio"}}))
    assert "has no column of images" in one_line(opened, tmp_path / "d.arrow")
    assert "has no column of captions" in one_line(hearing, tmp_path / "d.arrow")


def test_what_a_start_would_read_whole_is_refused(tmp_path):
    path = write_arrow(tmp_path / "a.arrow", images(), options=pa.ipc.IpcWriteOptions(compression="lz4"))
    assert "it is compressed" in one_line(opened, path)


def test_a_cell_that_is_said_to_lie_outside_of_the_file_is_one_line(tmp_path):
    """Arrow adds offsets to a place in memory without looking at them, unless it is asked to."""
    whole = picture(0)
    for end in (1 << 30, -5):
        offsets = pa.py_buffer(np.array([0, end, len(whole)], np.int32).tobytes())
        column = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(whole)])
        rows = opened(write_arrow(tmp_path / "a.arrow", pa.table({"jpg": column})))
        assert str(end) in one_line(rows.load, 0)


def test_state_json_that_was_made_to_do_harm_is_refused(tmp_path):
    folder = save_to_disk(tmp_path / "table", images())
    for state, said in {
        '{"_data_files": [{"filename": "../x.arrow"}]}': "no file of its folder",
        '{"_data_files": [3]}': "names no files",
        "[": "cannot read",
        '{"_data_files": [{"filename": "a"}], "_indices_data_files": [{"filename": "i"}]}': "flatten_indices",
    }.items():
        (folder / "state.json").write_text(state)
        assert said in one_line(opened, folder)


def test_files_with_other_columns_are_refused(tmp_path):
    folder = write_parquet(tmp_path / "table", images(), shards=1)
    pq.write_table(pa.table({"image": ["a"]}), folder / "train-00001-of-00002.parquet")
    assert "has the columns image: string" in one_line(opened, folder)
