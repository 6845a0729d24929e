"""Logged values: reduced over the ranks where that is asked for, and only there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric, Metric, SumMetric

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task, share_of
from nnx_conformance.training import fit

_STEPS = 2


@check(of_adapter=True)
def logs_reduced(bench: Bench) -> None:
    """`self.log(sync_dist=True)` gives the mean, sum, maximum or minimum over all ranks, on every rank.

    A sum counts each share of the data once, also where several ranks work on it.
    """
    for world_size in bench.world_sizes:
        for rank, outcome in enumerate(bench.run_once(_logged, world_size=world_size)):
            expected = _reduced(shares=int(outcome["shares"]))
            _expect_values(outcome, expected, where=f"rank {rank} of {world_size}, sync_dist=True")


def _reduced(*, shares: int) -> dict[str, float]:
    steps, sizes = range(1, _STEPS + 1), range(1, shares + 1)
    values = [step * size for step in steps for size in sizes]
    weighted = sum(step * size * size for step in steps for size in sizes) / sum(sizes) / _STEPS
    return {
        "mean": weighted,  # by batch size
        "sum": sum(values),
        "max": max(values),
        "min": min(values),
        "in_step": _STEPS * sum(sizes) / shares,
    }


@check(of_adapter=True)
def logs_left_alone(bench: Bench) -> None:
    """`self.log(sync_dist=False)` keeps each rank's own value."""
    for rank, outcome in enumerate(bench.run_once(_logged)):
        own = {"own": (outcome["share"] + 1) * sum(range(1, _STEPS + 1))}
        _expect_values(outcome, own, where=f"rank {rank}, sync_dist=False")


@check(of_adapter=True)
def torchmetrics_reduced(bench: Bench) -> None:
    """A torchmetrics metric on the module counts what all ranks saw, wherever it is logged.

    What several ranks of one share of the data saw counts once.
    """
    for rank, outcome in enumerate(bench.run(_measured)):
        shares = range(1, int(outcome["shares"]) + 1)
        values = [step * share for step in range(1, _STEPS + 1) for share in shares]
        expected = {
            "metric_mean": sum(values) / len(values),
            "metric_sum": sum(values),
            "metric_max": max(values),
        }
        _expect_values(outcome, expected, where=f"rank {rank}, torchmetrics")


def _expect_values(seen: Mapping[str, float], expected: Mapping[str, float], *, where: str) -> None:
    for name, wanted in expected.items():
        value = seen.get(name)
        is_close = value is not None and abs(value - wanted) <= 1e-5 * max(1.0, abs(wanted))
        expect(is_close, f"{where}: {name!r} is logged as {value}, expected {wanted:.7g}.")


# ---- what follows runs in the workers ----------------------------------------------------------------


class _Sharing(Plain):
    """Keeps which share of the data it was trained on, apart from what it logs."""

    share: Mapping[str, int]

    def on_train_start(self) -> None:
        super().on_train_start()
        self.share = share_of(self.trainer)


def _metrics_and_share(subject: Subject, model: type[_Sharing]) -> dict[str, float]:
    """What a rank sees as logged, and its ``share`` of so many ``shares`` of the data."""
    task = Task(model=model, steps=_STEPS, batches=_STEPS)
    module = model(task)
    metrics = fit(subject, task, module=module).metrics
    return {**metrics, "share": module.share["rank"], "shares": module.share["num_replicas"]}


class _Logging(_Sharing):
    """Logs a value of its own for each share of the data, from batches of a size of their own."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        size = self.share["rank"] + 1
        value = float(size * (index + 1))
        epoch: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": size}
        self.log("mean", value, sync_dist=True, **epoch)
        self.log("sum", value, sync_dist=True, reduce_fx="sum", **epoch)
        self.log("max", value, sync_dist=True, reduce_fx="max", **epoch)
        self.log("min", value, sync_dist=True, reduce_fx="min", **epoch)
        self.log("own", value, sync_dist=False, reduce_fx="sum", **epoch)
        self.log("in_step", value, sync_dist=True, on_step=True, on_epoch=False)
        return super().training_step(batch, index)


def _logged(subject: Subject) -> dict[str, float]:
    return _metrics_and_share(subject, _Logging)


class _Measuring(_Sharing):
    """Has metrics as submodules."""

    def build(self) -> None:
        super().build()
        self.metrics = torch.nn.ModuleDict({"mean": MeanMetric(), "sum": SumMetric(), "max": MaxMetric()})

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        for name, metric in self.metrics.items():
            assert isinstance(metric, Metric)
            metric.update(torch.tensor(float((self.share["rank"] + 1) * (index + 1)), device=self.device))
            self.log(f"metric_{name}", metric, on_step=False, on_epoch=True)
        return super().training_step(batch, index)


def _measured(subject: Subject) -> dict[str, float]:
    return _metrics_and_share(subject, _Measuring)
