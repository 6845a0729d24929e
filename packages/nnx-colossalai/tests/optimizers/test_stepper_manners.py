"""The stepper's guarantees besides the numbers: waits, order, and errors."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from jobs.colossalai_layers import Layer, Model
from nnx_colossalai.optimizers import FusedAdam
from nnx_colossalai.stepper import OptimizerStepError, Stepper
from nnx_core.errors import OptionError
from nnx_core.optimizers.own_optimizers import OwnOptimizers

pytestmark = pytest.mark.timeout(60)


class Gate(Layer):
    """A chunk whose refresh, the end of its step, waits for a signal, or fails."""

    def __init__(self, index: int, module: nn.Module) -> None:
        super().__init__(index, module)
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def refresh(self) -> None:
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        super().refresh()


class Training:
    """A model of gates, an optimizer and a stepper that overlaps."""

    def __init__(self, optimizer: Any = None, *, overlap: str = "exact") -> None:
        self.model = Model(kind=Gate)
        self.chunks: list[Any] = self.model.chunks
        self.optimizer = (optimizer or torch.optim.SGD)(self.model.parameters(), lr=0.5)
        self.stepper = Stepper(self.chunks, overlap=overlap)  # type: ignore[arg-type]
        self.stepper.setup_optimizers([self.optimizer])

    def step(self) -> Any:
        return self.stepper.step(
            self.optimizer, self.optimizer.step, closure=lambda: self.model.loss_and_backward(0)
        )

    def masters(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.model.parameters()]


@pytest.fixture
def training() -> Iterator[Training]:
    made = Training()
    yield made
    for chunk in made.chunks:
        chunk.open.set()
    made.stepper.close()


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_forward_waits_for_its_own_chunk_only(training: Training) -> None:
    training.chunks[2].open.clear()
    training.step()
    training.chunks[0].use()
    training.chunks[1].use()
    waiting = in_thread(training.chunks[2].use)
    waiting.join(0.1)
    assert waiting.is_alive()
    training.chunks[2].open.set()
    waiting.join(30)
    assert not waiting.is_alive()


def test_chunks_are_stepped_in_the_order_of_the_next_forward(training: Training) -> None:
    order: list[int] = []
    for chunk, index in zip(training.chunks, (3, 0, 2, 1), strict=True):
        chunk.index = index
        chunk.refresh = lambda index=index: order.append(index)
    training.step()
    training.stepper.finish()
    assert order == [0, 1, 2, 3]


def test_only_chunks_with_gradients_are_stepped_and_waited_for(training: Training) -> None:
    training.model.loss_and_backward(0)
    for master in training.chunks[1].masters.values():
        master.grad = None
    next(iter(training.chunks[2].masters.values())).grad = None
    training.stepper.step(training.optimizer, training.optimizer.step)
    assert [chunk.pending is not None for chunk in training.chunks] == [True, False, True, True]
    training.stepper.finish()
    assert [len(chunk.refreshed_in) for chunk in training.chunks] == [1, 0, 1, 1]


def test_letting_gradients_go_does_not_wait_and_filling_them_does(training: Training) -> None:
    training.chunks[3].open.clear()
    training.step()
    filling = in_thread(lambda: training.optimizer.zero_grad(set_to_none=False))
    filling.join(0.1)
    assert filling.is_alive()
    training.chunks[3].open.set()
    filling.join(30)
    assert not filling.is_alive()
    assert all(not p.grad.any() for p in training.model.parameters() if p.grad is not None)

    training.chunks[3].open.clear()
    training.step()
    training.optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert not training.chunks[3].open.is_set()


@pytest.mark.parametrize(("chosen", "kept", "waits"), [(True, False, False), (False, True, True)])
def test_an_optimizer_with_a_default_of_its_own_for_zero_grad_keeps_it(
    chosen: bool, kept: bool, waits: bool
) -> None:
    training = Training(lambda parameters, lr: FusedAdam(parameters, lr=lr, set_grad_none=chosen))
    training.chunks[3].open.clear()
    training.step()
    work = in_thread(training.optimizer.zero_grad)
    work.join(0.1 if waits else 30)
    assert work.is_alive() == waits
    training.chunks[3].open.set()
    work.join(30)
    gradients = [parameter.grad for parameter in training.model.parameters()]
    assert all((gradient is not None) == kept for gradient in gradients)
    training.stepper.close()


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda training: training.model.layers.zero_grad(set_to_none=False),
        lambda training: training.model.parameters()[6].grad.mul_(2),
        lambda training: LightningOptimizer(training.optimizer).zero_grad(set_to_none=False),
        lambda training: nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3),
    ],
)
def test_whoever_overwrites_a_gradient_waits_for_the_step(training: Training, overwrite: Any) -> None:
    training.step()
    training.stepper.finish()
    training.chunks[3].open.clear()
    training.step()
    work = in_thread(lambda: overwrite(training))
    work.join(0.1)
    assert work.is_alive()
    training.chunks[3].open.set()
    work.join(30)
    assert not work.is_alive()
    assert type(training.model.parameters()[6].grad) is Tensor


def test_a_gradient_that_somebody_keeps_can_be_read_after_the_step(training: Training) -> None:
    training.step()
    kept = training.model.parameters()[0].grad
    assert kept is not None
    training.optimizer.zero_grad()
    training.stepper.finish()
    expected = Model()
    expected.loss_and_backward(0)
    assert torch.equal(kept, expected.parameters()[0].grad)  # type: ignore[arg-type]
    assert type(kept) is Tensor


@pytest.mark.parametrize("read", ["state_dict", "load_state_dict"])
def test_reading_and_loading_state_waits(read: str) -> None:
    training = Training(torch.optim.AdamW)
    training.step()
    training.stepper.finish()
    saved = training.optimizer.state_dict()
    training.chunks[0].open.clear()
    training.step()
    work = {
        "state_dict": training.optimizer.state_dict,
        "load_state_dict": lambda: training.optimizer.load_state_dict(saved),
    }
    reading = in_thread(work[read])
    reading.join(0.1)
    assert reading.is_alive()
    training.chunks[0].open.set()
    reading.join(30)
    assert not reading.is_alive()
    training.stepper.close()


def test_gradients_are_freed_when_their_chunk_is_stepped(training: Training) -> None:
    owners: list[weakref.ref[Any]] = []
    for chunk in training.chunks:
        memory = np.ones((8, 8), dtype=np.float32)
        owners.append(weakref.ref(memory))
        chunk.masters[f"{chunk.name}.weight"].grad = torch.from_numpy(memory)
    del memory
    training.chunks[2].open.clear()
    training.stepper.step(training.optimizer, training.optimizer.step)
    training.optimizer.zero_grad()
    training.chunks[1].use()
    assert [owner() is None for owner in owners] == [True, True, False, False]
    training.chunks[2].open.set()
    training.stepper.finish()
    assert [owner() is None for owner in owners] == [True] * 4


def test_the_closure_runs_once_and_its_loss_is_returned(training: Training) -> None:
    calls: list[bool] = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return training.model.loss_and_backward(0)

    loss = training.stepper.step(training.optimizer, training.optimizer.step, closure)
    assert calls == [True]
    assert torch.equal(loss, Model().loss_and_backward(0))


def test_a_closure_that_fails_steps_nothing_and_leaves_the_groups(training: Training) -> None:
    groups, before = training.optimizer.param_groups, training.masters()

    def closure() -> None:
        training.model.loss_and_backward(0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training.stepper.step(training.optimizer, training.optimizer.step, closure)
    assert training.optimizer.param_groups is groups
    training.stepper.finish()
    torch.testing.assert_close(training.masters(), before, rtol=0, atol=0)


@pytest.mark.parametrize("tensor", [False, True])
def test_the_learning_rate_is_that_of_the_step_whatever_a_scheduler_sets_next(tensor: bool) -> None:
    results = []
    for overlap in ("none", "exact"):
        training = Training(overlap=overlap)
        if tensor:
            training.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        training.step()
        training.stepper.finish()
        training.chunks[0].open.clear()
        if overlap == "none":
            training.chunks[0].open.set()
        training.step()
        if tensor:
            training.optimizer.param_groups[0]["lr"].fill_(100.0)
        else:
            training.optimizer.param_groups[0]["lr"] = 100.0
        training.chunks[0].open.set()
        training.stepper.close()
        results.append(training.masters())
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_schedulers_see_the_step_and_hooks_before_it_run_on_the_main_thread(training: Training) -> None:
    seen: list[Any] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append((threading.current_thread(), sum(len(g["params"]) for g in optimizer.param_groups)))

    training.optimizer.register_step_pre_hook(before)
    scheduler = LambdaLR(training.optimizer, lambda step: 0.5**step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.step()
        scheduler.step()
    assert seen == [(threading.main_thread(), 8)]
    assert training.optimizer.param_groups[0]["lr"] == 0.25
    assert any(chunk.pending is not None for chunk in training.chunks)


def test_a_hook_after_the_step_sees_its_result_and_this_is_said_once(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Tensor] = []
    training.optimizer.register_step_post_hook(
        lambda *_: seen.append(training.model.parameters()[0].detach().clone())
    )
    with caplog.at_level(logging.INFO, "nnx.colossalai"):
        training.step()
        first = training.masters()[0]
        training.step()
    assert torch.equal(seen[0], first)
    assert all(chunk.pending is None for chunk in training.chunks)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["SGD does not step in the background: a step hook may look at the result."]


def test_an_engine_that_watches_steps_for_its_own_module_leaves_them_in_the_background(
    training: Training,
) -> None:
    theirs = nn.Linear(2, 1)
    watching = OwnOptimizers(theirs, list, engine="another engine")
    training.step()
    assert all(chunk.pending is not None for chunk in training.chunks)
    watching.remove()


class Own(torch.optim.SGD):
    """An optimizer with a step of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)
        return loss


class Renamed(torch.optim.SGD):
    """An optimizer with torch's step."""


class Replaced(torch.optim.SGD):
    """An optimizer whose step is replaced on the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        inner = self.step
        self.step = lambda closure=None: inner(closure)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "in_background"), [(Renamed, True), (Own, False), (Replaced, False), (torch.optim.LBFGS, False)]
)
def test_only_steps_of_torchs_own_that_go_by_parameter_run_in_the_background(
    kind: type[torch.optim.Optimizer], in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(kind)
    calls: list[None] = []

    def closure() -> Tensor:
        calls.append(None)
        training.optimizer.zero_grad()
        return training.model.loss_and_backward(0)

    with caplog.at_level(logging.INFO, "nnx.colossalai"):
        training.stepper.step(training.optimizer, training.optimizer.step, closure)
    assert (training.chunks[0].pending is not None) == in_background
    training.stepper.close()
    assert len(calls) > 1 if kind is torch.optim.LBFGS else len(calls) == 1
    for chunk in training.chunks:
        for name, master in chunk.masters.items():
            assert torch.equal(chunk.working[name], master.bfloat16())
    assert bool(caplog.records) != in_background


@pytest.mark.parametrize("switch", ["capturable", "differentiable"])
def test_switches_that_look_at_the_result_keep_the_step_on_the_main_thread(switch: str) -> None:
    training = Training(torch.optim.AdamW)
    training.model.loss_and_backward(0)
    training.optimizer.param_groups[0][switch] = True
    if switch == "capturable":  # torch itself refuses it on the CPU
        with pytest.raises((AssertionError, RuntimeError)):
            training.stepper.step(training.optimizer, training.optimizer.step)
    else:
        training.stepper.step(training.optimizer, training.optimizer.step)
    assert all(chunk.pending is None for chunk in training.chunks)


def test_an_optimizer_that_unscales_by_itself_steps_at_once() -> None:
    training = Training(lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    before = training.masters()
    training.model.loss_and_backward(0)
    training.model.parameters()[0].grad.fill_(float("inf"))  # type: ignore[union-attr]
    training.optimizer.step = _through(training)  # type: ignore[method-assign]
    scaler.step(training.optimizer)
    assert all(chunk.pending is None for chunk in training.chunks)
    torch.testing.assert_close(training.masters(), before, rtol=0, atol=0)


def _through(training: Training) -> Any:
    inner = training.optimizer.step
    return lambda *args, **kwargs: training.stepper.step(training.optimizer, inner, *args, **kwargs)


def test_an_error_is_raised_where_the_chunk_is_used_and_only_there(training: Training) -> None:
    before = training.masters()
    training.chunks[1].error = ValueError("no room")
    training.step()
    training.chunks[0].use()
    with pytest.raises(
        OptimizerStepError, match=r"SGD failed to step chunk 'layers.1' .*ValueError: no room"
    ) as e:
        training.chunks[1].use()
    assert isinstance(e.value.__cause__, ValueError)
    with pytest.raises(OptimizerStepError):
        training.chunks[2].use()
    training.stepper.finish()  # it is known already
    after = training.masters()
    assert not torch.equal(after[0], before[0])
    torch.testing.assert_close(after[4:], before[4:], rtol=0, atol=0)


def test_an_error_that_nobody_met_is_raised_at_the_end_and_work_goes_on(training: Training) -> None:
    training.chunks[1].error = ValueError("no room")
    training.step()
    with pytest.raises(OptimizerStepError, match="resume from a checkpoint"):
        training.stepper.finish()
    training.chunks[1].error = None
    for chunk in training.chunks:
        chunk.pending = None
    training.step()
    training.stepper.finish()
    assert training.chunks[3].refreshed_in


def test_a_step_after_a_step_without_a_forward_between_them_sees_its_state() -> None:
    results = []
    for overlap in ("none", "exact"):
        training = Training(torch.optim.AdamW, overlap=overlap)
        training.model.loss_and_backward(0)
        for _ in range(3):
            training.stepper.step(training.optimizer, training.optimizer.step)
        training.stepper.close()
        results.append(training.masters())
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_several_optimizers_share_chunks_and_parameters_may_be_outside_of_them() -> None:
    results = []
    for overlap in ("none", "exact"):
        training = Training(overlap=overlap)
        outside = nn.Parameter(torch.ones(3))
        weights = [p for p in training.model.parameters() if p.dim() == 2]
        biases = [p for p in training.model.parameters() if p.dim() == 1]
        optimizers = [
            torch.optim.Muon(weights, lr=0.1),
            torch.optim.AdamW([*biases, outside], lr=0.1),
        ]
        training.stepper.setup_optimizers(optimizers)
        for step in range(4):
            training.model.loss_and_backward(step)
            outside.grad = outside.detach() * 2
            for optimizer in optimizers:
                training.stepper.step(optimizer, optimizer.step)
            for optimizer in optimizers:
                optimizer.zero_grad()
        training.stepper.close()
        results.append([*training.masters(), outside.detach()])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert not torch.equal(results[0][-1], torch.ones(3))


def test_closing_ends_the_thread_and_leaves_the_optimizer_as_it_came(training: Training) -> None:
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("nnx-optimizer-step")]

    before = threads()
    training.step()
    assert len(threads()) == len(before) + 1
    training.stepper.close()
    assert threads() == before
    assert not training.optimizer._optimizer_load_state_dict_pre_hooks
    assert not training.optimizer._optimizer_state_dict_pre_hooks
    training.step()  # a closed stepper may be used again
    training.stepper.close()


@pytest.mark.parametrize(("name", "value"), [("overlap", "jit"), ("cpu_adam", "intel")])
def test_unknown_choices_are_refused(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"{name}='{value}' is not allowed"):
        Stepper([], **{name: value})  # type: ignore[arg-type]


def test_deepspeed_that_is_not_installed_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    with pytest.raises(OptionError, match=r"pip install nnx-colossalai\[deepspeed\]"):
        Stepper([], cpu_adam="deepspeed")
