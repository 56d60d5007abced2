"""What only a GPU can show. `make gpu` runs these tests, without the fixtures of the others. They also run on the
pretend accelerator (tests/pretend), but for what needs the kernels of a GPU."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem import distributed
from tandem.data.sampling.workers import Loader
from tandem.devices import full_precision
from tandem.distributed import Backend
from tandem.distributed.collectives import Handle
from tandem.distributed.devices import gpu_id, local_device, use_deterministic_kernels, use_tf32
from tandem.distributed.engines.reducer import GradientReducer
from tandem.distributed.errors import TrainingStopped
from tandem.distributed.signals import StopRequest
from tandem.models.layers.video.causal import CausalConv3d, Context
from tandem.training.checkpoint.snapshot import Snapshot
from tests.processes import Root, parsed

KIND = torch.accelerator.current_accelerator(check_available=True)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(KIND is None, reason="needs a GPU")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when the first test starts it
PRECISIONS = ("fp32", "bf16", "fp16")
FSDP = {"distributed_backend": "fsdp"}
KINDS: list[dict[str, str]] = [{}, FSDP]
DEVICE = torch.device(KIND.type if KIND else "cpu", 0)
GPU: Any = torch.get_device_module(DEVICE)


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    """Those that PyTorch begins with, after each test."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """One process. The parameter holds what differs from the scripts' defaults."""
    values = {"distributed_backend": "single", "batch_size": 8, **getattr(request, "param", {})}
    with distributed.from_args(parsed(**values)) as connected:
        yield connected


class Network(Root):
    """Two equal processes: each sum doubles what it gets; a slow one on a stream of its own, after a long wait."""

    def __init__(self, is_slow: bool) -> None:
        super().__init__(2)
        self._stream = GPU.Stream() if is_slow else None

    def all_reduce_(self, tensor: Tensor, name: str) -> Handle:
        if self._stream is None:
            tensor.mul_(2)
            return self
        self._stream.wait_stream(GPU.current_stream())
        with GPU.stream(self._stream):
            GPU._sleep(20_000_000)  # about 10 ms
            tensor.mul_(2)
        return Sum(self._stream.record_event())


class Sum:
    """The handle of a sum on another stream: as with NCCL, only the present stream waits for it."""

    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> None:
        GPU.current_stream().wait_event(self._event)


def trained_through(network: Network) -> Tensor:
    """The weights after five updates by SGD, which shows whether a gradient was doubled, as Adam would not."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(DEVICE)  # 32 MiB: eight buckets
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=True)
    reducer = GradientReducer(list(model.parameters()), network, "model")
    assert len(reducer.buckets) > 1
    x = torch.randn(64, 1024, device=DEVICE)
    for _ in range(5):
        reducer.backward(model(x).square().mean(), 0, retain_graph=False)
        reducer.finish()
        optimizer.step()
        reducer.zero_()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_optimizer_and_the_next_backward_pass_come_after_the_sums_of_another_stream() -> None:
    use_deterministic_kernels()
    assert torch.equal(trained_through(Network(is_slow=True)), trained_through(Network(is_slow=False)))


def test_a_request_to_stop_travels_with_gradients_and_is_heard_of_without_a_wait() -> None:
    network, received = Network(is_slow=True), set[int]()
    stop, weight = StopRequest(network, received), nn.Parameter(torch.zeros(3, device=DEVICE))
    reducer, answers = GradientReducer([weight], network, "model", stop_request=stop), []
    for update in range(5):
        if update == 1:
            received.add(signal.SIGTERM)
        reducer.backward(weight.sum(), 0, retain_graph=False)
        reducer.finish()
        reducer.zero_()
        answers.append(stop.is_agreed())
    assert answers == [False, False, True, True, True]  # read in the call after the update that brought it


@pytest.mark.parametrize("shift", [0, 3])
def test_fused_adam_divides_and_skips_as_the_engine_expects_wherever_gradients_begin(shift: int) -> None:
    """Gradients are views into a bucket, which begin at any multiple of 4 bytes."""
    fused, plain = (nn.Parameter(torch.linspace(-1, 1, 1001, device=DEVICE)) for _ in range(2))
    ours, reference = torch.optim.Adam([fused], lr=0.1, fused=True), torch.optim.Adam([plain], lr=0.1, foreach=False)
    bucket = torch.zeros(1001 + shift, device=DEVICE)
    fused.grad = bucket[shift:]
    gradients = torch.Generator().manual_seed(0)
    for update in range(6):
        gradient = torch.randn(1001, generator=gradients).to(DEVICE)
        bucket[shift:] = 3 * gradient
        plain.grad = gradient
        ours.grad_scale = torch.tensor(3.0, device=DEVICE)
        ours.found_inf = torch.tensor(float(update == 2), device=DEVICE)
        ours.step()
        if update != 2:
            reference.step()
    assert float(ours.state[fused]["step"]) == float(reference.state[plain]["step"]) == 5
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


def test_a_snapshot_shows_nothing_of_what_the_gpu_is_told_next() -> None:
    weight = torch.zeros(10_000_000, device=DEVICE)
    snapshot = Snapshot({"model": {"weight": weight}})
    weight.add_(1)
    snapshot.finish()
    assert snapshot.tensors["model"]["weight"].abs().max() == 0 and snapshot.tensors["model"]["weight"].is_pinned()


def test_a_snapshot_copies_what_a_function_returned_before_its_memory_is_used_again() -> None:
    buffer = torch.zeros(10_000_000, device=DEVICE)
    snapshot = Snapshot({"model": {str(i): (lambda i=i: buffer.fill_(i)) for i in range(3)}})
    buffer.fill_(-1)
    snapshot.finish()
    assert [float(t.max()) for t in snapshot.tensors["model"].values()] == [0, 1, 2]


@pytest.mark.parametrize("backend", [{"max_skipped_updates": 3, **more} for more in KINDS], indirect=True, ids=str)
def test_a_run_of_updates_that_are_not_finite_ends_though_the_host_reads_the_count_late(backend: Backend) -> None:
    model = nn.Linear(4, 4).to(backend.processes.device)
    engine = backend.wrap(model, torch.optim.Adam(model.parameters(), fused=True))
    with pytest.raises(TrainingStopped, match=r"3 updates in a row .* the loss is nan"):
        for _ in range(6):
            engine.backward(engine(torch.full((8, 4), torch.nan, device=backend.processes.device)).mean())
            engine.step()
    assert all(torch.isfinite(weight).all() for weight in engine.state_dict()["weights"].values())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_pinned_so_that_their_copies_do_not_hold_the_host_up(num_workers: int) -> None:
    batches = iter(Loader(_batch, [1, 2], num_workers, pin_memory=True))
    for number, batch in zip((1, 2), batches, strict=True):
        assert batch["images"].is_pinned() and batch["ids"] == [number]
        assert torch.equal(batch["images"].to(DEVICE, non_blocking=True).cpu(), _batch(number)["images"])


def _batch(number: int) -> dict[str, Any]:
    return {"images": torch.full((2, 3), number, dtype=torch.uint8), "ids": [number]}


def products() -> dict[str, float]:
    """Largest error of a matrix product and of a convolution by ones and zeros, of numbers that TF32 rounds."""
    x = 1 + torch.arange(1024 * 1024, device=DEVICE).view(1024, 1024) % 1000 * 2.0**-22
    ones = torch.eye(1024, device=DEVICE)
    image = x.view(16, 64, 32, 32)
    convolved = nn.functional.conv2d(image, torch.eye(64, device=DEVICE)[:, :, None, None])
    return {"matrix": float((x @ ones - x).abs().max()), "convolution": float((convolved - image).abs().max())}


def test_products_of_fp32_are_those_of_fp32_until_tf32_is_asked_for() -> None:
    use_tf32("fp32")
    assert max(products().values()) < 1e-5  # TF32 leaves 2e-4
    if DEVICE.type != "cuda" or GPU.get_device_capability(DEVICE) < (8, 0):
        pytest.skip("this GPU has no TF32")
    use_tf32("tf32")
    assert products()["matrix"] > 1e-4
    use_tf32("bf16")
    errors = products()
    assert errors["matrix"] < 1e-5 and errors["convolution"] > 1e-4
    with full_precision(DEVICE.type):
        assert max(products().values()) < 1e-5


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
def test_a_causal_convolution_trains_with_deterministic_kernels_however_it_pads(mode: str) -> None:
    use_deterministic_kernels()
    conv = CausalConv3d(4, 4, (3, 3, 3), pad_mode=mode).to(DEVICE)
    x = torch.randn(2, 4, 5, 8, 8, device=DEVICE, requires_grad=True)
    conv(x, Context()).square().sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


@pytest.mark.parametrize(
    "backend", [{"precision": p, **more} for more in KINDS for p in PRECISIONS], indirect=True, ids=str
)
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_the_host_waits_for_nothing_during_an_update(max_grad_norm: float, backend: Backend) -> None:
    """Without and with a norm of the gradients."""
    model = nn.Linear(64, 64).to(backend.processes.device)
    engine = backend.wrap(model, torch.optim.Adam(model.parameters(), fused=True), max_grad_norm=max_grad_norm)
    x = torch.randn(8, 64, device=backend.processes.device)

    def update() -> None:
        for micro in engine.micro_batches({"x": x}):
            engine.backward(engine(micro["x"]).float().square().mean())
        engine.step(with_norm=False)

    for _ in range(3):  # these make the optimizer's state and load kernels
        update()
    GPU.set_sync_debug_mode("error")
    try:
        update(), update()
    finally:
        GPU.set_sync_debug_mode("default")


def test_a_gpu_has_an_id_by_which_two_processes_would_find_that_they_share_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gpu_id(DEVICE)
    monkeypatch.setenv("TANDEM_SHARE_GPU", "1")
    assert local_device(GPU.device_count(), "torchrun") == DEVICE
