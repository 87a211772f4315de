"""Saved activations and parameters elsewhere: bitwise on the CPU, in order on streams, in the bytes said."""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import weakref
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import memfit
from memfit.capture import capture_step
from memfit.core.devices import find_gpu
from memfit.core.errors import CannotRunHere, UsageError
from memfit.core.workload import Workload
from memfit.dryrun.worker import Worker
from memfit.techniques import (
    ActivationOffload,
    OffloadedOptimizerState,
    ParameterOffload,
    offload_files,
    undo,
    undo_all,
)
from memfit.techniques.offload_disk import ToDisk
from memfit.techniques.offload_files import _NAMES, MappedFiles, TensorFile
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


def _read(file: TensorFile) -> dict[str, Tensor]:
    """All of it, by the reader of safetensors' own."""
    with safe_open(f"/proc/self/fd/{file.descriptor}", "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if "padding" not in name}  # noqa: SIM118


def test_a_file_of_tensors_is_safetensors_after_each_write(tmp_path: Path) -> None:
    """Types and sizes of all kinds, for safetensors' own reader; no name is in the folder."""
    file = TensorFile(tmp_path / "made", "a test")
    tensors: dict[str, Tensor] = {}
    for number, dtype in enumerate((*_NAMES, torch.complex64)):
        tensors[f"layer.{number}"] = torch.arange(-3, 9).reshape(3, 4).to(dtype)[:, : number % 5]
    tensors |= {"scalar": torch.tensor(2.5), 'strange "name" ü': torch.ones(7)}
    slots = {}
    for name, tensor in tensors.items():
        slots[name] = file.add(name, tensor)
        found = _read(file)
        assert list(found) == sorted(slots, key=list(found).index) and len(found) == len(slots)
        assert torch.equal(found[name], tensor) or tensor.dtype == torch.complex64
    mapped = file.mapped(list(slots.values()), shared=True)
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(mapped, tensors.values(), strict=True)
    )
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in mapped), "each its own"
    mapped[-1].fill_(3)
    assert torch.equal(_read(file)['strange "name" ü'], torch.full((7,), 3.0)), "shared: written to the file"
    (alone,) = file.mapped([slots["scalar"]], shared=False)
    alone.zero_()
    assert float(_read(file)["scalar"]) == 2.5, "not shared: the file stays as it is"
    assert list((tmp_path / "made").iterdir()) == []
    with pytest.raises(UsageError, match="choose another folder"):
        TensorFile("/dev/null/here", "a test")


def test_a_spill_file_uses_ranges_again_when_nothing_reads_them() -> None:
    file = SpillFile()
    data = [torch.randn(size) for size in (5000, 1, 0, 5000)]
    for held_before in (0, 20_000):
        spilled = [file.write(piece) for piece in data]
        for piece, place in zip(data, spilled, strict=True):
            place.read_ahead()
            assert torch.equal(place.read(), piece)
        assert sum(tensor.nbytes for tensor in _read(file.files[0]).values()) == 4 * 10_001 + held_before
        assert file.size_bytes >= 2 * 20_032 + 64, "padded to 64 bytes"
        back = spilled[0].read()[10:]
        del place, spilled
        again = [file.write(piece + 1) for piece in data]
        assert torch.equal(back, data[0][10:]), "what is still read is not written over"
        del again, back
        size = file.size_bytes
    assert file.size_bytes == size, "no larger in the steps after"
    held = file.write(torch.ones(3))
    assert file.size_bytes == 64, "other sizes than before: it begins anew"
    del held


def test_more_tensors_than_a_header_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_files, "HEADER_BYTES", 4096 - 8)
    tensors = [(f"a.long.name.{number}", torch.full((33,), float(number))) for number in range(90)]
    files = MappedFiles(None, "a test")
    assert _same([tensor for _, tensor in tensors], files.add(tensors))
    assert len(files.files) > 2 and sum(len(_read(file)) for file in files.files) == 90
    spill = SpillFile()
    spilled = [spill.write(tensor) for _, tensor in tensors]
    assert _same([tensor for _, tensor in tensors], [place.read() for place in spilled])
    assert len(spill.files) > 2


@pytest.mark.parametrize("kind", [ActivationOffload, ParameterOffload, OffloadedOptimizerState])
def test_a_full_disk_says_which_folder_and_how_many_bytes(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes the header and 10,000 bytes more; what was there stays, and undo works."""
    written = offload_files.os.pwrite

    def pwrite(file: int, data: memoryview, place: int) -> int:
        if place + len(data) > 2**20 + 10_000:
            room = max(2**20 + 10_000 - place, 0)
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = data[:room]
        return written(file, data, place)

    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    plain = _gradients(model)
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(offload_files.os, "pwrite", pwrite)
    with pytest.raises(CannotRunHere, match=r"32,768 bytes more|65,536 bytes more") as caught:
        kind(to="disk", folder=str(tmp_path)).apply(model, optimizer)
        _gradients(model)
        optimizer.step()
    assert str(tmp_path) in str(caught.value) and kind.name in str(caught.value)
    monkeypatch.undo()
    undo_all(model)
    if kind is not OffloadedOptimizerState:
        assert _same(before, [p.detach() for p in model.parameters()]) and _same(plain, _gradients(model))


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
    assert len(_read(keeper.file.files[0])) == 9
    gone = weakref.ref(keeper.file.files[0]._file)
    undo(model)
    del keeper
    assert gone() is None and list(tmp_path.iterdir()) == [] and _in_maps(tmp_path) == 0


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

    def synchronize(self) -> None:
        self.stream.run(self.end)


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


class _AtOnce(Executor):
    """A thread whose tasks run when they are given: the streams of this file are not for threads."""

    def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(task(*args, **kwargs))
        return future


@pytest.mark.usefixtures("made_up_streams")
@pytest.mark.parametrize(("kind", "ahead"), [("host", 0), ("host", 1), ("host", 3), ("disk", 0), ("disk", 2)])
def test_copies_to_the_host_and_back_wait_for_what_they_must(kind: str, ahead: int) -> None:
    """On lazy streams a copy that nobody waits for never runs, and a value used too early is garbage."""
    model = _net()
    plain = _gradients(model, 2)
    keeper = ToHost(64, ahead) if kind == "host" else ToDisk(64, ahead, None)
    if isinstance(keeper, ToDisk):
        keeper._threads = _AtOnce(), _AtOnce()
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


def _in_maps(folder: Path) -> int:
    """How many files of a folder this process has mapped."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def _disk_of(optimizer: torch.optim.Optimizer) -> Any:
    """Where the changed step keeps the state."""
    hooks = optimizer._optimizer_load_state_dict_post_hooks.values()
    (host,) = [hook.__self__ for hook in hooks if hasattr(hook, "__self__")]
    return host._disk


def test_state_on_disk_trains_the_same_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """AdamW and SGD with momentum: state of before, new state, a checkpoint that is loaded, and undo."""
    for kind, extra, keys in ((torch.optim.AdamW, {}, 2), (torch.optim.SGD, {"momentum": 0.9}, 1)):
        results = []
        for applied in (False, True):
            model = _net()
            optimizer = kind(model.parameters(), lr=1e-2, foreach=False, **extra)
            for step in range(5):
                if applied and step == 1:
                    technique = OffloadedOptimizerState(to="disk", folder=str(tmp_path))
                    technique.apply(model, optimizer)
                    assert _in_maps(tmp_path) == 1, "all of it in one mapping"
                if step == 3:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                _gradients(model)
                optimizer.step()
            if applied:
                disk = _disk_of(optimizer)
                found = _read(disk.files.files[0])
                moments = {
                    f"{name}.{key}": value
                    for name, parameter in model.named_parameters()
                    for key, value in optimizer.state[parameter].items()
                    if value.dim()
                }
                assert found.keys() == moments.keys() and len(found) == keys * 16
                assert all(torch.equal(found[name], value) for name, value in moments.items())
                del disk, found, moments
                undo(model)
                assert _in_maps(tmp_path) == 0 and list(tmp_path.iterdir()) == []
            _gradients(model)
            optimizer.step()
            states = [v for state in optimizer.state.values() for v in state.values() if v is not None]
            results.append([p.detach() for p in model.parameters()] + states)
        assert _same(*results)


def test_parameters_on_disk_train_the_same(tmp_path: Path) -> None:
    results = []
    for applied in (False, True):
        model = _net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if applied:
            ParameterOffload(to="disk", folder=str(tmp_path)).apply(model, optimizer)
            assert _in_maps(tmp_path) == 1 and list(tmp_path.iterdir()) == []
        for _ in range(3):
            _gradients(model)
            optimizer.step()
        if applied:
            undo(model)
            assert _in_maps(tmp_path) == 0
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
@pytest.mark.parametrize("checkpointed", [False, True])
def test_frozen_weights_come_and_go_beside_their_adapters(steps: Any, checkpointed: bool) -> None:
    """A checkpointed region keeps the very object of what needs no gradient, which is on the host later."""
    assert steps.call("frozen", checkpointed=checkpointed) == ["cpu", "cuda"]


@pytest.mark.dryrun
def test_on_a_gpu_the_peak_falls_and_only_pairs_wait(steps: Any) -> None:
    """12 blocks of 1024, a batch of 4096: each saves two of 16 MiB (its input is the output before it)."""
    plain = steps.call("measure", techniques=[])["peak_bytes"]
    offload = steps.call("measure", techniques=[_settings(ActivationOffload())])
    # The last block's stay, and while one is used, two more are on their way.
    assert plain - offload["peak_bytes"] == pytest.approx((3 * 11 - 4) * 16 * MiB, abs=17 * MiB)
    assert offload["slabs"] == [9], "528 MiB of pieces in slabs of 64 MiB, and none in later steps"
    _check_waits(offload["waits"])
    disk = steps.call("measure", techniques=[_settings(ActivationOffload(to="disk"))])
    assert disk["peak_bytes"] == pytest.approx(offload["peak_bytes"], abs=MiB)
    waits = {(stream, of) for what, stream, of in disk["waits"] if what == "wait"}
    assert waits <= {(stream, of) for what, stream, of in offload["waits"] if what == "wait"}
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
