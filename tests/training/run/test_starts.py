"""starts.jsonl: what is added to it, and what is read from it."""

import json

from training.run.starts import add_start, last_start, script_of, starts


def test_starts_are_added_behind_those_of_an_older_version_and_damaged_lines_are_left_out(tmp_path):
    assert starts(tmp_path) == [] and last_start(tmp_path) == {} and script_of(tmp_path) is None
    old = {"command": ["/code/train_vqgan.py", "--seed", "1"], "world_size": 2}
    (tmp_path / "environment.json").write_text(json.dumps(old))
    assert last_start(tmp_path) == old and script_of(tmp_path) == "train_vqgan.py"
    add_start(tmp_path, {"script": "train_vae.py", "world_size": 4})
    assert [start["world_size"] for start in starts(tmp_path)] == [2, 4] and script_of(tmp_path) == "train_vae.py"
    assert not (tmp_path / "environment.json").exists()
    with open(tmp_path / "starts.jsonl", "a") as file:
        file.write('[1]\n{"world_size": ')
    add_start(tmp_path, {"world_size": 8})
    assert [start["world_size"] for start in starts(tmp_path)] == [2, 4, 8]
