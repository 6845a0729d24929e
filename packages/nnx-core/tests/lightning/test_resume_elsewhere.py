"""Random state and data position after a resume with another number of processes, and with Fabric."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nnx
import nnx_checkpoint as storage
from jobs.exact_resume_data import Case
from jobs.exact_resume_jobs import Report, error_of, fabric_draws, run
from nnx_conformance.pool import WorkerPool

ALONE = Case(strategy="auto")
PAIR = Case(devices=2, batch=2)


def path_in(folder: Path) -> str:
    return str(folder / "half.ckpt")


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("before", "after", "batches", "index", "steps"),
    [(2, 1, 9, 6, -1), (2, 1, 9, 6, 100), (2, 3, 9, 2, -1), (1, 2, 15, 1, -1), (1, 3, 15, 1, 100)],
)
def test_another_world_size_sees_the_rest_of_the_epoch_and_nothing_twice(
    pool: WorkerPool, tmp_path: Path, before: int, after: int, batches: int, index: int, steps: int
) -> None:
    """24 samples in batches of two; `index` is that of the first batch, as Lightning counts it now."""
    path = path_in(tmp_path)
    case = replace(PAIR, devices=before, epochs=3, steps=steps, save_at=("on_train_batch_end", batches))
    whole = pool.run(run, replace(case, path=path), world_size=before)
    resumed = pool.run(run, replace(case, devices=after, resume=path, seed=99), world_size=after)
    seen = _samples(whole, 1, batches)
    rest = _samples(resumed, 1)
    assert sorted(seen + rest) == list(range(24))
    assert sorted(rest) == sorted(_samples(whole, 1, since=batches))
    assert sorted(_samples(resumed, 2)) == list(range(24))
    assert resumed[0].where[0] == (1, index)
    per_epoch = 24 // after // 2
    assert [where for where in resumed[0].where if where[0] == 2] == [(2, i) for i in range(per_epoch)]
    elsewhere, batch = resumed[0].said
    assert f"holds the random state of {before} ranks, and this run has {after}" in elsewhere
    assert f"a global batch of {2 * before}, this run has {2 * after}" in batch


def _samples(reports: list[Report], epoch: int, until: int | None = None, since: int = 0) -> list[int]:
    return [
        number
        for report in reports
        for (at, _), batch in list(zip(report.where, report.batches, strict=True))[since:until]
        if at == epoch
        for number in batch
    ]


@pytest.mark.full
def test_samples_that_ranks_cannot_share_equally_are_seen_again_with_a_warning(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    case = replace(PAIR, devices=1, batch=1, epochs=1, save_at=("on_train_batch_end", 7))
    whole = pool.run(run, replace(case, path=path), world_size=1)
    resumed = pool.run(run, replace(case, devices=2, resume=path), world_size=2)
    rest = _samples(resumed, 0)
    assert len(rest) == 18 and set(rest) | set(_samples(whole, 0, 7)) == set(range(24))
    assert any(
        "7 samples of this epoch were seen, which is no multiple of 2 ranks: 1 of them will be seen again"
        in s
        for s in resumed[0].said
    )


@pytest.mark.full
def test_ranks_that_stay_keep_their_random_state_and_new_ones_are_seeded(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    case = replace(PAIR, save_at=("on_train_epoch_end", 1), epochs=2, own_sampler=True, loader="ordered")
    whole = pool.run(run, replace(case, path=path), world_size=2)
    alone = pool.run(run, replace(case, devices=1, resume=path, seed=99), world_size=1)[0]
    assert alone.losses[0] == whole[0].losses[12]
    three = [
        pool.run(run, replace(case, devices=3, resume=path, seed=seed), world_size=3) for seed in (98, 99)
    ]
    assert [r.losses for r in three[0]] == [r.losses for r in three[1]]
    assert three[0][0].losses[0] == whole[0].losses[12] and three[0][1].losses[0] == whole[1].losses[12]
    assert len({report.losses[0] for report in three[0]}) == 3
    assert "rank 2" not in str(three[0][0].said) and "ranks 2 to 2 get new seeds" in str(three[0][0].said)
    assert "those of ranks 1 to 1 are dropped" in str(alone.said)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["fsdp_auto", "ddp"])
def test_strict_rng_refuses_another_world_size_and_a_checkpoint_without_random_state(
    pool: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    path, options = path_in(tmp_path), {"strict_rng": True}
    case = replace(PAIR, strategy=strategy, epochs=1, path=path, save_at=("on_train_batch_end", 3))
    pool.run(run, case, world_size=2)
    wider = replace(case, devices=3, resume=path, path="", options=options)
    for error in pool.run(error_of, wider, world_size=3, timeout=60):
        assert error.startswith("CheckpointError: the checkpoint holds the random state of 2 ranks, and this")
        assert "Resume with 2 processes" in error


def test_a_checkpoint_without_random_state_is_refused_on_request_and_skips_by_batches_otherwise(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    case = replace(ALONE, epochs=1, loader="ordered", save_at=("on_train_batch_end", 3))
    pool.run(run, replace(case, path=path), world_size=1)
    content = storage.open_checkpoint(path).objects["trainer"]
    assert [tree["rank"] for tree in content["nnx_ranks"]] == [0]
    plain = str(tmp_path / "plain.ckpt")
    pool.run(_without_random_state, path, plain, world_size=1)
    resumed = pool.run(run, replace(case, resume=plain), world_size=1)[0]
    assert resumed.where[0] == (0, 3) and resumed.batches[0] == [9, 10, 11]
    strict = replace(case, resume=plain, options={"strict_rng": True})
    (error,) = pool.run(error_of, strict, world_size=1)
    assert error.startswith("CheckpointError: the checkpoint holds no random state")


def _without_random_state(path: str, plain: str) -> None:
    content = nnx.CheckpointIO().load_checkpoint(path)
    del content["nnx_ranks"]
    torch.save(content, plain)


@pytest.mark.full
@pytest.mark.parametrize("loader", ["stateful", "equal states"])
def test_loaders_with_a_state_at_another_world_size(pool: WorkerPool, tmp_path: Path, loader: str) -> None:
    path = path_in(tmp_path)
    case = replace(PAIR, loader=loader, path=path, save_at=("on_train_batch_end", 8))
    pool.run(run, case, world_size=2)
    said = str(pool.run(run, replace(case, devices=1, resume=path, path=""), world_size=1)[0].said)
    if loader == "stateful":
        assert "the training loaders start over, because each of 2 ranks had a state of its own" in said
    else:
        assert "the same on all 2 ranks, are restored on 1 ranks" in said


# --- Fabric ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_fabric_restores_every_ranks_random_state_where_it_is_asked_to(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    saved = pool.run(fabric_draws, path, 2, True, world_size=2)
    assert saved[0] != saved[1]
    loaded = pool.run(fabric_draws, path, 2, False, world_size=2)
    assert loaded == [(saved[0], True, []), (saved[1], True, [])]
    three = pool.run(fabric_draws, path, 3, False, world_size=3)
    assert [each[0] for each in three[:2]] == saved and three[2][0] not in saved
    assert "ranks 2 to 2 get new seeds" in str(three[0][2])
    for error in pool.run(fabric_draws, path, 1, False, "fsdp_auto", True, world_size=1):
        assert error.startswith("CheckpointError: the checkpoint holds the random state of 2 ranks")


def test_under_fabrics_own_ddp_rank_0_gets_its_random_state_and_the_others_new_ones(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = path_in(tmp_path)
    saved = pool.run(fabric_draws, path, 2, True, "ddp", world_size=2)
    first, second = pool.run(fabric_draws, path, 2, False, "ddp", world_size=2)
    assert first[0] == saved[0] and second[0] not in saved
