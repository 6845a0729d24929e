"""When and where a model and its optimizer are built."""

from __future__ import annotations

from nnx_conformance import structure_jobs as building
from nnx_conformance import structure_jobs as jobs
from nnx_conformance.check import TOLERANCE, Bench, check, expect, expect_same_run
from nnx_conformance.checks.structure.training import trains
from nnx_conformance.task import Plain, Task


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
