"""Optimizers that read more than one element give the numbers of one process, for any sharding.

LAMB, Muon, Shampoo's kind, Adafactor, SAM, LBFGS and norms of all gradients run under the engines that shard
parameters; each engine resumes the state of every other.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.unsharded_optimizer_jobs import (
    Result,
    Steps,
    saved_tensors,
    step_muon_on_given_gradients,
    train_all,
)
from nnx_conformance.pool import JobError, WorkerPool

UNITS = {"min_num_params": 1}
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp_auto": UNITS,
    "colossalai": UNITS,
    "nnscaler_zero": {},
    "nnscaler_tp": {},
}
KINDS = ["lamb", "soap", "adafactor", "muon groups", "norm of all", "sam", "lbfgs", "muon"]
FEW = ["adafactor", "muon groups", "norm of all", "lbfgs"]
"""One of each way: a row and a column, a matrix, all gradients, and a closure that is called again."""


class Runs:
    """Runs each thing once."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self.one_process = lru_cache(maxsize=None)(self._one_process)

    def _one_process(self) -> dict[str, Result]:
        return dict(zip(KINDS, self.train([Steps(kind) for kind in KINDS]), strict=True))

    def train(self, many: list[Steps]) -> list[Result]:
        """Train, and return the results of rank 0."""
        given = [
            replace(steps, options={**steps.options, "gen_savedir": str(self._folder)})
            if steps.strategy.startswith("nnscaler")
            else steps
            for steps in many
        ]
        return self._pool.run(train_all, given, world_size=many[0].devices)[0]


@pytest.fixture(scope="module")
def runs(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("gen"))


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [("fsdp_auto", FEW), *(pytest.param(name, KINDS, marks=pytest.mark.full) for name in ENGINES)],
)
def test_every_kind_gives_the_numbers_of_one_process(runs: Runs, strategy: str, kinds: list[str]) -> None:
    devices = 3 if strategy == "fsdp_auto" else 2
    steps = [Steps(kind, strategy, ENGINES[strategy], devices) for kind in kinds]
    if devices == 3:  # an uneven world, and a batch that it divides
        expected = dict(zip(kinds, runs.train([Steps(kind, batch=6) for kind in kinds]), strict=True))
        steps = [replace(one, batch=6) for one in steps]
    else:
        expected = runs.one_process()
    for kind, seen in zip(kinds, runs.train(steps), strict=True):
        # A line search takes other steps where losses round differently.
        tolerance = 2e-4 if kind == "lbfgs" else 2e-6
        assert seen.losses == pytest.approx(expected[kind].losses, abs=tolerance), kind
        for name, weight in expected[kind].weights.items():
            assert torch.allclose(seen.weights[name], weight, atol=tolerance), (kind, name)
        assert seen.bytes_sent > 0, kind


@pytest.mark.full
def test_muon_of_torch_is_that_of_one_process_to_the_bit_and_sends_what_the_formula_says(
    pool: WorkerPool,
) -> None:
    alone = pool.run(step_muon_on_given_gradients, False, world_size=1)[0]
    for size in (2, 3):
        for seen in pool.run(step_muon_on_given_gradients, True, world_size=size, init="gloo"):
            assert all(map(torch.equal, seen.weights, alone.weights))
    # Two ranks halve each matrix but for odd rows: its owner lacks half of the weight and of the gradient,
    # the other rank half of the result. Of an odd row, and of a single one, the first rank has more.
    two = pool.run(step_muon_on_given_gradients, True, world_size=2, init="gloo")[0].bytes_sent
    held_by_others = 24 * 64 + 16 * 20 + 2 * 7
    assert 3 * 3 * 4 * held_by_others <= two <= 3 * 3 * 4 * (held_by_others + 20 + 7 + 9)


def test_accumulation_clipping_and_half_precision_masters_go_with_owners(runs: Runs) -> None:
    how = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    alone, zero = (
        runs.train([Steps("muon groups", *where, trainer=how)])[0] for where in ((), ("nnscaler_zero", {}, 2))
    )
    assert zero.losses == pytest.approx(alone.losses, abs=2e-6)
    half = {"precision": "bf16-true"}
    masters = Steps("muon groups", "nnscaler_tp", {"fp32_masters": True}, 2, half)
    plain = runs.train([replace(masters, options={}, strategy="auto", devices=1)])[0]
    assert runs.train([masters])[0].losses == pytest.approx(plain.losses, abs=0.05)


RING = ["auto", "fsdp_auto", "nnscaler_zero", "colossalai", "nnscaler_tp", "auto"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["soap", "lamb"])
def test_state_of_owners_goes_round_from_engine_to_engine(runs: Runs, tmp_path: Path, kind: str) -> None:
    expected = runs.one_process()[kind]
    for number, (source, target) in enumerate(pairwise(RING)):
        path = str(tmp_path / f"{number}.ckpt")
        from_, to = (
            Steps(kind, name, ENGINES.get(name, {}), 1 if name == "auto" else 2) for name in (source, target)
        )
        runs.train([replace(from_, save=path)])
        again = str(tmp_path / f"{number} again.ckpt")
        seen = runs.train([replace(to, resume=path, save_resumed=again)])[0]
        assert seen.losses == pytest.approx(expected.losses[2:], abs=2e-6), (source, target)
        saved, resaved = saved_tensors(path), saved_tensors(again)
        assert saved.keys() == resaved.keys()
        assert all(torch.equal(saved[key], resaved[key]) for key in saved), (source, target)
        assert any("optim" in key for key in saved)


def test_what_fails_on_one_rank_fails_on_all_at_once(runs: Runs) -> None:
    with pytest.raises(JobError, match=r"of rank 1|failed on another rank"):
        runs.train([Steps("fails on rank 1", "fsdp_auto", UNITS, 2)])
