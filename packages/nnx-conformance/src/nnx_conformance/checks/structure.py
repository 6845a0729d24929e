"""Structure: modules of every make train as in one process, and are what they were afterwards.

Their parameters, layers and buffers, and how they are built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nnx_conformance import structure_jobs as building
from nnx_conformance import structure_jobs as jobs
from nnx_conformance import structure_models as models
from nnx_conformance.check import (
    TOLERANCE,
    Bench,
    check,
    expect,
    expect_equal_losses,
    expect_parity,
    expect_same_run,
)
from nnx_conformance.task import Outcome, Plain, Task

__all__ = []


def trains(bench: Bench, model: type[Plain], *, like: type[Plain] | None = None, **changes: Any) -> None:
    """Every rank trains the model as one process does, or as one process trains another model.

    Args:
        bench: The bench of the check.
        model: The model to train.
        like: The model that gives the same numbers in one process; by default it is the same one.
        **changes: To the task.
    """
    expect_parity(bench, Task(model=model, **changes), like=Task(model=like or model, **changes))


# --- parameters -----------------------------------------------------------------------------------
# Parameters: their shapes, which of them are shared, and which are trained.


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


# --- layers ---------------------------------------------------------------------------------------
# Kinds of layers and of batches, hooks, and chance.


@check()
def nested_containers(bench: Bench) -> None:
    """Parameters and modules may lie in lists and dicts, nested as one likes."""
    trains(bench, models.Nested)


@check()
def embeddings_and_convolutions(bench: Bench) -> None:
    """Embeddings of integers, convolutions and norms over groups train."""
    trains(bench, models.Convolving)


@check()
def recurrent_layers(bench: Bench) -> None:
    """Recurrent layers train, although they hold their weights in a second place."""
    trains(bench, models.Recurrent)


@check()
def attention_layers(bench: Bench) -> None:
    """Attention trains, although it uses weights of a layer that it never calls."""
    trains(bench, models.Attending)


@check()
def parametrized_layers(bench: Bench) -> None:
    """Layers whose weight is computed from others by `torch.nn.utils.parametrizations` train."""
    trains(bench, models.Parametrized)


@check()
def generic_root(bench: Bench) -> None:
    """The root may be of a class like `class Model(Generic[T], LightningModule)`."""
    trains(bench, building.GenericRoot)


@check()
def recomputed_activations(bench: Bench) -> None:
    """Layers that the user recomputes in backward give the losses of kept ones, with dropout too."""
    task = Task()
    recomputed = bench.run(jobs.fit_recomputing, task, True)
    kept = bench.run(jobs.fit_recomputing, task, False)
    for rank, (outcome, wanted) in enumerate(zip(recomputed, kept, strict=True)):
        where = f"recomputed, rank {rank}"
        expect_equal_losses(outcome.losses, wanted.losses, tolerance=TOLERANCE["float32"], where=where)


@check()
def structured_batches(bench: Bench) -> None:
    """Batches, forward's keywords and its outputs may be nested dicts, lists and tuples."""
    trains(bench, models.StructuredBatches)


@check("submodule_hooks")
def hooks_of_the_user(bench: Bench) -> None:
    """Hooks on layers are called, with the effect that they have in one process, and stay afterwards."""
    alone: Outcome = bench.alone(jobs.fit_hooked, Task())
    ranks: list[Outcome] = bench.run(jobs.fit_hooked, Task())
    for rank, outcome in enumerate(ranks):
        for when in ("in training", "in all"):
            seen, expected = outcome.notes[when], alone.notes[when]
            expect(seen == expected, f"rank {rank}: hooks called {when}: {seen}; in one process {expected}.")
    expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check()
def dropout_by_rank(bench: Bench) -> None:
    """Ranks that seed differently drop differently, and every step anew."""
    ranks = bench.run(jobs.draw_masks, Task())
    masks = {share: drawn for share, drawn, _ in ranks}
    drawn = [(f"share {share}, step {i}", m) for share, ms in masks.items() for i, m in enumerate(ms)]
    for index, (where, mask) in enumerate(drawn):
        same = [other for other, mask_there in drawn[:index] if torch.equal(mask, mask_there)]
        expect(not same, f"dropout of {where} drops the same elements as that of {same}.")


@check()
def dropout_is_reproducible(bench: Bench) -> None:
    """The same seeds give the same masks and losses."""
    first, second = (bench.run(jobs.draw_masks, Task()) for _ in range(2))
    for rank, ((_, masks, losses), (_, again, losses_again)) in enumerate(zip(first, second, strict=True)):
        expect(
            losses == losses_again and all(map(torch.equal, masks, again)),
            f"rank {rank}: with one seed the losses are {losses}, and then {losses_again}.",
        )


# --- buffers --------------------------------------------------------------------------------------
# Buffers, and norms over the batch, which keep statistics in them.


_COUNTED = ("total", "unsaved", "steps")


def _expect_buffers(seen: dict[str, Tensor], expected: dict[str, Tensor], *, where: str) -> None:
    for name, wanted in expected.items():
        found = seen[name]
        expect(
            found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=1e-4, atol=1e-4),
            f"{where}: the buffer {name!r} is {found.tolist()}, rank 0's own data make it {wanted.tolist()}.",
        )


def _counts(seen: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    return {"total": seen["own"], "unsaved": seen["own"], "steps": torch.tensor(steps)}


@check()
def buffers_keep_updates(bench: Bench) -> None:
    """What training writes into buffers is there after it, and they have their names, dtypes and values."""
    rank_zero, *_ = bench.run(jobs.watch_buffers, Task(model=jobs.Counting), True)
    (after,) = rank_zero["end"]
    expected = {
        **_counts(after, 3),
        "wave": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64),
        "mask": torch.tensor([True, False, True]),
    }
    _expect_buffers(after, expected, where="rank 0, after training")


@check()
def buffers_in_validation(bench: Bench) -> None:
    """Validation within fit has rank 0's buffers on every rank."""
    ranks = bench.run(jobs.watch_buffers, Task(model=jobs.Counting), True)
    for step, first in enumerate(ranks[0]["validate"]):
        for rank, report in enumerate(ranks):
            where = f"validation after step {step}, rank {rank}"
            _expect_buffers(report["validate"][step], _counts(first, step + 1), where=where)


@check()
def buffers_in_a_later_test(bench: Bench) -> None:
    """A test after fit has rank 0's buffers on every rank."""
    ranks = bench.run(jobs.watch_buffers, Task(model=jobs.Counting), False)
    for rank, report in enumerate(ranks):
        expected = _counts(ranks[0]["test"][0], 3)
        _expect_buffers(report["test"][0], expected, where=f"test after fit, rank {rank}")


@check()
def batch_norm(bench: Bench) -> None:
    """Running statistics are those of rank 0's data; every rank's validation computes with them."""
    ranks = bench.run(jobs.watch_buffers, Task(model=jobs.Normalizing), True)
    for step, first in enumerate(ranks[0]["validate"]):
        expected = {
            "norm.running_mean": first["own_mean"],
            "norm.running_var": first["own_var"],
            "norm.num_batches_tracked": torch.tensor(step + 1),
        }
        for rank, report in enumerate(ranks):
            _expect_buffers(report["validate"][step], expected, where=f"validation {step}, rank {rank}")
    worst = max(report["wrong"] for report in ranks)
    expect(worst < 1e-4, f"outputs in validation differ by {worst:.3g} from what the statistics make them.")


@check("sync_batchnorm")
def synchronized_batch_norm(bench: Bench) -> None:
    """With `sync_batchnorm` the statistics are those of the global batch, and the layers come back."""
    alone: Outcome = bench.alone(jobs.fit_synchronized, Task())
    for world_size in bench.world_sizes:
        ranks: list[Outcome] = bench.run(jobs.fit_synchronized, Task(), world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])
        for rank, outcome in enumerate(ranks):
            changed = sorted(set(outcome.notes["layers"]) - set(alone.notes["layers"]))
            expect(not changed, f"rank {rank}: after training the module has layers of class {changed}.")


# --- building -------------------------------------------------------------------------------------
# When and where a model and its optimizer are built.


@check()
def built_without_a_seed(bench: Bench) -> None:
    """All ranks start from rank 0's weights and buffers, whatever each was seeded with."""
    trains(bench, building.Unseeded)


@check()
def built_in_configure_model(bench: Bench) -> None:
    """A model built in `configure_model` trains like one built in `__init__`."""
    trains(bench, building.BuiltLate, like=Plain)


@check(of_adapter=True)
def configure_model_is_called_once(bench: Bench) -> None:
    """`configure_model` is called once in every run."""
    for rank, calls in enumerate(bench.run(jobs.count_calls, Task(model=building.BuiltLate, steps=1))):
        for run, count in calls.items():
            expect(count == 1, f"rank {rank}: configure_model was called {count} times in the {run}.")


@check(of_adapter=True)
def built_in_configure_sharded_model(bench: Bench) -> None:
    """A model built in `configure_sharded_model`, as older code has it, trains."""
    trains(bench, building.BuiltLateSharded, like=Plain)


@check(of_adapter=True)
def built_in_init_module(bench: Bench) -> None:
    """A model built under `Trainer.init_module()` trains."""
    alone = bench.train_alone(Task(model=building.Reset))
    ranks = bench.run(jobs.fit_in_init_module, Task(model=building.Reset), False)
    expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check("meta_initialization")
def built_without_values(bench: Bench) -> None:
    """`Trainer.init_module(empty_init=True)` allocates nothing; `reset_parameters` gives the values later."""
    alone = bench.train_alone(Task(model=building.Reset))
    ranks = bench.run(jobs.fit_in_init_module, Task(model=building.Reset), True)
    for rank, outcome in enumerate(ranks):
        made = outcome.notes["with values"]
        expect(not made, f"rank {rank}: memory was allocated for {made} when the model was built.")
    expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check("meta_initialization")
def built_on_meta_in_configure_model(bench: Bench) -> None:
    """What `configure_model` builds on the meta device gets its values from `reset_parameters`."""
    trains(bench, building.BuiltLateOnMeta, like=building.Reset)


@check()
def optimizer_made_early(bench: Bench) -> None:
    """An optimizer made in `__init__` trains the parameters, in the first run and in the next."""
    task = Task(model=building.EarlyOptimizer, steps=2)
    alone = bench.alone(jobs.fit_twice, task)
    for world_size in bench.world_sizes:
        ranks = bench.run(jobs.fit_twice, task, world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check()
def wrapped_layers(bench: Bench) -> None:
    """`wrap()` in `configure_model` changes no number, whether or not it means anything to the strategy."""
    trains(bench, building.Wrapped, like=Plain)


@check("manual_wrap")
def wrapped_layers_are_sharded(bench: Bench) -> None:
    """`wrap()` splits a layer over the ranks at once, so that a model can be built layer by layer."""
    for rank, (held, whole) in enumerate(bench.run(jobs.local_share, Task(steps=1))):
        expect(held < whole, f"rank {rank} holds {held} of the {whole} elements of the wrapped layers.")
