"""Saved activations and parameters elsewhere: bitwise on the CPU, in order on streams, in the bytes said."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.capture import capture_step
from memfit.core.devices import find_gpu
from memfit.core.errors import UsageError
from memfit.core.workload import Workload
from memfit.dryrun.worker import Worker
from memfit.techniques import ActivationOffload, ParameterOffload, undo
from memfit.techniques.offload_parameters_run import Train, VisitingForward
from memfit.techniques.offload_places import PinnedPool, SpillFile
from memfit.techniques.offload_transfer import ToHost
from memfit.techniques.saved_tensors import keep_in_blocks

MiB = 2**20


def _net(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(layers)]
    )


def _gradients(model: nn.Module, passes: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(passes):
        model(torch.randn(128, 64)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- where bytes go ------------------------------------------------------------------------------------------


def test_pinned_memory_is_made_in_slabs_and_used_again() -> None:
    pool = PinnedPool(slab_bytes=MiB, pinned=False)
    for _ in range(3):
        pieces = [pool.take(size) for size in (1000, 300_000, 5, 2 * MiB, 1000)]
        ends = sorted((p.data_ptr(), p.data_ptr() + p.numel()) for p, _ in pieces)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends)), "no two overlap"
        for number, (piece, event) in enumerate(pieces):
            assert event is None or event == number
            pool.give_back(piece, None)
    assert pool.slab_count == 2 and pool.held_bytes == 3 * MiB


def test_a_spill_file_has_no_name_and_uses_ranges_again(tmp_path: Path) -> None:
    file = SpillFile(tmp_path / "spill")
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (5000, 1, 0, 5000)]
    for _ in range(2):
        places = [file.write(piece) for piece in data]
        assert list((tmp_path / "spill").iterdir()) == []
        for place, piece in zip(places, data, strict=True):
            back = torch.empty_like(piece)
            file.read_ahead(place, piece.numel())
            file.read(place, back)
            assert torch.equal(back, piece)
            file.free(place, piece.numel())
    assert file.size_bytes == 10_001
    with pytest.raises(UsageError, match="choose another folder"):
        SpillFile("/dev/null/here")


# -- activations ---------------------------------------------------------------------------------------------


def test_activations_on_disk_change_no_bit_and_leave_nothing(tmp_path: Path) -> None:
    model = _net()
    plain = _gradients(model, 2)
    ActivationOffload(to="disk", folder=str(tmp_path)).apply(model)
    (keeper,) = {vars(block)["forward"].keeper for block in list(model)[:3]}
    assert "forward" not in vars(model[3]), "the last block's stay"
    assert _same(plain, _gradients(model, 2))
    # Of each block: what the second layer and GELU read (the first layer's input is the batch, or the output
    # of the block before it, in a storage of its own).
    assert keeper.file.size_bytes == 3 * 4 * 128 * (64 + 128 + 128)
    gone = weakref.ref(keeper.file._file)
    undo(model)
    del keeper
    assert gone() is None and list(tmp_path.iterdir()) == []


def test_what_moves_can_be_compressed_first(tmp_path: Path) -> None:
    model = _net()
    plain = _gradients(model)
    sizes = {}
    for algorithm in ("none", "exponent-split", "int8"):
        technique = ActivationOffload(to="disk", compression_algorithm=algorithm)
        technique.apply(model)
        keeper = vars(model[0])["forward"].keeper
        file = getattr(keeper, "_keeper", keeper).file
        found = _gradients(model)
        exact = technique.exactness(model) == "exact"
        assert _same(plain, found) if exact else _near(plain, found)
        assert exact == (algorithm != "int8")
        sizes[algorithm] = file.size_bytes
        undo(model)
    assert sizes["int8"] == sizes["none"] * (8 + 0.5) / 32
    assert 0.8 < sizes["exponent-split"] / sizes["none"] < 0.9


def _near(a: list[Tensor], b: list[Tensor]) -> bool:
    x, y = (torch.cat([gradient.view(-1) for gradient in found]) for found in (a, b))
    return 0.0 < float((x - y).norm() / x.norm()) < 0.02


class _Event:
    """When the stream gets to it: the number of its stream's tasks that are before it."""

    def __init__(self, stream: _Stream, end: int) -> None:
        self.stream, self.end = stream, end

    def query(self) -> bool:
        return self.stream.done >= self.end


class _Stream:
    """A made-up stream that runs nothing until somebody waits for it, so that a missing wait is seen."""

    current: _Stream

    def __init__(self, device: Any = None) -> None:
        self.tasks: list[Any] = []
        self.done = 0

    def record_event(self) -> _Event:
        return _Event(self, len(self.tasks))

    def wait_event(self, event: _Event) -> None:
        if self is _Stream.current:
            event.stream.run(event.end)
        else:
            self.tasks.append(lambda: event.stream.run(event.end))

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.tasks[self.done - 1]()


@pytest.fixture
def made_up_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device with streams: copies on side streams run only when they are waited for."""
    real_copy = Tensor.copy_
    side: list[_Stream] = []

    @contextlib.contextmanager
    def on(stream: _Stream) -> Iterator[None]:
        side.append(stream)
        yield
        side.pop()

    def copy(tensor: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not side:
            return real_copy(tensor, source)
        side[-1].tasks.append(lambda: real_copy(tensor, source))
        return tensor

    _Stream.current = _Stream()
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: _Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(Tensor, "copy_", copy)
    monkeypatch.setattr(ToHost, "device_type", "cpu")


@pytest.mark.usefixtures("made_up_streams")
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_copies_to_the_host_and_back_wait_for_what_they_must(ahead: int) -> None:
    """On lazy streams a copy that nobody waits for never runs, and a value used too early is garbage."""
    model = _net()
    plain = _gradients(model, 2)
    keeper = ToHost(64, ahead)
    take_back = keep_in_blocks(list(model.named_children()), keeper, "a keeper")
    for _ in range(2):
        assert _same(plain, _gradients(model, 2))
    assert keeper.pool.slab_count == 1
    model(torch.randn(128, 64))  # a graph that is dropped gives its pieces back
    take_back()
    assert _same(plain, _gradients(model, 2))


@pytest.mark.usefixtures("made_up_streams")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_parameters_come_when_their_block_runs(checkpointed: bool) -> None:
    model = _net()
    plain = _gradients(model, 2)
    train = Train(torch.device("cpu"))
    homes = [parameter.data_ptr() for parameter in model.parameters()]
    for block in model:
        block.forward = VisitingForward(block, train.add(list(block.parameters())))
    if checkpointed:
        memfit.GradientCheckpointing().apply(model)
    assert _same(plain, _gradients(model, 2))
    assert [parameter.data_ptr() for parameter in model.parameters()] == homes
    assert all(car._there is None for car in train.cars), "none is left after the backward pass"


# -- parameters ----------------------------------------------------------------------------------------------


def test_parameters_on_disk_train_the_same(tmp_path: Path) -> None:
    results = []
    for applied in (False, True):
        model = _net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if applied:
            ParameterOffload(to="disk", folder=str(tmp_path)).apply(model, optimizer)
            assert "memfit-parameters" in Path("/proc/self/maps").read_text()
            assert list(tmp_path.iterdir()) == []
        for _ in range(3):
            _gradients(model)
            optimizer.step()
        if applied:
            undo(model)
            assert "memfit-parameters" not in Path("/proc/self/maps").read_text()
        _gradients(model)
        optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert _same(*results)


def test_what_cannot_be_offloaded_is_said() -> None:
    model = _net()
    memfit.GradientCheckpointing().apply(model)
    with pytest.raises(UsageError, match="apply parameter_offload first"):
        ParameterOffload().apply(model)
    undo(model)
    optimizer = torch.optim.AdamW(model.parameters())
    _gradients(model)
    optimizer.step()
    with pytest.raises(UsageError, match="before the first step"):
        ParameterOffload().apply(model, optimizer)
    with pytest.raises(UsageError, match="no parameters of their own"):
        ParameterOffload(blocks=["0.1"]).apply(model)
    for settings, message in (
        ({"to": "tape"}, "host or disk"),
        ({"folder": "x"}, "folder is for to='disk'"),
        ({"blocks": "a"}, "a list of module names"),
    ):
        for kind in (ActivationOffload, ParameterOffload):
            with pytest.raises(UsageError, match=message):
                kind(**settings)
    with pytest.raises(UsageError, match="compression_algorithm is one of none, gzip"):
        ActivationOffload(compression_algorithm="zip")


# -- on the made-up GPU --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def steps() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with (
            Worker(find_gpu("a100-80gb"), preload=("torch",)) as worker,
            worker.session("dry_run_targets:OffloadSteps") as session,
        ):
            yield session


def _settings(technique: Any) -> dict[str, Any]:
    settings: dict[str, Any] = technique.to_settings()
    return settings


@pytest.mark.dryrun
def test_norms_and_pruned_weights_come_and_go_on_a_gpu(steps: Any) -> None:
    """A norm saves its parameter itself, not a view of it; masks are where the weights were."""
    assert steps.call("norms") == ["cpu", "cuda"]


@pytest.mark.dryrun
def test_on_a_gpu_the_peak_falls_and_only_pairs_wait(steps: Any) -> None:
    """12 blocks of 1024, a batch of 4096: each saves two of 16 MiB (its input is the output before it)."""
    plain = steps.call("measure", techniques=[])["peak_bytes"]
    offload = steps.call("measure", techniques=[_settings(ActivationOffload())])
    # The last block's stay, and while one is used, two more are on their way.
    assert plain - offload["peak_bytes"] == pytest.approx((3 * 11 - 4) * 16 * MiB, abs=17 * MiB)
    assert offload["slabs"] == [9], "528 MiB of pieces in slabs of 64 MiB, and none in later steps"
    _check_waits(offload["waits"])
    packed = steps.call(
        "measure", techniques=[_settings(memfit.MemoryCompression(compression_algorithm="int8"))]
    )
    assert plain - packed["peak_bytes"] == pytest.approx(
        (3 * 12 - 1.5) * 16 * MiB * (1 - 8.5 / 32), abs=17 * MiB
    )
    both = [_settings(ParameterOffload()), _settings(ActivationOffload())]
    elsewhere = steps.call("measure", techniques=both)
    assert elsewhere["resting_bytes"] < 34 * MiB, "the batch and what PyTorch itself holds"
    assert elsewhere["peak_bytes"] < 0.55 * offload["peak_bytes"]
    assert (elsewhere["gradients"], elsewhere["devices"]) == (["cpu"], ["cuda"])
    checkpointed = [_settings(ParameterOffload()), _settings(memfit.GradientCheckpointing())]
    assert steps.call("measure", techniques=checkpointed)["resting_bytes"] == elsewhere["resting_bytes"]
    assert steps.call("measure", techniques=[])["peak_bytes"] == pytest.approx(plain, abs=MiB)


def _check_waits(log: list[list[str]]) -> None:
    """Copies run on side streams only; the computation waits for copies back only, and each of those is under
    way before the one that is needed is waited for."""
    out, back = "side 1", "side 2"
    assert {(stream, kind) for what, stream, kind in log if what == "copy"} == {(out, "cpu"), (back, "cuda")}
    copies = [stream for what, stream, _ in log if what == "copy"]
    assert copies == [out] * (len(copies) // 2) + [back] * (len(copies) // 2)
    waits = {(stream, of) for what, stream, of in log if what == "wait"}
    assert waits == {(out, "compute"), (out, "earlier"), (back, "compute"), (back, out), ("compute", back)}
    arrived = used = 0
    for what, stream, of in log:
        arrived += (what, stream) == ("copy", back)
        if (what, stream, of) == ("wait", "compute", back):
            assert arrived >= min(used + 3, len(copies) // 2), "two more are on their way"
            used += 1


def test_the_estimate_is_what_leaves() -> None:
    workload = Workload(
        name="net",
        model=_net,
        batch=lambda: torch.randn(4096, 64),
        loss=lambda m, batch: m(batch).square().mean(),
        optimizer=torch.optim.AdamW,
    )
    graph = capture_step(workload)
    saving = ActivationOffload().estimate(graph, _net())
    one = 4096 * 64 * 4
    assert saving.peak_bytes == pytest.approx(3 * 5 * one, rel=0.25)
    assert "each step moves" in saving.note
    rest = ParameterOffload().estimate(graph, _net())
    numel = sum(p.numel() for p in _net().parameters())
    assert rest.resting_bytes == pytest.approx(3 * 4 * numel - 2 * numel, rel=0.05)
