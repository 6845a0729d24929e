"""The conformance suite selects checks and gives verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import conformance_jobs as jobs
from nnx_conformance import Subject
from nnx_conformance.check import (
    GROUPS,
    Bench,
    Check,
    Reference,
    all_checks,
    check,
    exception_in,
    expect,
    missing_capability,
)
from nnx_conformance.checks.user_patterns.parameters import (
    ParametrizationWithParameters,
    WeightsReadOnRankZero,
)
from nnx_conformance.patterns import try_pattern
from nnx_conformance.pool import WorkerPool
from nnx_conformance.report import Result
from nnx_conformance.runner import Session, select_checks
from nnx_conformance.task import Plain, Task
from nnx_core.errors import NnxError, OptionError, StrategyNotFoundError
from nnx_core.names.spec import Capabilities

NAMES = ("jobs.conformance_names",)


def keeps(bench: Bench) -> None:
    pass


def documented(bench: Bench) -> None:
    """It is never registered."""


def breaks(bench: Bench) -> None:
    expect(False, "seen 3, expected 4.")


@pytest.fixture
def verdict(pool: WorkerPool, tmp_path: Path) -> Callable[..., Result]:
    """Try a function as a check on a strategy."""

    def run(
        body: Callable[[Bench], None],
        *,
        subject: Subject = Subject("ddp"),  # noqa: B008 - frozen
        session: Session | None = None,
        **settings: object,
    ) -> Result:
        made = Check(name="mine", group="numbers", promise="It works.", run=body, **settings)  # type: ignore[arg-type]
        return (session or Session(subject, pool=pool)).try_check(made, tmp_path)

    return run


def test_the_fast_profile_leaves_out_what_only_the_full_one_tries() -> None:
    fast, everything = select_checks(), select_checks(full=True)
    assert everything == list(all_checks())
    assert fast == [check for check in everything if not check.full]


def test_checks_are_chosen_by_name_and_by_group_and_keep_their_order() -> None:
    chosen = [check.name for check in select_checks(["losses_float64", "losses_float32"])]
    assert chosen == ["losses_float32", "losses_float64"]
    group = select_checks(["numbers", "losses_float64"])
    assert group == [check for check in select_checks() if check.group == "numbers"]
    everything = select_checks(["numbers"], full=True)
    assert everything == [check for check in all_checks() if check.group == "numbers"]


def test_what_is_named_is_chosen_from_both_profiles() -> None:
    for rare in (one for one in all_checks() if one.full):
        assert select_checks([rare.name]) == [rare]


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ("losses_float23", "Did you mean 'losses_float32'?"),
        ("number", "Did you mean 'numbers'?"),
        ("zzz", "See `nnx conformance --list`."),
    ],
)
def test_a_check_that_does_not_exist_is_an_error_with_a_suggestion(asked: str, remedy: str) -> None:
    with pytest.raises(OptionError, match=f"there is no check or group '{asked}'") as caught:
        select_checks(["losses_float64", asked])
    assert caught.value.remedy == remedy


def test_every_check_is_named_and_promises_something_and_belongs_to_a_group() -> None:
    checks = all_checks()
    assert len({check.name for check in checks}) == len(checks)
    assert {check.group for check in checks} <= set(GROUPS)
    for one in checks:
        assert one.promise.endswith("."), one.name
        assert one.name not in GROUPS


def test_two_checks_of_one_name_and_checks_without_a_promise_are_refused() -> None:
    with pytest.raises(ValueError, match="'losses_float64' has a second definition or no docstring"):
        check(name="losses_float64")(documented)
    with pytest.raises(ValueError, match="'keeps' has a second definition or no docstring"):
        check()(keeps)


def test_a_requirement_that_is_no_capability_is_refused() -> None:
    with pytest.raises(ValueError, match="'flight' is not a capability"):
        check("flight")(documented)


@pytest.mark.parametrize(
    ("requirement", "missing"),
    [
        ("clip_by_norm", ""),
        ("offload", "offload=False"),
        ("precisions:32-true", ""),
        ("precisions:16-true", "precisions without '16-true'"),
        ("accelerators:cuda", ""),
    ],
)
def test_a_missing_capability_is_said_as_it_is_declared(requirement: str, missing: str) -> None:
    assert missing_capability(Capabilities(), requirement) == missing


def test_a_check_that_ends_has_passed(verdict: Callable[..., Result]) -> None:
    result = verdict(keeps)
    assert (result.verdict, result.detail, result.log) == ("passed", "", "")
    assert (result.check, result.group, result.promise) == ("mine", "numbers", "It works.")


def test_a_check_that_does_not_hold_has_failed_with_what_was_seen(verdict: Callable[..., Result]) -> None:
    result = verdict(breaks)
    assert (result.verdict, result.detail, result.log) == ("failed", "seen 3, expected 4.", "")


def test_a_check_that_breaks_down_has_failed_with_its_traceback(verdict: Callable[..., Result]) -> None:
    def stumbles(bench: Bench) -> None:
        raise KeyError("in the check itself")

    result = verdict(stumbles)
    assert (result.verdict, result.detail) == ("failed", "KeyError: 'in the check itself'")
    assert "in stumbles" in result.log


def test_a_check_that_has_nothing_to_try_is_skipped(verdict: Callable[..., Result]) -> None:
    result = verdict(lambda bench: bench.not_applicable("there is no engine in it"))
    assert (result.verdict, result.detail) == ("skipped", "there is no engine in it")


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (keeps, ("undeclared", "works, although the strategy declares clip_by_norm=False")),
        (breaks, ("skipped", "the strategy declares clip_by_norm=False")),
    ],
)
def test_what_is_declared_false_is_tried_all_the_same(
    verdict: Callable[..., Result], body: Callable[[Bench], None], expected: tuple[str, str]
) -> None:
    result = verdict(body, subject=Subject("modest", imports=NAMES), requires=("clip_by_norm", "trainer"))
    assert (result.verdict, result.detail) == expected
    assert not result.log


def test_what_is_declared_true_and_fails_has_failed(verdict: Callable[..., Result]) -> None:
    assert verdict(breaks, requires=("clip_by_norm",)).verdict == "failed"


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("strategy", "kind", "what"),
    [
        ("ddp", "lightning", "strategy of Lightning itself"),
        ("tiny", "backend", "Backend"),
        ("tiny_lightning", "strategy", "raw Lightning strategy"),
    ],
)
def test_a_promise_is_asked_only_of_the_kinds_that_make_it(
    verdict: Callable[..., Result], strategy: str, kind: str, what: str
) -> None:
    others = tuple(sorted({"backend", "strategy", "lightning"} - {kind}))
    result = verdict(breaks, subject=Subject(strategy), kinds=others)
    assert (result.verdict, result.detail) == ("skipped", f"does not apply to a {what}")
    assert verdict(breaks, subject=Subject(strategy), kinds=(kind,)).verdict == "failed"


def test_a_rank_that_raises_is_named_with_its_error_on_one_line(verdict: Callable[..., Result]) -> None:
    result = verdict(lambda bench: bench.run(jobs.fail_on_rank, 1, world_size=3))
    assert (result.verdict, result.detail) == ("failed", "ddp: rank 1 of 3: RuntimeError: planted in a job")
    assert "in fail_on_rank" in result.log
    assert "printed before the end" in result.log


def test_a_job_that_fails_in_one_plain_process_is_not_blamed_on_the_strategy(
    verdict: Callable[..., Result],
) -> None:
    result = verdict(lambda bench: bench.alone(jobs.fail_on_rank, 0))
    assert result.verdict == "failed"
    assert result.detail == "the reference (one plain process) fails: RuntimeError: planted in a job"
    assert "in fail_on_rank" in result.log


def test_a_check_that_hangs_is_ended_and_the_next_one_runs(
    pool: WorkerPool, verdict: Callable[..., Result]
) -> None:
    session = Session(Subject("ddp"), pool=pool)
    started = time.monotonic()
    result = verdict(lambda bench: bench.run(jobs.sleep, 600.0, world_size=1), session=session, deadline=3.0)
    assert time.monotonic() - started < 30
    assert result.verdict == "failed"
    assert result.detail.startswith("ddp: rank 0 of 1: no answer in time (")
    assert "in sleep" in result.log
    assert verdict(lambda bench: bench.run(jobs.name_of), session=session).verdict == "passed"


def test_jobs_run_with_the_strategy_or_with_another_one(verdict: Callable[..., Result]) -> None:
    seen: list[int] = []

    def look(bench: Bench) -> None:
        seen.append(bench.run(jobs.name_of, world_size=2))
        seen.append(bench.run(jobs.name_of, world_size=1, subject=Subject("auto")))
        seen.append(bench.alone(jobs.name_of))

    assert verdict(look, subject=Subject("tiny")).verdict == "passed"
    assert seen == [["tiny", "tiny"], ["auto"], "auto"]


def test_a_result_of_one_process_is_computed_once_for_all_strategies(pool: WorkerPool) -> None:
    runs = []

    class Counting(WorkerPool):
        def run(self, *args: object, **kwargs: object) -> list[object]:  # type: ignore[override]
            runs.append(args)
            return pool.run(*args, **kwargs)  # type: ignore[arg-type]

    reference = Reference(Counting())
    assert [reference.run(jobs.name_of) for _ in range(3)] == ["auto"] * 3
    assert len(runs) == 1
    reference.run(jobs.sleep, 0.0)
    reference.run(jobs.sleep, 0.01)
    assert len(runs) == 3


def test_numbers_are_compared_at_three_ranks_only_where_everything_is_tried(pool: WorkerPool) -> None:
    sizes = []
    look = Check(name="look", group="numbers", promise="", run=lambda bench: sizes.append(bench.world_sizes))
    for full in (False, True):
        Session(Subject("ddp"), pool=pool, full=full).try_check(look, Path())
    assert sizes == [(2,), (2, 3)]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("most", "ranks"), [(3, 2), (2, 2), (1, 1)])
def test_checks_run_on_two_ranks_or_on_one(pool: WorkerPool, most: int, ranks: int) -> None:
    seen: list[int] = []

    def look(bench: Bench) -> None:
        runs = [bench.run(jobs.name_of)]
        runs += [bench.run_once(jobs.name_of)]
        runs += [bench.run(jobs.name_of, world_size=size) for size in bench.world_sizes]
        seen.extend(map(len, runs))

    session = Session(Subject("ddp"), pool=pool, ranks=most)
    result = session.try_check(Check(name="look", group="numbers", promise="", run=look), Path())
    assert (result.verdict, seen) == ("passed", [ranks] * 3), result.detail


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("run", [Bench.run, Bench.run_once])
def test_a_check_that_takes_several_ranks_is_skipped_where_one_is_tried(
    pool: WorkerPool, run: Callable[..., list[object]]
) -> None:
    def take(bench: Bench) -> None:
        for ranks in (1, 2):
            run(bench, jobs.name_of, world_size=ranks)

    asked = Check(name="take", group="numbers", promise="", run=take)
    ends = {}
    for most in (1, 2):
        result = Session(Subject("ddp"), pool=pool, ranks=most).try_check(asked, Path())
        ends[most] = (result.verdict, result.detail)
    assert ends == {1: ("skipped", "the check needs 2 ranks, and there are 1"), 2: ("passed", "")}


def test_an_unknown_name_is_explained_without_starting_workers() -> None:
    with pytest.raises(StrategyNotFoundError, match="tinny"):
        Session(Subject("tinny"), pool=WorkerPool(size=0))


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (Subject("nnx_tiny.nowhere:Backend"), "No module named 'nnx_tiny.nowhere'"),
        (Subject("nnx_tiny.backend:Missing"), "has no attribute 'Missing'"),
        (
            Subject("tiny", imports=("does_not_exist",)),
            "ModuleNotFoundError: No module named 'does_not_exist'",
        ),
        (Subject("tiny", options={"bucket_megabytes": 0}), "bucket_megabytes=0 is not a positive size"),
        (Subject("tiny", options={"buckets": 2}), "buckets"),
        (Subject("tiny_lightning", options={"buckets": 2}), "unexpected keyword argument 'buckets'"),
    ],
)
def test_what_cannot_be_built_is_explained_once(pool: WorkerPool, subject: Subject, message: str) -> None:
    with pytest.raises(NnxError, match=f"'{subject.strategy}' cannot be checked: .*{message}") as caught:
        Session(subject, pool=pool)
    assert caught.value.remedy == "`nnx list` has the names, and `nnx show NAME` the options."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the process died with exit code -9", "the process died with exit code -9"),
        ('Traceback:\n  File "x.py", line 1, in f\n    g()\n    ^^^\nKeyError: 1\n', "KeyError: 1"),
        ('  File "x.py", line 1, in f\nRuntimeError', "RuntimeError"),
        ('  File "x.py", line 1\n    g()\nE: a\n    b\n', "E: a b"),
        ("x" * 20 + " y" * 400, "x" * 20 + " y" * 288 + " ..."),
    ],
)
def test_a_traceback_is_told_in_one_line(text: str, expected: str) -> None:
    assert exception_in(text) == expected


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("strategy", "verdict", "detail"),
    [
        ("refuses_as_declared", "skipped", "refused, as declared: UnsupportedError: layer 'head'"),
        ("refuses", "failed", "refused, but not declared in `refuses`: UnsupportedError: layer 'head'"),
        (
            "tinybackend_as_declared",
            "undeclared",
            "works, although the strategy declares refuses='parametrization_with_parameters'",
        ),
        ("refuseslate_as_declared", "failed", "the loss of batch 0 is"),
        ("refusesononerank_as_declared", "skipped", "refused, as declared: UnsupportedError: layer 'head'"),
        ("hasnoremedy_as_declared", "failed", "UnsupportedError: layer 'head' is parametrized."),
        ("handson_as_declared", "failed", "IndexError"),
        ("breaks_as_declared", "failed", "RuntimeError: Connection reset by peer"),
    ],
)
def test_a_user_pattern_works_or_is_refused_with_a_remedy_as_declared(
    pool: WorkerPool, tmp_path: Path, strategy: str, verdict: str, detail: str
) -> None:
    result = _result_of(
        "parametrization_with_parameters", ParametrizationWithParameters, strategy, pool, tmp_path
    )
    assert (result.verdict, detail in result.detail) == (verdict, True), result.detail


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "verdict", "detail"),
    [
        ("refusesononerank_as_declared", "skipped", "refused, as declared: UnsupportedError: layer"),
        ("refusesononerank", "failed", "refused, but not declared in `refuses`: UnsupportedError: layer"),
        ("failsbesidearefusal_as_declared", "failed", "rank 0 of 2: IndexError"),
        ("breaks_as_declared", "failed", "RuntimeError: Connection reset by peer"),
    ],
)
def test_where_ranks_differ_one_may_refuse_alone_and_its_end_releases_the_others(
    pool: WorkerPool, tmp_path: Path, strategy: str, verdict: str, detail: str
) -> None:
    result = _result_of("weights_read_on_rank_zero", WeightsReadOnRankZero, strategy, pool, tmp_path)
    assert (result.verdict, detail in result.detail) == (verdict, True), result.detail


def _result_of(name: str, model: type[Plain], strategy: str, pool: WorkerPool, directory: Path) -> Result:
    def run(bench: Bench) -> None:
        try_pattern(bench, {name: Task(model=model)}, name, 2)

    pattern_check = replace(next(one for one in all_checks() if one.name == name), run=run)
    session = Session(Subject(strategy, imports=("jobs.refusing_strategies",)), pool=pool)
    return session.try_check(pattern_check, directory)
