"""Lightning's callbacks that keep an averaged copy of the model."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_same_run
from nnx_conformance.subject import Subject
from nnx_conformance.task import Outcome, Task
from nnx_conformance.training import fit

_TOLERANCE = TOLERANCE["float32"]


@check()
def weight_averaging(bench: Bench) -> None:
    """WeightAveraging validates with, and leaves, the averaged weights that it has in one process."""
    _compare(bench, "WeightAveraging")


@check()
def ema_weight_averaging(bench: Bench) -> None:
    """EMAWeightAveraging validates with, and leaves, the averaged weights that it has in one process."""
    _compare(bench, "EMAWeightAveraging")


@check()
def stochastic_weight_averaging(bench: Bench) -> None:
    """StochasticWeightAveraging anneals rates and leaves the averaged weights that it has in one process."""
    _compare(bench, "StochasticWeightAveraging")


def _compare(bench: Bench, which: str) -> None:
    alone = bench.alone(_averaged_by, which)
    ranks = bench.run(_averaged_by, which)
    expect_same_run(ranks, alone, tolerance=_TOLERANCE, what=which)
    for rank, outcome in enumerate(ranks):
        seen, expected = outcome.metrics["val_loss"], alone.metrics["val_loss"]
        expect(
            abs(seen - expected) <= _TOLERANCE,
            f"{which}, rank {rank}: val_loss is {seen:.7g}, one process has {expected:.7g}.",
        )


# ---- what follows runs in the workers ----------------------------------------------------------------


def _averaged_by(subject: Subject, which: str) -> Outcome:
    makers: dict[str, Callable[[], Callback]] = {
        "WeightAveraging": WeightAveraging,
        "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.7),
        "StochasticWeightAveraging": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1),
    }
    return fit(
        subject, Task(batches=2), callbacks=[makers[which]()], max_steps=-1, max_epochs=3, limit_val_batches=1
    )
