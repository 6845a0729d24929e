"""Parameters: their shapes, which of them are shared, and which are trained."""

from __future__ import annotations

from nnx_conformance import structure_jobs as jobs
from nnx_conformance import structure_models as models
from nnx_conformance.check import TOLERANCE, Bench, check, expect, expect_same_run
from nnx_conformance.checks.structure.training import trains
from nnx_conformance.task import Task


@check()
def uneven_dimensions(bench: Bench) -> None:
    """Dimensions may be prime, one, or smaller than the number of ranks."""
    alone = bench.train_alone(Task(model=models.Uneven))
    for world_size in (2, 3):
        ranks = bench.train(Task(model=models.Uneven), world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"], what=f"{world_size} ranks")


@check()
def scalar_parameters(bench: Bench) -> None:
    """Parameters may have no dimension or one element, and belong to the root itself."""
    trains(bench, models.Scalars)


@check()
def empty_parameters(bench: Bench) -> None:
    """Parameters may have no elements."""
    trains(bench, models.Empty)


@check()
def strided_parameters(bench: Bench) -> None:
    """Parameters may lie in memory in another order, as with channels last."""
    trains(bench, models.Strided)


@check("mixed_dtypes")
def mixed_dtypes(bench: Bench) -> None:
    """Trained parameters may have different dtypes."""
    trains(bench, models.MixedDtypes)


@check()
def quantized_parameters(bench: Bench) -> None:
    """Frozen parameters may be integers, or of less precision than the trained ones beside them."""
    trains(bench, models.Quantized)


@check()
def large_layers(bench: Bench) -> None:
    """Repeated layers of a hundred thousand parameters train like small ones."""
    trains(bench, models.Large, steps=2)


@check()
def tied_parameters(bench: Bench) -> None:
    """A parameter that two layers share gets one update, from both."""
    trains(bench, models.Tied)


@check()
def tied_repeated_layers(bench: Bench) -> None:
    """Repeated layers may share a parameter."""
    trains(bench, models.TiedBlocks)


@check()
def ties_last(bench: Bench) -> None:
    """Tied parameters are still one object after training."""
    for rank, report in enumerate(bench.run(jobs.fit_tied, Task(steps=1))):
        broken = [what for what, holds in report.items() if not holds]
        expect(not broken, f"rank {rank}: after training, tied parameters are not the same: {broken}.")


@check()
def frozen_parameters(bench: Bench) -> None:
    """Parameters that do not require gradients stay as they are, bit for bit, even with weight decay."""
    for rank, report in enumerate(bench.run(jobs.freeze, Task(model=models.Frozen))):
        expect(not report["changed"], f"rank {rank}: frozen parameters were changed: {report['changed']}.")
        expect(
            report["frozen after"] == report["frozen before"],
            f"rank {rank}: {report['frozen before']} were frozen before training, {report['frozen after']} "
            "are after it.",
        )
        kept = sorted({*report["with state"], *report["with gradients"]})
        expect(not kept, f"rank {rank}: frozen parameters have gradients or optimizer state: {kept}.")


@check()
def partly_frozen_layers(bench: Bench) -> None:
    """What is trained beside frozen parameters gets the updates of one process."""
    trains(bench, models.Frozen)


@check("unused_parameters")
def unused_parameters(bench: Bench) -> None:
    """Parameters that no step uses do not stop the others from training, and stay as they are."""
    trains(bench, models.Unused)


@check("unused_parameters")
def parameters_used_now_and_then(bench: Bench) -> None:
    """Parameters may take part in some steps and not in others."""
    trains(bench, models.Alternating)


@check()
def layers_used_twice(bench: Bench) -> None:
    """A layer may be called several times in one forward."""
    trains(bench, models.Reusing)
