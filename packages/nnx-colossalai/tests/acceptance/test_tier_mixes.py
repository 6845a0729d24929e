"""Masters are bitwise equal for every mix of tiers and for steps at once or in the background.

Every mix of tiers, stepped at once and in the background, runs at world sizes 1, 2 and 4, under 20 seeds of
random delays of the simulated device; each seed has its own recipe of training (precision, optimizer,
clipping, accumulation, overflow). At world sizes 1 and 2 the reference is a loop written by hand, at 4 the
first mix without delays. Each cell runs with a few of the seeds, in rotation. At world size 4 the mixes
alternate in stepping in the background, which all mixes do at 1 and 2. In the cases marked `full` every cell
runs with all seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from jobs.colossalai_mix_jobs import Mix, train_mixes_of_rank
from jobs.colossalai_mix_model import Recipe
from jobs.colossalai_plain_loop import train_plainly
from nnx_conformance.pool import WorkerPool

SEEDS = 20
MIXES = {
    "gathered": ("gathered",) * 5,
    "sharded": ("sharded",) * 5,
    "offloaded": ("offloaded",) * 5,
    "streamed": ("streamed",) * 5,
    "all four": ("gathered", "sharded", "offloaded", "streamed", "offloaded"),
    "halves": ("streamed", "offloaded", "streamed", "gathered", "sharded"),
    "ends": ("offloaded", "gathered", "sharded", "offloaded", "streamed"),
}
OVERLAPS = ("none", "exact")
SIZES = (1, 2, 4)
Cell = tuple[int, str, str]
"""A world size, a mix, and when its chunks are stepped."""
ALL_CELLS: list[Cell] = list(product(SIZES, MIXES, OVERLAPS))


def has_its_turn(world_size: int, mix: str, overlap: str) -> bool:
    """Return True if the cell is trained by default. (Four processes on few cores take most of the time.)"""
    return world_size < 4 or OVERLAPS.index(overlap) == list(MIXES).index(mix) % len(OVERLAPS)


CELLS = [cell for cell in ALL_CELLS if has_its_turn(*cell)]


def recipe_of(seed: int) -> Recipe:
    """Goes round the precisions, optimizers and ways to clip at different paces."""
    precision = ("bf16-mixed", "16-mixed", "32-true")[seed % 3]
    return Recipe(
        precision=precision,
        optimizer=("adamw", "adam", "momentum")[seed // 3 % 3],
        clip=(None, "norm", "value")[(seed + seed // 3 + seed // 9) % 3],
        accumulate=1 + seed // 2 % 2,
        overflow=precision == "16-mixed" and seed % 2 == 0,
        even=seed // 7 % 2 == 0,
    )


def seeds_of(cell: Cell) -> list[int]:
    """Return the few seeds that a cell meets."""
    count = 1 if cell[0] == 4 else 2
    first = count * CELLS.index(cell)
    return [(first + number) % SEEDS for number in range(count)]


class References:
    """The expected results by recipe and world size; each is trained once."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.of = lru_cache(maxsize=None)(self._train)

    def _train(self, recipe: Recipe, world_size: int) -> dict[str, Any]:
        if world_size <= 2:
            return self._pool.run(train_plainly, [recipe], world_size, world_size=1)[0][0]
        ranks = run(self._pool, [(recipe, Mix(MIXES["sharded"]))], world_size)
        first = ranks[0][0]
        return {**first, "losses": [left[0]["losses"] for left in ranks]}


def run(pool: WorkerPool, cases: list[tuple[Recipe, Mix]], world_size: int) -> list[list[dict[str, Any]]]:
    """Train all cases on all ranks; return the outcome of each on each rank."""
    init = None if world_size == 1 else "gloo"
    return pool.run(train_mixes_of_rank, cases, world_size=world_size, init=init, timeout=300.0)


@pytest.fixture(scope="module")
def references(pool: WorkerPool) -> References:
    return References(pool)


def name_of(cell: Cell) -> str:
    """Return a cell as the name of a case."""
    return f"{cell[0]}-{cell[1].replace(' ', '_')}-{cell[2]}"


@pytest.mark.quick(every=36)
@pytest.mark.parametrize(
    ("cell", "seeds"),
    [
        *(pytest.param(cell, seeds_of(cell), id=name_of(cell)) for cell in CELLS),
        *(
            pytest.param(cell, range(SEEDS), id=f"{name_of(cell)}-all-seeds", marks=pytest.mark.full)
            for cell in ALL_CELLS
        ),
    ],
)
def test_masters_moments_and_losses_are_the_references_to_the_bit(
    pool: WorkerPool, references: References, cell: Cell, seeds: Sequence[int]
) -> None:
    world_size, mix, overlap = cell
    cases = [(recipe_of(seed), Mix(MIXES[mix], overlap, seed)) for seed in seeds]
    for rank, lefts in enumerate(run(pool, cases, world_size)):
        for (recipe, _), seed, left in zip(cases, seeds, lefts, strict=True):
            wanted = references.of(recipe, world_size)
            where = f"rank {rank}, seed {seed}, {recipe}"
            assert left["losses"] == wanted["losses"][rank], where
            assert left["masters"] == wanted["masters"], where
            assert left["states"] == wanted["states"], where
            assert left["plain"] == wanted["masters"], f"{where}: after the strategy's end"
            assert left["dtypes"] == ["torch.float32"], where
            assert left["tied"], where
            assert tuple(left["tiers"].values()) == MIXES[mix], where


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("mix", "forgotten", "world_size"),
    [("streamed", "compute_waits", 1), ("offloaded", "host_waits", 1), ("offloaded", "host_waits", 2)],
)
def test_a_wait_that_is_forgotten_shows_in_the_masters(
    pool: WorkerPool, references: References, mix: str, forgotten: str, world_size: int
) -> None:
    recipe = recipe_of(0)
    case = (recipe, Mix(MIXES[mix], "exact", seed=0, forgotten=forgotten))
    for [left] in run(pool, [case], world_size):
        assert left["masters"] != references.of(recipe, world_size)["masters"]


def test_every_seed_is_met_alone_and_by_two_and_every_kind_of_recipe_occurs() -> None:
    meetings = {(seed, cell[0]) for cell in CELLS for seed in seeds_of(cell)}
    assert meetings >= set(product(range(SEEDS), (1, 2)))
    assert {(mix, size) for size, mix, _ in CELLS} == set(product(MIXES, SIZES))
    assert {(overlap, size) for size, _, overlap in CELLS} == set(product(OVERLAPS, SIZES))
    recipes = [recipe_of(seed) for seed in range(SEEDS)]
    assert {(one.precision, one.optimizer) for one in recipes} == set(
        product(("bf16-mixed", "16-mixed", "32-true"), ("adamw", "adam", "momentum"))
    )
    assert {(one.precision, one.clip) for one in recipes} == set(
        product(("bf16-mixed", "16-mixed", "32-true"), (None, "norm", "value"))
    )
    assert {(one.clip, one.accumulate) for one in recipes} == set(product((None, "norm", "value"), (1, 2)))
    assert sum(one.overflow for one in recipes) >= 2
    assert {(one.even, one.optimizer) for one in recipes} == set(
        product((True, False), ("adamw", "adam", "momentum"))
    )
    by_recipe = Counter(recipe_of(seed) for cell in CELLS for seed in seeds_of(cell))
    assert min(by_recipe.values()) >= 2, "each is trained in several cells"
