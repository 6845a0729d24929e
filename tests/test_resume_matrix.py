"""Any strategy at any world size resumes the checkpoints of any other, exactly.

A few cells resume each cell's checkpoint, at world sizes in rotation, so that every strategy is saved and
resumed at each world size, every two strategies of different engines meet in one direction, and every two
engines in both. An engine's first strategy also resumes itself at the next world size, from each, and the
others from one. A checkpoint depends on its strategy only by its boxes, and the boxes of an engine's
strategies meet all others here. The tests of each package cover its own strategies among each other.
A test marked `full` lets every cell resume every checkpoint.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

import nnx_checkpoint
from nnx_conformance.pool import WorkerPool
from nnx_test_helpers.resume_jobs import Seen, run_cell
from nnx_test_helpers.training import Run

STEP, STEPS = 2, 3
FSDP = {"min_num_params": 100}
ALONE = {"target_batch_size": 1, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}
"""A peer that steps after each batch."""
TIERS = {"blocks.0": "streamed", "blocks.1": "offloaded", "blocks.2": "gathered", "": "sharded"}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp_auto": {"strategy": "fsdp_auto", "options": FSDP},
    "fsdp_manual": {"strategy": "fsdp_manual", "model": "wrapped"},
    "fsdp_offload": {"strategy": "fsdp_offload", "options": FSDP},
    "fsdp_hybrid": {"strategy": "fsdp_hybrid", "options": {**FSDP, "replicate_size": 2}},
    # Under plain ddp, one step of several optimizers leaves parameters unused.
    "ddp": {"strategy": "ddp_find_unused_parameters_true"},
    "model_parallel": {"strategy": "model_parallel", "model": "parallelized"},
    "nnscaler": {"strategy": "nnscaler"},
    "nnscaler_deduped": {"strategy": "nnscaler_deduped"},
    "nnscaler_data": {"strategy": "nnscaler", "options": {"policy": "data"}},
    "nnscaler_dp": {"strategy": "nnscaler_dp"},
    "nnscaler_tp": {"strategy": "nnscaler_tp"},
    "nnscaler_zero": {"strategy": "nnscaler_zero"},
    "nnscaler_pp": {"strategy": "nnscaler_pp"},
    "nnscaler_hybrid": {"strategy": "nnscaler_hybrid"},
    "colossalai": {"strategy": "colossalai", "options": {**FSDP, "tiers": TIERS}},
    "colossalai_cpu": {"strategy": "colossalai_cpu", "options": FSDP},
    "torchft_ddp": {"strategy": "torchft_ddp"},
    "torchft_hsdp": {"strategy": "torchft_hsdp", "options": FSDP},
    "hivemind": {"strategy": "hivemind", "options": ALONE},
}
ENGINES = {"torchft_ddp": "torchft", "torchft_hsdp": "torchft", "hivemind": "hivemind"}
"""The packages of strategies that may not be installed."""
ELEMENTWISE = ("model_parallel",)
"""Strategies that cannot step Muon and Adafactor, which look at whole matrices, rows and columns."""
WHOLE = ("fsdp_auto", "nnscaler_zero", "ddp", "colossalai", "nnscaler_tp", "fsdp_offload")
"""A round of strategies that resume states of whole matrices of one another, each the next one's and back."""
ONE_OPTIMIZER = ("torchft_ddp", "torchft_hsdp", "hivemind")
"""Strategies that cannot step several optimizers."""
Cell = tuple[str, int]
"""A strategy and its world size."""


def sizes_of(strategy: str) -> tuple[int, ...]:
    """World sizes at which a strategy runs; hybrids need pairs, groups and peers may have one process."""
    if strategy in ("torchft_ddp", "hivemind"):
        return (1,)
    return (2, 4) if strategy in ("fsdp_hybrid", "nnscaler_hybrid") else (1, 2, 3, 4)


STRATEGIES = {
    name: given for name, given in STRATEGIES.items() if name not in ENGINES or find_spec(ENGINES[name])
}
CELLS: list[Cell] = [(name, devices) for name in STRATEGIES for devices in sizes_of(name)]


def engine_of(strategy: str) -> str:
    """Return the engine's name, which strategies with different options share."""
    return strategy.partition("_")[0]


def resumes(target: str, source: str) -> bool:
    """Return True if the target resumes the source's checkpoint by default."""
    if engine_of(target) == engine_of(source):
        return False
    names = list(STRATEGIES)
    engines = [engine_of(name) for name in names]
    one, other = names.index(source), names.index(target)
    if engines.count(engines[one]) == engines.count(engines[other]) == 1:
        return True  # nobody else is there to go the other way
    return ((one + other) % 2 == 0) == (one < other)


def resuming_itself(strategy: str) -> list[tuple[int, int]]:
    """The world sizes from and at which a strategy resumes itself, by default."""
    sizes = sizes_of(strategy)
    turns = list(zip(sizes, (*sizes[1:], sizes[0]), strict=True))
    number = list(STRATEGIES).index(strategy)
    siblings = [name for name in STRATEGIES if engine_of(name) == engine_of(strategy)]
    return turns if strategy == siblings[0] else [turns[number % len(turns)]]


def few_targets() -> dict[Cell, list[Cell]]:
    """Return the few cells that resume each cell's checkpoint."""
    targets: dict[Cell, list[Cell]] = {cell: [] for cell in CELLS}
    met: Counter[str] = Counter()
    for source in STRATEGIES:
        for before, after in resuming_itself(source):
            targets[source, before].append((source, after))
        for number, target in enumerate(name for name in STRATEGIES if resumes(name, source)):
            before, after = sizes_of(source), sizes_of(target)
            cell = (target, after[met[target] % len(after)])
            targets[source, before[number % len(before)]].append(cell)
            met[target] += 1
    return targets


TARGETS = few_targets()


class Matrix:
    """Runs each saving cell once and keeps its checkpoint."""

    def __init__(self, pool: WorkerPool, folder: Path, lighthouse: str) -> None:
        self.pool, self.folder, self.lighthouse = pool, folder, lighthouse
        self.saved = lru_cache(maxsize=None)(self._save)
        self.converted = lru_cache(maxsize=None)(self._convert)

    def _run(self, cell: Cell, optimizers: int, **more: Any) -> Run:
        name, devices = cell
        given = dict(STRATEGIES[name])
        if name.startswith("nnscaler"):
            given["options"] = {**given.get("options", {}), "gen_savedir": str(self.folder / "gen")}
        if name.startswith("torchft"):
            own = {"lighthouse": self.lighthouse, "run_id": uuid.uuid4().hex}
            given["options"] = {**given.get("options", {}), **own}
        if optimizers == 1:
            return Run(devices=devices, steps=STEPS, groups=2, **given, **more)
        return Run(devices=devices, steps=STEPS, optimizer="mixed", optimizers=optimizers, **given, **more)

    def _save(self, cell: Cell, optimizers: int) -> tuple[Path, Seen]:
        path = self.folder / f"{cell[0]}-{cell[1]}-{optimizers}.ckpt"
        step = STEP * optimizers
        run = self._run(cell, optimizers, save=str(path), save_at=step)
        return path, self.pool.run(run_cell, run, step, world_size=cell[1])[0]

    def _convert(self, cell: Cell, optimizers: int) -> Path:
        """Lightning's ModelParallelStrategy reads nothing but its own directories."""
        path, _ = self.saved(cell, optimizers)
        converted = path.with_suffix(".sharded")
        nnx_checkpoint.convert(path, converted, to="lightning_sharded")
        return converted

    def check(self, source: Cell, target: Cell, optimizers: int) -> None:
        """Resume a source's checkpoint under another strategy or world size."""
        optimizers = 1 if {source[0], target[0]} & set(ONE_OPTIMIZER) else optimizers
        _, saved = self.saved(source, optimizers)
        for seen in self._resumed(source, target, optimizers):
            assert seen.weights == saved.weights, f"weights differ in {target}"
            assert seen.optimizer == saved.optimizer, f"optimizer state differs in {target}"
            # The states are bit-equal; sums over another number of ranks round differently.
            assert seen.losses == pytest.approx(saved.losses[STEP:], abs=1e-5), target

    def _resumed(self, source: Cell, target: Cell, optimizers: int) -> list[Seen]:
        foreign = target[0] == "model_parallel" != source[0]
        path = self.converted(source, optimizers) if foreign else self.saved(source, optimizers)[0]
        run = self._run(target, optimizers, resume=str(path))
        return self.pool.run(run_cell, run, STEP * optimizers, world_size=target[1])


@pytest.fixture(scope="module")
def matrix(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with lighthouse() as address:
        yield Matrix(pool, tmp_path_factory.mktemp("matrix"), address)


@contextmanager
def lighthouse() -> Iterator[str]:
    """Start the lighthouse of elastic runs, and return its address; empty without torchft."""
    if find_spec("torchft") is None:
        yield ""
        return
    from nnx_torchft._torchft_compat import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=30_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=2000,
    )
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.mark.quick(every=28)
@pytest.mark.parametrize("source", CELLS, ids=lambda cell: f"from-{cell[0]}-{cell[1]}")
def test_every_cell_resumes_exactly(matrix: Matrix, source: Cell) -> None:
    for target in TARGETS[source]:
        matrix.check(source, target, 2)  # AdamW in two groups, and SGD


@pytest.mark.full
@pytest.mark.parametrize("source", CELLS, ids=lambda cell: f"from-{cell[0]}-{cell[1]}")
def test_every_cell_resumes_the_checkpoint_of_every_cell(matrix: Matrix, source: Cell) -> None:
    for target in CELLS:
        # AdamW, Muon and Adafactor, where both strategies can step them.
        matrix.check(source, target, 2 if {source[0], target[0]} & set(ELEMENTWISE) else 3)


def test_all_engines_meet_both_ways_and_every_strategy_is_saved_and_resumed_at_every_world_size() -> None:
    meetings = {(source, target) for source in CELLS for target in TARGETS[source]}
    pairs = {(source[0], target[0]) for source, target in meetings}
    engines = {engine_of(name) for name in STRATEGIES}
    assert {(engine_of(one), engine_of(other)) for one, other in pairs} == set(product(engines, engines))
    for one, other in combinations(STRATEGIES, 2):
        if engine_of(one) != engine_of(other):
            assert {(one, other), (other, one)} & pairs, (one, other)
    assert {(one, one) for one in STRATEGIES} <= pairs
    assert {source for source, _ in meetings} == set(CELLS)
    assert {target for _, target in meetings} == set(CELLS)


@pytest.mark.full
@pytest.mark.parametrize(("source", "target"), list(zip(WHOLE, (*WHOLE[1:], WHOLE[0]), strict=True)))
def test_states_of_whole_matrices_rows_and_columns_resume_too(
    matrix: Matrix, source: str, target: str
) -> None:
    matrix.check((source, 2), (target, 3), 3)
    matrix.check((target, 2), (source, 1), 3)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("optimizer", "optimizers"), [("sgd", 1), ("adamw", 2)])
def test_optimizers_of_other_kinds_and_numbers_resume_too(
    pool: WorkerPool, tmp_path: Path, optimizer: str, optimizers: int
) -> None:
    path = tmp_path / "last.ckpt"
    step = STEP * optimizers
    base = Run(optimizer=optimizer, optimizers=optimizers, steps=STEPS, **STRATEGIES["fsdp_auto"])
    saved = pool.run(run_cell, replace(base, save=str(path), save_at=step), step, world_size=2)[0]
    resumed = pool.run(run_cell, replace(base, devices=3, resume=str(path)), step, world_size=3)
    for seen in resumed:
        assert (seen.weights, seen.optimizer) == (saved.weights, saved.optimizer)
        assert seen.losses == pytest.approx(saved.losses[STEP:], abs=1e-5)


def test_sharded_checkpoints_resume_like_deduped_ones(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    options = {"min_num_params": 100, "state_dict_type": "sharded"}
    base = Run(options=options, steps=STEPS, groups=2)
    saved = pool.run(run_cell, replace(base, save=str(path), save_at=STEP), STEP, world_size=2)[0]
    for devices in (1, 2, 3):
        resumed = pool.run(
            run_cell, replace(base, devices=devices, resume=str(path)), STEP, world_size=devices
        )
        assert {(seen.weights, seen.optimizer) for seen in resumed} == {(saved.weights, saved.optimizer)}
