"""The stepper over chunks in host memory: its numbers against a plain optimizer, and its threads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from jobs.colossalai_layers import Layer, Model
from nnx_colossalai.optimizers import HybridAdam
from nnx_colossalai.plan.spec import Tier
from nnx_colossalai.stepper import Background, Share, Stepper

pytestmark = pytest.mark.timeout(60)

Make = Callable[[list[nn.Parameter]], Optimizer]


def train(make: Make, *, overlap: str | None, steps: int = 6, delays: int | None = None) -> dict[str, Any]:
    """Train; without `overlap` the optimizer steps by itself, and the copies are made after it."""
    draw = None if delays is None else random.Random(delays)
    model = Model(partial(Layer, delays=draw))
    optimizer = make(model.parameters())
    stepper = None if overlap is None else Stepper(model.chunks, overlap=overlap)  # type: ignore[arg-type]
    if stepper is not None:
        stepper.setup_optimizers([optimizer])
    losses = []
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            loss = model.loss_and_backward(step)
            return loss

        if stepper is None:
            losses.append(optimizer.step(closure))
            for chunk in model.chunks:
                chunk.refresh()
        else:
            losses.append(stepper.step(optimizer, optimizer.step, closure))
        optimizer.zero_grad()
    if stepper is not None:
        stepper.finish()
    state = optimizer.state_dict()["state"]
    if stepper is not None:
        stepper.close()
    return {
        "losses": losses,
        "masters": [p.detach().clone() for p in model.parameters()],
        "working": [w for chunk in model.chunks for w in chunk.working.values()],
        "state": state,
        "threads": {name for chunk in model.chunks for name in chunk.refreshed_in},
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in ("losses", "masters", "working"):
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
    assert one["state"].keys() == other["state"].keys()
    for index, entries in one["state"].items():
        assert entries.keys() == other["state"][index].keys()
        for name, value in entries.items():
            torch.testing.assert_close(value, other["state"][index][name], rtol=0, atol=0)


def two_groups(parameters: list[nn.Parameter]) -> Optimizer:
    weights = [p for p in parameters if p.dim() > 1]
    biases = [p for p in parameters if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 3e-3}]
    return torch.optim.AdamW(groups, fused=True)


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
    "hybrid": lambda p: _fused(HybridAdam(p, lr=1e-2, weight_decay=0.1)),
    "two_groups": two_groups,
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
}


def _fused(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        group["fused"] = True
    return optimizer


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("overlap", ["none", "exact"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_ends_at_the_bits_of_its_own_step(name: str, overlap: str) -> None:
    trained = train(OPTIMIZERS[name], overlap=overlap)
    assert_same(trained, train(OPTIMIZERS[name], overlap=None))
    in_background = {thread.startswith("nnx-optimizer-step") for thread in trained["threads"]}
    assert in_background == {overlap == "exact"}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("seed", range(5))
def test_random_delays_change_nothing(seed: int) -> None:
    assert_same(
        train(two_groups, overlap="exact", delays=seed, steps=10), train(two_groups, overlap=None, steps=10)
    )


# --- where a step runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [Tier.GATHERED, Tier.SHARDED])
def test_a_chunk_whose_masters_lie_on_the_device_is_stepped_at_once(tier: Tier) -> None:
    models = [Model(Layer), Model(Layer)]
    for chunk in models[0].chunks[::2]:
        chunk.tier = tier
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    stepper = Stepper(models[0].chunks, overlap="exact")
    for step in range(3):
        for model in models:
            model.loss_and_backward(step)
        stepper.step(optimizers[0], optimizers[0].step)
        optimizers[1].step()
        for chunk in models[1].chunks:
            chunk.refresh()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for chunk in models[0].chunks:
            if chunk.pending is not None:
                chunk.pending()
    stepper.finish()
    stepper.close()
    for chunk in models[0].chunks:
        in_background = {name.startswith("nnx-optimizer-step") for name in chunk.refreshed_in}
        assert in_background == {chunk.tier.steps_on_host}
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


class Chunk:
    """Nobody waits for it."""

    name = "layer"

    def set_pending(self, wait: Any) -> None:
        """There is nothing to show."""


def asked_in_a_step(background: Background, question: Callable[[], Any]) -> Any:
    """Return the answer to a question that is asked within a step in the background."""
    answers = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    background.submit(optimizer, [Share(Chunk())], lambda *_: answers.append(question()))  # type: ignore[arg-type]
    background.finish()
    background.close()
    (answer,) = answers
    return answer


@pytest.fixture
def twelve_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    yield
    torch.set_num_threads(before)  # of threads that begin later, too


@pytest.mark.usefixtures("twelve_cores")
def test_a_step_has_its_share_of_the_cores_where_torchrun_left_it_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_num_threads(1)
    environment = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO", logger="nnx.colossalai"):
        assert asked_in_a_step(Background(), torch.get_num_threads) == 3
    assert torch.get_num_threads() == 1, "forward and backward are the user's business"
    assert [line for line in caplog.messages if "use 3 threads" in line]


@pytest.mark.usefixtures("twelve_cores")
@pytest.mark.parametrize("other", [{"OMP_NUM_THREADS": "2"}, {"TORCHELASTIC_RUN_ID": None}], ids=str)
def test_threads_that_the_user_has_chosen_stay(
    other: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    for name, value in {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", **other}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert asked_in_a_step(Background(), torch.get_num_threads) == 2


def test_a_step_runs_in_the_stream_in_which_it_was_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextmanager
    def stream(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.remove(name)

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the user's")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    assert asked_in_a_step(Background(torch.device("cuda", 0)), lambda: list(entered)) == ["the user's"]
    assert entered == []
