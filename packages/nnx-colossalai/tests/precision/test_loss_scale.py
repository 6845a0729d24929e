"""The loss scale on recorded overflows, against a second implementation of the historical rule."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nnx_colossalai.loss_scale import DynamicLossScaler, LossScaleRule
from nnx_core.errors import OptionError
from nnx_core.optimizers.gradients import ParallelGradScaler, gradients_of

Settings = dict[str, Any]

SHORT: Settings = {"initial_scale": 2.0**8, "min_scale": 2.0**3, "max_scale": 2.0**12, "growth_interval": 4}
SETTINGS = [
    {},
    SHORT,
    {**SHORT, "hysteresis": 1},
    {**SHORT, "hysteresis": 5},
    {**SHORT, "growth_factor": 4.0, "backoff_factor": 0.25},
    {**SHORT, "growth_interval": 1, "hysteresis": 3},
]
RECORDED = [
    "..............",
    "x.............",
    "xx............",
    "xx.x.x....x..x",
    "x...x...x...x....xx....xxxxxxxxxxxxxxx.................................",
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "." * 60,
]


def backend() -> Any:
    """A stand-in for a scaler's backend: its device, and the gradients."""
    return SimpleNamespace(
        context=SimpleNamespace(device=torch.device("cpu")),
        gradients=lambda optimizer: gradients_of(optimizer, world_size=1),
    )


def historical(steps: Iterable[bool], settings: Settings) -> list[float]:
    """The rule as `facts/colossalai.md` 2.6 states it, as one loop."""
    rule = {
        "initial_scale": 2.0**16, "min_scale": 1.0, "max_scale": 2.0**32, "growth_factor": 2.0,
        "backoff_factor": 0.5, "growth_interval": 1000, "hysteresis": 2, **settings,
    }  # fmt: skip
    scale, hysteresis_step, growth_step, trace = rule["initial_scale"], 0, 0, []
    for overflow in steps:
        if overflow:
            hysteresis_step += 1
            growth_step = 0
            if hysteresis_step >= rule["hysteresis"]:
                scale *= rule["backoff_factor"]
                if scale < rule["min_scale"]:
                    scale = rule["min_scale"]
        else:
            growth_step += 1
            if growth_step == rule["growth_interval"]:
                growth_step = 0
                hysteresis_step = 0
                scale *= rule["growth_factor"]
                if scale > rule["max_scale"]:
                    scale = rule["max_scale"]
        trace.append(scale)
    return trace


class Run:
    """A parameter that is trained with a scaler, whose gradient overflows on request."""

    def __init__(self, settings: Settings) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.scaler = DynamicLossScaler(backend(), LossScaleRule(**settings))

    def step(self, overflow: bool) -> float:
        factor = float("inf") if overflow else 1.0
        self.optimizer.zero_grad()
        self.scaler.scale((self.weight * factor).sum()).backward()
        before = self.weight.detach().clone()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert torch.equal(before, self.weight) == overflow  # a step with overflow is skipped
        return float(self.scaler.get_scale())


def recorded(text: str) -> list[bool]:
    return [mark == "x" for mark in text]


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("steps", RECORDED)
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_scale_follows_the_historical_rule(settings: Settings, steps: str) -> None:
    run = Run(settings)
    assert [run.step(overflow) for overflow in recorded(steps)] == historical(recorded(steps), settings)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("seed", range(4))
def test_the_scale_follows_the_historical_rule_on_random_overflows(seed: int) -> None:
    draw = random.Random(seed)
    steps = [draw.random() < draw.choice((0.05, 0.5)) for _ in range(300)]
    run = Run(SHORT)
    assert [run.step(overflow) for overflow in steps] == historical(steps, SHORT)


@pytest.mark.quick(every=7)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("at", [0, 1, 2, 5, 9, 23])
def test_the_scale_goes_on_exactly_after_a_resume(settings: Settings, at: int) -> None:
    steps = recorded(RECORDED[4])
    first, second = Run(settings), Run({})
    trace = [first.step(overflow) for overflow in steps[:at]]
    second.scaler.load_state_dict(first.scaler.state_dict())
    trace += [second.step(overflow) for overflow in steps[at:]]
    assert trace == historical(steps, settings)
    assert second.scaler.rule.hysteresis == first.scaler.rule.hysteresis


def test_a_state_is_loaded_in_the_middle_of_a_run_too() -> None:
    first, second = Run(SHORT), Run(SHORT)
    steps = recorded("x.x.")
    trace = [first.step(overflow) for overflow in steps]
    for overflow in recorded("xxxx...."):
        second.step(overflow)
    second.scaler.load_state_dict(first.scaler.state_dict())
    more = recorded("x......x")
    trace += [second.step(overflow) for overflow in more]
    assert trace == historical(steps + more, SHORT)


def test_torchs_scaler_and_ours_load_each_others_state() -> None:
    ours = Run(SHORT)
    for overflow in recorded("xx."):
        ours.step(overflow)
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(ours.scaler.state_dict())
    assert torchs.get_scale() == ours.scaler.get_scale() == 2.0**7
    assert torchs.get_growth_interval() == 4

    back = Run({**SHORT, "hysteresis": 3})
    back.step(True)
    back.scaler.load_state_dict(torchs.state_dict())
    assert back.scaler.get_scale() == 2.0**7
    assert back.scaler.state_dict()["_hysteresis_tracker"] == 0
    assert back.scaler.rule.hysteresis == 3


@pytest.mark.parametrize(("theirs", "kept"), [(2.0**20, 2.0**12), (0.5, 2.0**3), (2.0**9, 2.0**9)])
def test_a_scale_that_another_scaler_left_is_brought_within_bounds(theirs: float, kept: float) -> None:
    run = Run(SHORT)
    run.step(False)
    run.scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=theirs).state_dict())
    assert run.scaler.get_scale() == kept


def test_a_scale_that_is_set_is_taken_and_setters_count() -> None:
    run = Run(SHORT)
    run.step(False)
    run.scaler.update(64.0)
    assert run.scaler.get_scale() == 64.0
    run.scaler.set_growth_interval(1)
    run.scaler.set_growth_factor(8.0)
    assert run.step(False) == 512.0
    run.scaler.set_backoff_factor(0.25)
    assert [run.step(True), run.step(True)] == [512.0, 128.0]


def test_it_is_what_the_core_takes_for_its_own_and_can_be_off() -> None:
    scaler = DynamicLossScaler(backend(), LossScaleRule(), enabled=False)
    assert isinstance(scaler, ParallelGradScaler)
    scaler.update()
    scaler.load_state_dict({})
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0
    assert scaler.rule == LossScaleRule()


def test_a_scaler_of_torchs_that_is_off_is_off_in_the_cores_as_well() -> None:
    scaler = ParallelGradScaler(
        backend().gradients, torch.device("cpu"), replaces=torch.amp.GradScaler("cpu", enabled=False)
    )
    assert not scaler.is_enabled()
    assert scaler.scale(torch.ones(())) == 1.0


def test_updating_before_any_gradient_was_seen_is_an_error() -> None:
    scaler = DynamicLossScaler(backend(), LossScaleRule())
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="before unscale_"):
        scaler.update()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"min_scale": 0.0}, "min_scale=0.0 is not positive"),
        ({"initial_scale": 0.5}, "min_scale=1.0, initial_scale=0.5, max_scale"),
        ({"initial_scale": 2.0**40}, "not in this order"),
        ({"max_scale": float("inf")}, "not in this order"),
        ({"growth_factor": 1.0}, "growth_factor=1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"hysteresis": 0}, "hysteresis=0"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(settings: Settings, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        LossScaleRule(**settings)
