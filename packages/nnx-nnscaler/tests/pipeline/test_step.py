"""The contents of a traced step, and the reasons against tracing a step."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.ir.placement import P
from nnx_nnscaler.pipeline.microbatches import cut_batch
from nnx_nnscaler.pipeline.search import loss_of
from nnx_nnscaler.pipeline.training_step import TrainingStep
from nnx_nnscaler.trace import TraceError, trace_forward

SEEN: list[Tensor] = []
COUNT = 0
log = logging.getLogger(__name__)


class Meter:
    """An average as users keep it beside a model."""

    def __init__(self) -> None:
        self.last: deque[Tensor] = deque(maxlen=3)

    def update(self, value: Tensor) -> None:
        self.last.append(value.detach())


class Clock:
    def seconds(self) -> float:
        return time.perf_counter()


class Classifier(LightningModule):
    """Its step is a function of the test's."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(4, 3), nn.Linear(4, 3)
        self.meter, self.clock, self.values = Meter(), Clock(), [1.0]
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.step(self, batch, index)


def traced(step: Callable[..., Any], *more: Any) -> Graph:
    forwards: Any = SimpleNamespace(own_forward=nullcontext)
    batch = (torch.randn(8, 4), torch.randint(3, (8,)), *more)
    return trace_forward(TrainingStep(Classifier(step), forwards), (batch, ...), {}, strict=True)


def loss(module: Any, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def test_the_loss_and_logged_values_are_outputs() -> None:
    def step(module: Any, batch: Any, index: int) -> Any:
        scores = module(batch[0])
        found = F.cross_entropy(scores, batch[1])
        module.log("loss", found, prog_bar=True, batch_size=batch[0].shape[0])
        module.log_dict({"accuracy": (scores.argmax(-1) == batch[1]).float().mean()}, reduce_fx=torch.max)
        return {"loss": found, "scores": scores.detach()}

    graph = traced(step)
    cut = cut_batch(graph)
    first, second = graph.outputs["logged"]
    assert loss_of(graph, cut) == first["value"].name == graph.outputs["returned"]["loss"].name
    assert first["options"]["batch_size"].expr == "B"
    assert (second["name"], second["options"]["reduce_fx"]) == ("accuracy", "max")
    assert cut.placements[second["value"].name] == P
    assert set(graph.parameters.values()) == {"module.layer.weight", "module.layer.bias"}


def test_indices_and_texts_that_are_not_looked_at_do_not_matter() -> None:
    def step(module: Any, batch: Any, index: int) -> Any:
        x, y, _path, _weight = batch
        return loss(module, (x, y)) if index is not None else None

    assert len(traced(step, ..., ...).ops) > 1


def adds_to_a_list(module: Any, batch: Any, index: int) -> Any:
    module.values.append(loss(module, batch).detach())
    return loss(module, batch)


def adds_to_a_meter(module: Any, batch: Any, index: int) -> Any:
    found = loss(module, batch)
    module.meter.update(found)
    return found


def adds_to_a_global(module: Any, batch: Any, index: int) -> Any:
    SEEN.append(batch[0])
    return loss(module, batch)


def counts(module: Any, batch: Any, index: int) -> Any:
    global COUNT
    COUNT += 1
    return loss(module, batch)


def seeds(module: Any, batch: Any, index: int) -> Any:
    torch.manual_seed(1)
    return loss(module, batch)


def draws(module: Any, batch: Any, index: int) -> Any:
    return loss(module, batch) * random.random()


def takes_time(module: Any, batch: Any, index: int) -> Any:
    start = time.time()
    return loss(module, batch) + 0 * start


def takes_time_elsewhere(module: Any, batch: Any, index: int) -> Any:
    return loss(module, batch) * module.clock.seconds()


def tells(module: Any, batch: Any, index: int) -> Any:
    log.info("a step")
    return loss(module, batch)


def differentiates(module: Any, batch: Any, index: int) -> Any:
    found = loss(module, batch)
    (gradient,) = torch.autograd.grad(found, module.layer.weight, create_graph=True)
    return found + gradient.square().sum()


def imports(module: Any, batch: Any, index: int) -> Any:
    import os

    return loss(module, batch) * os.getpid()


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda m, b, i: loss(m, b) * (i + 1), "reads its batch index"),
        (lambda m, b, i: loss(m, b) * (2 if i == 0 else 1), "reads its batch index"),
        (lambda m, b, i: loss(m, b) * (2 if isinstance(i, int) else 1), "reads its batch index"),
        (lambda m, b, i: loss(m, b).item(), "values of a tensor|returns no loss"),
        (lambda m, b, i: None, "returns no loss"),
        (lambda m, b, i: {"loss": loss(m, b), "n": 3}, "other results than tensors"),
        (lambda m, b, i: m.log("rate", 0.1) or loss(m, b), "logs 'rate', which is no tensor"),
        (lambda m, b, i: m.log("x", loss(m, b), reduce_fx=len) or loss(m, b), "reduce_fx"),
        (lambda m, b, i: print("x") or loss(m, b), "prints"),
        (lambda m, b, i: m.optimizers() and loss(m, b), "not attached to a `Trainer`"),
        (adds_to_a_list, "changes its attribute 'values'"),
        (adds_to_a_meter, "changes its attribute 'meter'"),
        (adds_to_a_global, "changes its attribute 'SEEN'"),
        (counts, "changes its attribute 'COUNT'"),
        (seeds, "seeds torch's"),
        (draws, "random"),
        (takes_time, "takes_time .* uses 'time'"),
        (takes_time_elsewhere, "Clock.seconds .* uses 'time'"),
        (tells, "uses 'log', of logging"),
        (imports, "uses 'os'"),
        (differentiates, "takes gradients itself"),
    ],
)
def test_what_a_program_could_not_repeat_is_named(step: Callable[..., Any], reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        traced(step)
    assert not SEEN
    assert COUNT == 0
