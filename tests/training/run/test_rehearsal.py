"""Where a dry run works, what is left of it, and what it says of the device."""

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.processes import Process
from training.run.rehearsal import counted, folder_beside, peak_flops
from training.run.starts import add_start


def killed_dry_run(output_dir) -> None:
    folder_beside(str(output_dir), Process())
    os.kill(os.getpid(), signal.SIGKILL)


def only_one(folder):
    (found,) = folder.glob(".dry-run-*")
    return found


def test_a_dry_run_deletes_what_one_that_was_killed_left_and_leaves_every_other_folder(tmp_path, in_a_child):
    elsewhere = tmp_path / "elsewhere"
    for name in ("run", "linked"):
        assert in_a_child(lambda name=name: killed_dry_run(elsewhere / name / "vae")) == signal.SIGKILL
    real, linked = only_one(elsewhere / "run").rename(tmp_path / ".dry-run-real"), only_one(elsewhere / "linked")
    add_start(real, {"command": ["train_vae.py"]})
    (tmp_path / ".dry-run-link").symlink_to(linked)
    for name, said in (("mine", None), ("away", "process 7 on node9 since 2026"), ("empty", "")):
        (tmp_path / f".dry-run-{name}").mkdir()
        if said is not None:
            (tmp_path / f".dry-run-{name}" / ".dry_run").write_text(said)
    before = {*tmp_path.rglob("*")}
    in_it, answer = os.pipe()
    if (other := os.fork()) == 0:
        try:
            os.write(answer, folder_beside(str(tmp_path / "vae"), Process()).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(answer)
    try:
        begun = os.read(in_it, 4096).decode()
        made = folder_beside(str(tmp_path / "vae"), Process())
        assert {str(path) for path in {*tmp_path.iterdir()} - before} == {begun, made}
        assert before <= {*tmp_path.rglob("*")}
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
        os.close(in_it)
    add_start(Path(begun), {"command": ["train_vae.py", "--dry_run"]})
    (Path(begun) / "checkpoints").mkdir()
    folder_beside(str(tmp_path / "vae"), Process())
    assert not os.path.exists(begun), "it was killed"


def test_the_operations_of_an_update_are_counted_that_asks_for_gradients_of_its_own():
    layer, inputs = torch.nn.Linear(8, 4, bias=False), torch.randn(2, 8, requires_grad=True)
    found = []
    with counted(found):
        out = layer(inputs)
        torch.autograd.grad(out.sum(), layer.weight, retain_graph=True)
        out.sum().backward()
    # Forward, gradient of the weight, and both gradients: four products of 2 x 8 x 4, a multiplication and an addition
    # for each.
    assert found == [4 * 2 * (2 * 8 * 4)]


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [("NVIDIA A100-SXM4-80GB", "fp32", 19.5), ("NVIDIA H100 80GB HBM3", "fp16", 989.5),
     ("NVIDIA H100 PCIe", "bf16", 756.5), ("NVIDIA L40S", "bf16", 362.0), ("NVIDIA L4", "bf16", 121.0),
     ("NVIDIA A10G", "fp32", None)],
)  # fmt: skip
def test_the_peak_is_that_of_the_device_and_precision(monkeypatch, name, precision, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = None if teraflops is None else teraflops * 1e12
    assert peak_flops(torch.device("cuda", 0), precision) == expected
    assert peak_flops(torch.device("cpu"), precision) is None
