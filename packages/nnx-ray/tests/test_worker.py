"""A worker's report of an error in its work, without a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ray import cloudpickle

from nnx_core.errors import CheckpointError, RankLostError
from nnx_ray.actors import Worker


def lost_in_a_save() -> None:
    try:
        raise RuntimeError("Read error [10.0.0.1]:2206: Connection reset by peer.")
    except RuntimeError as error:
        raise CheckpointError("saving 'a.ckpt' stopped because a rank left.") from error


def lost() -> None:
    raise RankLostError("rank 1 gives no sign of life.")


def failed() -> None:
    raise CheckpointError("saving 'a.ckpt' needs 4 GB more.")


@pytest.mark.parametrize(("work", "follows"), [(lost_in_a_save, True), (lost, True), (failed, False)])
def test_an_error_that_only_tells_of_a_lost_rank_is_marked_so_that_the_run_starts_again(
    work: Callable[[], None], follows: bool
) -> None:
    pickled = cloudpickle.dumps(lambda tell, resume_from: work())
    ended = Worker().work(pickled, {}, str(Path.cwd()), print, None)
    assert work.__name__ in ended.text
    assert ended.follows_lost_rank is follows
