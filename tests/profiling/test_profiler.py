"""The profiler's bytes against arithmetic and the captured step; and that it leaves nothing behind."""

from __future__ import annotations

import doctest
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizer_hooks
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack
from torch.utils.checkpoint import checkpoint

from memfit import MemoryProfiler, UsageError, Workload
from memfit.capture.step import build_step
from memfit.capture.tracker import StepTracker
from memfit.profiling import profiler as profiler_module
from memfit.reports.profile import profile_text
from memfit.reports.text import to_text

BATCH, WIDTH, HIDDEN, OUT = 32, 64, 128, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, OUT, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class Residual(nn.Module):
    """Gradients meet at its inputs, and are added in place."""

    def __init__(self, layers=3, recompute=False):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(layers)
        )
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


def train(model, steps=3, profiler=None, optimizer=torch.optim.SGD):
    own = optimizer(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        own.step()
        own.zero_grad()
    return own


def profiled(model, **settings):
    optimizer = settings.pop("optimizer", torch.optim.SGD)
    profiler = MemoryProfiler(
        device="cpu", profiling_frequency=settings.pop("profiling_frequency", 1), **settings
    )
    with profiler:
        train(model, optimizer=optimizer)
    return profiler


def test_bytes_are_those_of_arithmetic():
    profiler = profiled(Net(), optimizer=torch.optim.AdamW)
    parameters = 4 * (WIDTH * HIDDEN + HIDDEN * OUT)
    second = profiler.profile().steps[1]
    assert second.peak_by["category"]["parameter"] == parameters
    assert second.peak_by["category"]["gradient"] == parameters
    assert second.peak_by["category"]["optimizer_state"] == 2 * parameters + 2 * 4  # and two step counters
    # The forward is highest in relu, whose input and result are both there.
    assert second.peak_by_phase["forward"] == 3 * parameters + 8 + 4 * BATCH * (WIDTH + 2 * HIDDEN)
    # The optimizer's own temporaries at the peak: two of the size of the largest parameter.
    assert second.peak_bytes == 4 * parameters + 8 + 2 * 4 * WIDTH * HIDDEN


def workload(model):
    return Workload(
        name="net",
        model=model,
        batch=lambda: torch.randn(BATCH, WIDTH),
        loss=lambda net, batch: net(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    )


@pytest.mark.parametrize("model", [Net, Residual, lambda: Residual(recompute=True)])
def test_equals_the_captured_step(model):
    step = build_step(workload(model), device="cpu")
    for _ in range(2):
        step.run()
    profiler = MemoryProfiler(device="cpu", profiling_frequency=1, model=step.model)
    gc.disable()
    try:
        with profiler:
            step.run()
        graph = StepTracker(step).run()
    finally:
        gc.enable()
    found = profiler.profile().steps[0]
    assert found.peak_bytes == graph.peak_bytes
    expected = graph.phase_peaks()
    assert {phase: found.peak_by_phase[phase] for phase in expected if phase != "other"} == {
        phase: size for phase, size in expected.items() if phase != "other"
    }
    assert {
        k: v for k, v in found.peak_by["category"].items() if k not in ("input", "activation", "temporary")
    } == {k: v for k, v in graph.by_category().items() if k not in ("input", "activation", "temporary")}


def test_modules_operators_and_lines_of_both_passes():
    model = Residual(recompute=True)
    trace = profiled(model).profile().trace
    events = [event for event in trace if event.action.name == "ALLOC"]
    linear = [event for event in events if event.op == "aten.addmm.default" and event.module == "layers.1.1"]
    assert {event.phase for event in linear} == {"forward", "recompute"}
    line = Residual.forward.__code__.co_firstlineno + 2
    forward = [event for event in linear if event.phase == "forward"]
    assert {event.where for event in forward} == {f"{__file__.removeprefix(_here())}:{line} forward"}
    gelu = [event for event in events if event.op == "aten.gelu_backward.default"]
    assert {event.module for event in gelu} == {"layers.0.2", "layers.1.2", "layers.2.2"}
    plain = profiled(Residual()).profile().trace
    gelu = [
        event for event in plain if event.action.name == "ALLOC" and event.op == "aten.gelu_backward.default"
    ]
    assert {event.module for event in gelu} == {"layers.0.2", "layers.1.2", "layers.2.2"}
    assert all(event.where.endswith(f":{line} forward") for event in gelu)


def _here():
    import os

    return os.getcwd() + os.sep


def test_which_steps_are_detailed():
    profiler = MemoryProfiler(device="cpu", profiling_frequency=4)
    profiler.start_profiling()
    train(Net(), steps=10)
    profile = profiler.stop_profiling()
    assert [step.number for step in profile.steps] == list(range(10))
    assert [step.number for step in profile.detailed_steps] == [0, 1, 4, 8]
    assert all(step.seconds is not None and step.seconds > 0 for step in profile.steps)
    profiler.start_profiling()  # goes on
    train(Net(), steps=3)
    assert [step.number for step in profiler.stop_profiling().detailed_steps] == [0, 1, 4, 8, 12]


def test_steps_marked_by_hand():
    model, profiler = Net(), MemoryProfiler(device="cpu", profiling_frequency=1)
    with profiler:
        for _ in range(3):
            model(torch.randn(BATCH, WIDTH))
            profiler.step()
        train(model, steps=5)  # no step of the optimizer's counts any more
    assert len(profiler.profile().steps) == 4


def test_a_decorated_function():
    profiler = MemoryProfiler(device="cpu", profiling_frequency=1)

    @profiler
    def make(count):
        return torch.ones(count).sum().item()

    assert make(1 << 18) == 1 << 18
    assert make(1 << 16) == 1 << 16
    assert [step.peak_bytes >> 18 for step in profiler.profile().steps] == [4, 1]
    assert "4 of them" not in str(profiler.get_memory_usage())


def test_what_is_kept_from_step_to_step_shows():
    profiler, kept, model = MemoryProfiler(device="cpu", profiling_frequency=1), [], Net()
    optimizer = torch.optim.SGD(model.parameters())
    with profiler:
        for _ in range(4):
            kept.append(torch.ones(1 << 16))
            model(torch.randn(BATCH, WIDTH)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    growth = [step.end_bytes for step in profiler.profile().steps]
    assert [b - a for a, b in zip(growth, growth[1:], strict=False)] == [1 << 18] * 3
    site = next(iter(profiler.profile().steps[-1].end_by_site))
    assert site.startswith(__file__.removeprefix(_here())) and site.endswith("shows")


def test_training_is_not_changed_and_nothing_is_left_behind():
    results = []
    for under in (False, True):
        torch.manual_seed(0)
        model = Residual()
        if under:
            profiled(model, optimizer=torch.optim.AdamW)
        else:
            train(model, optimizer=torch.optim.AdamW)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert _len_torch_dispatch_stack() == 0
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert (
        not optimizer_hooks._global_optimizer_pre_hooks and not optimizer_hooks._global_optimizer_post_hooks
    )


def test_second_derivatives_and_modes_of_others_do_no_harm():
    model, profiler = Net(), MemoryProfiler(device="cpu", profiling_frequency=1)

    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    other = Other()
    with profiler:
        x = torch.randn(BATCH, WIDTH, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        other.__enter__()
        profiler.step()  # its own mode lies below the other's now
        model(x)
        other.__exit__(None, None, None)
    model(x)
    assert len(profiler.profile().steps) == 2
    while _len_torch_dispatch_stack():
        torch.utils._python_dispatch._pop_mode()


def test_the_parts_of_a_tensor_subclass_are_counted():
    with MemoryProfiler(device="cpu") as profiler:
        both = TwoTensor(torch.ones(1 << 16), torch.ones(1 << 16))
        twice = both * 2
    assert profiler.profile().peak_bytes == 4 * (4 << 16)
    assert twice.shape == both.shape


def test_a_compiled_model_is_profiled_as_the_plain_one():
    peaks = []
    for compiled in (False, True):
        model = Net()
        run = torch.compile(model, backend="aot_eager") if compiled else model
        train(run, steps=1)
        with MemoryProfiler(device="cpu", profiling_frequency=1) as profiler:
            train(run, steps=2)
        trace = profiler.profile().trace
        assert {"up", "down"} <= set(trace.strings) and not any("_orig_mod" in text for text in trace.strings)
        peaks.append([step.peak_bytes for step in profiler.profile().steps])
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"profiling_frequency": 0}, "profiling_frequency=0: give a whole number"),
        ({"profiling_frequency": True}, "profiling_frequency=True"),
        ({"device": "tpu"}, "device='tpu': the profiler knows cpu and cuda"),
    ],
)
def test_impossible_settings(settings, said):
    with pytest.raises(UsageError, match=said):
        MemoryProfiler(**settings)


def test_out_of_order():
    profiler = MemoryProfiler(device="cpu")
    with pytest.raises(UsageError, match=r"start_profiling\(\) comes first"):
        profiler.stop_profiling()
    with pytest.raises(UsageError, match="comes before step"):
        profiler.step()
    profiler.start_profiling()
    with pytest.raises(UsageError, match="running already"):
        profiler.start_profiling()
    assert profiler.is_profiling
    profiler.stop_profiling()
    with pytest.raises(UsageError, match="only CUDA's allocator has a history"):
        MemoryProfiler(device="cpu", allocator_history=True).start_profiling()


def test_usage_prints_well():
    usage = profiled(Net(), optimizer=torch.optim.AdamW).get_memory_usage()
    text, page = str(usage), usage._repr_html_()
    assert text.startswith("CPU memory of tensors: ") and "3 steps, 3 of them in detail" in text
    for heading in ("By category", "By module", "By operator", "By line", "Highest in each phase"):
        assert heading in text and heading in page
    assert sum(usage.by_category.values()) == sum(usage.by_module.values()) == usage.peak_bytes
    assert usage.to_json()["step"]["peak_by"]["op"] == dict(usage.by_operator)
    assert usage.by_phase["optimizer"] == usage.peak_bytes
    assert list(usage.by_line)[0].endswith("train")


def test_a_profile_as_text():
    text = to_text(profile_text(profiled(Net()).profile(), exit_code=3))
    assert text.startswith("The script failed with exit code 3.")
    assert "By operator, at the peak" in text and "Detailed steps" in text and "peaks  ███" in text


def test_the_docstring():
    assert doctest.testmod(profiler_module).attempted
