"""Pairs of strategies that resume each other's checkpoints, and the comparison of their states.

A run that resumes saves again before its first step; this checkpoint is bitwise equal to the first. Owns
the options of these strategies, the runs, the rotation of world sizes and the comparison. Each package's own
test selects its strategies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch

from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.engine_resume_jobs import run_and_save, tensors_of
from nnx_test_helpers.training import Run

STEP, STEPS = 2, 4
"""Steps before the checkpoint, and in all. The last one's loss depends on the restored moments too."""
UNITS = {"min_num_params": 100}
PARTS = {"persistence_threshold": 0}
TIERS = {"blocks.0": "streamed", "blocks.1": "offloaded", "blocks.2": "gathered", "": "sharded"}
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp_auto": UNITS,
    "ddp": {},
    "nnscaler_deduped": {},
    "colossalai": {**UNITS, "tiers": TIERS},
    "nnx_deepspeed_1": {},
    "nnx_deepspeed_2": {},
    "nnx_deepspeed_3": PARTS,
    "nnx_deepspeed_3_cpu": {"persistence_threshold": 50},
    "fairscale_fsdp": UNITS,
    "fairscale_oss": {},
    "fairscale_sharded": {},
}
Cell = tuple[str, int]
"""A strategy and its world size."""
Pair = tuple[Cell, Cell]
"""The cell that saves, and the cell that resumes."""


def cells(names: Sequence[str], sizes: Sequence[int]) -> list[Cell]:
    """Every strategy at every world size."""
    return list(product(names, sizes))


def sizes_of_others(sizes: Sequence[int]) -> Sequence[int]:
    """Return the world sizes of other engines in `pairs`: three ranks cost most, and show least."""
    return sizes[:2]


def pairs(names: Sequence[str], others: Sequence[str], sizes: Sequence[int]) -> list[Pair]:
    """Return the pairs of an engine's strategies, and of these with strategies of other engines, both ways.

    Any two strategies meet once each way. World sizes go round, so that every cell is saved and resumes; the
    other engines have one or two ranks.
    """
    return [*_among(names, sizes), *_with(names, others, sizes)]


def cases(names: Sequence[str], others: Sequence[str], sizes: Sequence[int]) -> list[Any]:
    """Return the same pairs, and then every other pair of cells as a case marked `full`."""
    chosen = pairs(names, others, sizes)
    mine, theirs = cells(names, sizes), cells(others, sizes)
    every = [*product(mine, mine), *product(mine, theirs), *product(theirs, mine)]
    return [
        *chosen,
        *(pytest.param(*pair, marks=pytest.mark.full) for pair in every if pair not in chosen),
    ]


def _among(names: Sequence[str], sizes: Sequence[int]) -> list[Pair]:
    """Each strategy with each one, itself at another world size included."""
    turns = len(sizes)
    return [
        ((one, sizes[(i + k) % turns]), (other, sizes[(i + 2 * k + 1) % turns]))
        for i, one in enumerate(names)
        for k, other in enumerate((*names[i:], *names[:i]))
    ]


def _with(names: Sequence[str], others: Sequence[str], sizes: Sequence[int]) -> list[Pair]:
    """Each strategy with each of another engine's, both ways."""
    turns, theirs = len(sizes), sizes_of_others(sizes)
    found: list[Pair] = []
    for (i, name), (j, other) in product(enumerate(names), enumerate(others)):
        mine = (name, sizes[(i + j) % turns])
        turn = i + j // turns
        found.append((mine, (other, theirs[turn % len(theirs)])))
        found.append(((other, theirs[(turn + 1) % len(theirs)]), mine))
    return found


def check_that_all_meet(
    found: Collection[Pair], names: Sequence[str], others: Sequence[str], sizes: Sequence[int]
) -> None:
    """That any two meet both ways, and that every cell is both saved and resumes."""
    met = {(source, target) for (source, _), (target, _) in found}
    expected = {*product(names, names), *product(names, others), *product(others, names)}
    assert met == expected, f"they do not meet: {sorted(expected ^ met)}"
    everyone = {*cells(names, sizes), *cells(others, sizes_of_others(sizes))}
    assert {source for source, _ in found} == everyone, "not all are saved"
    assert {target for _, target in found} == everyone, "not all resume"


@dataclass(frozen=True)
class Saved:
    """A checkpoint, its content, and the losses of its run."""

    path: str
    tensors: dict[str, torch.Tensor]
    losses: list[float]


class Resuming:
    """Saves each cell once, with AdamW in two groups, and lets others resume that."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._resumed = count()
        self._saved = lru_cache(maxsize=None)(self._save)

    def check(self, source: Cell, target: Cell) -> None:
        """Resume the source's checkpoint, and compare weights, moments and steps, and then the losses."""
        saved = self._saved(source)
        found = self._run(target, f"resumed-{next(self._resumed)}", resume=saved.path)
        assert found.tensors.keys() == saved.tensors.keys()
        differ = [key for key, value in saved.tensors.items() if not torch.equal(found.tensors[key], value)]
        assert differ == [], f"{target} does not hold what {source} saved: {differ}"
        assert any("exp_avg_sq" in name for name in found.tensors), "there are no moments to compare"
        assert found.losses == pytest.approx(saved.losses[STEP:], abs=1e-5)

    def _save(self, cell: Cell) -> Saved:
        return self._run(cell, f"{cell[0]}-{cell[1]}")

    def _run(self, cell: Cell, name: str, resume: str | None = None) -> Saved:
        strategy, devices = cell
        options = dict(OPTIONS[strategy])
        if strategy.startswith("nnscaler"):
            options["gen_savedir"] = str(self._folder / "gen")
        run = Run(strategy=strategy, options=options, devices=devices, steps=STEPS, groups=2, resume=resume)
        path = self._folder / f"{name}.ckpt"
        losses = self._pool.run(run_and_save, run, STEP, str(path), world_size=devices)[0].losses
        return Saved(str(path), tensors_of(path), losses)
