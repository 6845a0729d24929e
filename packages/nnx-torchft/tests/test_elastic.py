"""Groups of an elastic run, which are killed, join and are refused, against one undisturbed process."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nnx_torchft._torchft_compat", reason="torchft is not installed")

from jobs.elastic import Group, Run, assert_each_sample_once, assert_equal, undisturbed
from nnx_torchft._torchft_compat import LighthouseServer


def new_lighthouse(port: int = 0) -> Any:
    return LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=30_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=2000,
    )


def address_of(lighthouse: Any) -> str:
    return f"127.0.0.1:{lighthouse.address().rpartition(':')[2]}"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run with a lighthouse of its own."""
    lighthouse = new_lighthouse()
    yield Run(folder=tmp_path, lighthouse=address_of(lighthouse))
    lighthouse.shutdown()


def both_train(first: Group, second: Group) -> None:
    """Wait until two groups have trained a step together."""
    first.wait_for(lambda group: any(each.get("of") == 2 for each in group.notes))
    second.wait_for(lambda group: group.commits > 2)


def test_a_killed_group_heals_from_another_and_the_run_is_that_of_one_process(run: Run) -> None:
    run = replace(run, epochs=25, pause=0.05, workers=2, validate_every=4)
    first, second = Group(run, "g0"), Group(run, "g1")
    both_train(first, second)
    second.kill()
    third = Group(run, "g1")
    both_train(first, third)
    first.wait_for(lambda group: group.commits > 0)
    plain = undisturbed(run)
    assert_equal(first, plain)
    assert_equal(third, plain)
    assert_each_sample_once(run, plain)
    assert "elastic: healed at step" in third.log
    metrics = first.end()["metrics"]
    assert metrics["elastic/losses"] >= 1
    assert metrics["elastic/joins"] >= 1
    assert metrics["elastic/heals"] >= 1


@pytest.mark.full
def test_a_step_of_accumulated_batches_is_computed_again(run: Run) -> None:
    run = replace(run, epochs=30, pause=0.05, accumulate=3, batch=5)
    first, second = Group(run, "g0"), Group(run, "g1")
    both_train(first, second)
    second.wait_for(lambda group: group.notes[-1].get("micro", 0) % 3 == 2 and group.commits > 3)
    second.kill()
    plain = undisturbed(run)
    assert_equal(first, plain)
    assert_each_sample_once(run, plain)
    assert "computing the step again" in first.log


@pytest.mark.full
def test_more_groups_than_samples_and_shares_of_unequal_size(run: Run) -> None:
    run = replace(run, batch=3, samples=31, pause=0.05, epochs=6, options={"min_groups": 2})
    groups = [Group(run, f"g{index}") for index in range(4)]
    plain = undisturbed(run)
    for group in groups:
        group.process.join(150)
    ended = [group for group in groups if "ended" in group.notes[-1]]
    assert len(ended) > 1
    for group in ended:
        assert_equal(group, plain)


@pytest.mark.full
def test_the_last_group_resumes_from_disk_and_other_strategies_resume_its_checkpoint(run: Run) -> None:
    run = replace(run, epochs=4, pause=0.1, save_every=4, resume="last")
    only = Group(run, "g0").wait_for(lambda group: group.commits > 12)
    only.kill()
    plain = undisturbed(replace(run, resume=None))
    again = Group(run, "g0")
    assert_equal(again, plain)
    assert "elastic: resuming from disk at step" in again.log
    folder = run.folder / "as_fsdp_auto"
    folder.mkdir()
    saved = str(run.folder / "saves" / "epoch=1-step=12.ckpt")
    other = replace(run, folder=folder, strategy="fsdp_auto", save_every=0, pause=0.0, resume=saved)
    assert_equal(Group(other, "g0"), plain)


def test_a_group_that_comes_after_the_end_ends_without_training(run: Run) -> None:
    Group(replace(run, epochs=1), "g0").end()
    late = Group(replace(run, epochs=1), "g1")
    assert late.exit_code() == 0, late.log
    assert "elastic: this run is finished at step 10" in late.log
    assert late.notes == []


@pytest.mark.full
def test_the_launcher_ends_well_where_the_run_has_ended(tmp_path: Path) -> None:
    script = tmp_path / "group.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from jobs.elastic import Run, train\n"
        "train(Run(folder=Path.cwd(), epochs=1), 'g0')\n"
    )
    command = [sys.executable, "-c", "from nnx_checkpoint.cli.command import main; main()", "run"]
    for starts in (1, 2):
        words = [*command, "--elastic", "1", "--", str(script)]
        ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
        assert (ended.returncode, "starting it again" in ended.stdout) == (0, False), ended
        assert len(list(tmp_path.glob("g0.*.log"))) == starts
    finished = [log for log in tmp_path.glob("g0.*.log") if "run is finished at step 10" in log.read_text()]
    assert len(finished) == 1


def test_a_lighthouse_that_is_absent_is_named_within_the_timeout(run: Run) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # held, so that no other test's server gets the port
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        error = Group(replace(run, lighthouse=address, options={"connect_timeout": 1.0}), "g0").error()
    assert f"RankLostError: no lighthouse answers at {address} in 1 s" in error


@pytest.mark.full
def test_training_goes_on_while_the_lighthouse_is_gone_and_comes_back(tmp_path: Path) -> None:
    lighthouse = new_lighthouse()
    address = address_of(lighthouse)
    run = Run(folder=tmp_path, lighthouse=address, epochs=10, pause=0.05)
    first, second = Group(run, "g0"), Group(run, "g1")
    both_train(first, second)
    lighthouse.shutdown()
    time.sleep(3)
    lighthouse = new_lighthouse(int(address.rpartition(":")[2]))
    plain = undisturbed(run)
    assert_equal(first, plain)
    assert_equal(second, plain)
    assert_each_sample_once(run, plain)
    lighthouse.shutdown()


@pytest.mark.full
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"samples": 66}, "the training dataset has this many samples: 66 here, and 60 there"),
        ({"batch": 12}, "the global batch has this many samples: 12 here, and 6 there"),
        ({"batch_norm": True}, r"the model is .* parameters .* here, and .* there"),
        ({"options": {"run_id": "another"}}, "the run is another here, and .* there"),
    ],
)
def test_a_group_of_another_run_is_refused_and_the_run_goes_on(
    run: Run, other: dict[str, Any], difference: str
) -> None:
    run = replace(run, pause=0.05, epochs=30)
    first = Group(run, "g0").wait_for(lambda group: group.commits > 2)
    stranger = Group(replace(run, **other), "g1")
    assert re.search(f"UnsupportedError: group 'g1' cannot join group 'g0': {difference}", stranger.error())
    first.kill()


@pytest.mark.full
def test_gradients_that_are_not_finite_in_one_group_let_no_group_step(run: Run) -> None:
    run = replace(run, pause=0.02, options={"min_groups": 2}, poison=("g1", 7))
    first, second = Group(run, "g0"), Group(run, "g1")
    assert "step 7: gradients are not finite; no group steps" in (first.end(), first.log)[1]
    second.end()
    ours, theirs = first.weights(), second.weights()
    assert all(ours[name].equal(theirs[name]) and ours[name].isfinite().all() for name in ours)


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "within"),
    [("32-true", 1e-5), ("bf16-mixed", 3e-2), ("16-mixed", 1e-2), ("bf16-true", 0.3)],
)
def test_groups_train_alike_in_every_precision(run: Run, precision: str, within: float) -> None:
    run = replace(run, precision=precision, pause=0.02, options={"min_groups": 2})
    first, second = Group(run, "g0"), Group(run, "g1")
    first.end()
    second.end()
    ours, theirs = first.weights(), second.weights()
    assert all(ours[name].equal(theirs[name]) and ours[name].isfinite().all() for name in ours)
    assert_equal(first, undisturbed(run), within)


def test_groups_that_decide_differently_are_refused(run: Run) -> None:
    run = replace(run, pause=0.02, options={"min_groups": 2}, plateau_of_group=True)
    first, second = Group(run, "g0"), Group(run, "g1")
    assert "DisagreementError: the groups differ in step" in first.error()
    assert "'lr': 1.0" in second.error()


@pytest.mark.full
def test_what_cannot_be_exact_is_refused_or_said(run: Run) -> None:
    stream = Group(replace(run, iterable=True), "g0").error()
    assert "UnsupportedError: Stream is an IterableDataset" in stream
    manual = Group(replace(run, manual=True), "g1").error()
    assert "steps inside a training_step with manual optimization could not be undone" in manual
    norm = Group(replace(run, batch_norm=True, epochs=1), "g2")
    norm.end()
    assert "net.1 normalise by a group's share of the batch" in norm.log


@pytest.mark.full
def test_data_that_each_group_reads_by_itself_trains_on_after_a_loss(run: Run) -> None:
    run = replace(run, iterable=True, pause=0.05, epochs=15, options={"data": "drop"})
    first, second = Group(run, "g0"), Group(run, "g1")
    both_train(first, second)
    second.kill()
    assert first.end()["ended"] == 150
