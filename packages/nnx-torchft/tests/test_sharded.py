"""Groups of several processes, which shard the model, against one undisturbed process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("nnx_torchft._torchft_compat", reason="torchft is not installed")

from test_elastic import address_of, new_lighthouse

from jobs.elastic import Group, Run, assert_each_sample_once, assert_equal, undisturbed

pytestmark = pytest.mark.full  # each starts groups of processes several times


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run of groups of two processes, with a lighthouse of its own."""
    lighthouse = new_lighthouse()
    yield Run(
        folder=tmp_path,
        lighthouse=address_of(lighthouse),
        strategy="torchft_hsdp",
        ranks=2,
        batch=7,
        samples=66,
        options={"auto_wrap_policy": "Linear", "min_num_params": 1},
    )
    lighthouse.shutdown()


def test_a_group_of_two_that_lost_a_rank_heals_by_shards(run: Run) -> None:
    run = replace(run, epochs=25, pause=0.05, validate_every=4)
    first, second = Group(run, "g0"), Group(run, "g1")
    first.wait_for(lambda group: any(each.get("of") == 4 for each in group.notes))
    second.wait_for(lambda group: group.commits > 2)
    second.kill(rank=1)
    third = Group(run, "g1")
    third.wait_for(lambda group: group.commits > 2)
    plain = undisturbed(run)
    assert_equal(first, plain)
    assert_equal(third, plain)
    assert_each_sample_once(run, plain)
    assert "elastic: healed at step" in third.log


def test_gradients_that_are_not_finite_in_one_shard_let_no_rank_step(run: Run) -> None:
    run = replace(run, options={**run.options, "min_groups": 2}, poison=("g1", 7))
    first, second = Group(run, "g0"), Group(run, "g1")
    assert "step 7: gradients are not finite; no group steps" in (first.end(), first.log)[1]
    second.end()
    ours, theirs = first.weights(), second.weights()
    assert all(ours[name].equal(theirs[name]) and ours[name].isfinite().all() for name in ours)


def test_groups_that_begin_with_other_weights_or_another_size_are_refused(run: Run) -> None:
    run = replace(run, options={**run.options, "min_groups": 2})
    first, second = Group(run, "g0"), Group(replace(run, draws=1), "g1")
    assert "group 'g1' cannot join group 'g0': its weights differ before the first step" in second.error()
    third = Group(replace(run, ranks=1), "g2")
    assert "the group has this many processes: 1 here, and 2 there" in third.error()
    first.kill()


def test_a_group_of_two_resumes_from_disk_and_one_process_resumes_its_checkpoint(run: Run) -> None:
    run = replace(run, epochs=4, pause=0.1, save_every=4, resume="last")
    only = Group(run, "g0").wait_for(lambda group: group.commits > 12)
    only.kill(rank=1)
    plain = undisturbed(replace(run, resume=None))
    again = Group(run, "g0")
    assert_equal(again, plain)
    assert "elastic: resuming from disk at step" in again.log
    folder = run.folder / "as_torchft_ddp"
    folder.mkdir()
    saved = str(run.folder / "saves" / "epoch=1-step=12.ckpt")
    other = replace(run, strategy="torchft_ddp", ranks=1, options={"run_id": "other"})
    other = replace(other, folder=folder, save_every=0, pause=0.0, resume=saved)
    assert_equal(Group(other, "g0"), plain)
