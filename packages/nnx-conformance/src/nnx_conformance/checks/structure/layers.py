"""Kinds of layers and of batches, hooks, and chance."""

from __future__ import annotations

import torch

from nnx_conformance import structure_jobs as building
from nnx_conformance import structure_jobs as jobs
from nnx_conformance import structure_models as models
from nnx_conformance.check import TOLERANCE, Bench, check, expect, expect_equal_losses, expect_same_run
from nnx_conformance.checks.structure.training import trains
from nnx_conformance.task import Outcome, Task


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
