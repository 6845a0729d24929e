"""`nnx conformance` from a user's point of view."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nnx_checkpoint.cli.command import main
from nnx_conformance import command as conformance
from nnx_conformance import runner
from nnx_conformance.check import all_checks
from nnx_conformance.pool import WorkerPool
from nnx_conformance.report import Result

Command = Callable[..., tuple[int, str, str]]
NAMES = ("--import", "jobs.conformance_names")


@pytest.fixture
def nnx_conformance(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Run the command in this process, on the workers of the tests; exit code, standard output and error."""
    monkeypatch.setenv("COLUMNS", "110")  # pytest-xdist sets what it likes

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(runner, "WorkerPool", lambda **_: nullcontext(pool))
        monkeypatch.setattr(sys, "argv", ["nnx", "conformance", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


def lines(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines()]


def test_the_list_has_every_check_and_its_promise(nnx_conformance: Command) -> None:
    code, output, error = nnx_conformance("--list")
    assert (code, error) == (0, "")
    shown = lines(output)
    assert shown[0] == "GROUP CHECK PROFILE PROMISE"
    assert shown[1:] == [
        f"{check.group} {check.name} {'full' if check.full else 'fast'} {check.promise}"
        for check in all_checks()
    ]


def test_the_list_as_json_also_has_what_each_check_requires(nnx_conformance: Command) -> None:
    code, output, error = nnx_conformance("--list", "--json")
    assert (code, error) == (0, "")
    listed = json.loads(output)
    assert [row["check"] for row in listed] == [check.name for check in all_checks()]
    clipping = next(row for row in listed if row["check"] == "clip_by_norm")
    assert (clipping["group"], clipping["requires"], clipping["profile"]) == (
        "numbers",
        ["clip_by_norm"],
        "fast",
    )


def test_a_strategy_that_keeps_its_promises(nnx_conformance: Command, tmp_path: Path) -> None:
    badge = tmp_path / "badge.svg"
    code, output, error = nnx_conformance(
        "tiny", "--only", "losses_float64", "--only", "losses_float32",
        "--option", "bucket_megabytes=0.001", "--badge", str(badge),
    )  # fmt: skip
    assert (code, error) == (0, "")
    shown = lines(output)
    assert shown[0].startswith("passed numbers losses_float32 ")
    assert " losses_float64 " in shown[1]
    assert "tiny (backend, nnx_tiny.backend:TinyBackend, from nnx-tiny 0.1.0)" in shown
    assert any(line.startswith("fast profile, python 3.") and "torch 2." in line for line in shown)
    assert ElementTree.fromstring(badge.read_text()).attrib["aria-label"].endswith("2 checks passed")


@pytest.mark.full
def test_a_strategy_that_breaks_a_promise_is_explained_at_the_end(nnx_conformance: Command) -> None:
    code, output, error = nnx_conformance(
        "jobs.conformance_names:ForgetsClipping", "--only", "clip_by_norm", "--only", "losses_float32"
    )
    assert code == 1
    shown = lines(output)
    assert shown[0].startswith("passed numbers losses_float32 ")
    assert shown[1].startswith("FAILED numbers clip_by_norm ")
    assert shown[1].endswith(" s"), "the reason is too long for a line of the table"
    explained = shown[shown.index("FAILED clip_by_norm") :]
    assert explained[1].startswith("promised: ")
    assert explained[2].startswith("found: ") and "rank 0 of 2" in explained[2]
    assert shown[-1].startswith("1 passed, 1 failed in ")
    assert all(len(line) <= 110 for line in output.splitlines())
    assert error == "", "there is no traceback to offer"


@pytest.mark.full
def test_what_is_declared_false_says_so_on_its_line(nnx_conformance: Command) -> None:
    code, output, _ = nnx_conformance("modest", *NAMES, "--only", "clip_by_norm")
    assert code == 0
    assert lines(output)[0].startswith("undeclared numbers clip_by_norm ")
    assert lines(output)[0].endswith(" works, although the strategy declares clip_by_norm=False")
    code, output, _ = nnx_conformance("forgetful", *NAMES, "--only", "clip_by_norm")
    assert code == 0
    assert lines(output)[0].endswith(" s the strategy declares clip_by_norm=False")


def test_tracebacks_are_printed_when_asked_for(nnx_conformance: Command) -> None:
    arguments = ("jobs.conformance_names:Stumbles", "--only", "losses_float32")
    code, output, error = nnx_conformance(*arguments)
    assert code == 1
    assert "RuntimeError: planted in the engine" in output
    assert "in parallelize" not in output
    assert error == "--verbose prints the tracebacks; --only NAME repeats a single check.\n"
    code, output, error = nnx_conformance(*arguments, "--verbose")
    assert (code, error) == (1, "")
    assert "in parallelize" in output


def test_json_is_alone_on_standard_output(nnx_conformance: Command) -> None:
    code, output, error = nnx_conformance(
        "jobs.conformance_names:Stumbles", "--only", "losses_float32", "--json"
    )
    assert code == 1
    report = json.loads(output)
    assert (report["ok"], report["kind"], report["summary"]) == (False, "backend", "1 failed")
    assert "in parallelize" in report["results"][0]["log"]
    assert lines(error)[0].startswith("FAILED numbers losses_float32 ")


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tinny",), "Did you mean"),
        (("tiny", "--only", "losses_float23"), "Did you mean 'losses_float32'?"),
        (("tiny", "--option", "bucket_megabytes"), "Write --option name=value."),
        ((), "Which strategy?"),
    ],
)
def test_wrong_usage_has_exit_code_2_and_says_what_to_write(
    nnx_conformance: Command, arguments: tuple[str, ...], message: str
) -> None:
    code, output, error = nnx_conformance(*arguments)
    assert (code, output) == (2, "")
    assert message in error


def test_a_strategy_that_cannot_be_built_has_exit_code_1(nnx_conformance: Command) -> None:
    code, output, error = nnx_conformance("tiny", "--option", "bucket_megabytes=0", "--only", "clip_by_norm")
    assert (code, output) == (1, "")
    assert "'tiny' cannot be checked: " in error
    assert "bucket_megabytes=0 is not a positive size. Pass, say, 25." in error
    assert "remedy: " in error


@pytest.mark.full
def test_the_command_starts_workers_of_its_own_and_leaves_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nnx", "conformance", "ddp", "--only", "losses_float32", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["strategy"], report["kind"], report["summary"]) == ("ddp", "lightning", "1 passed")
    assert list(tmp_path.iterdir()) == []


def test_help_does_not_import_torch(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_python(
        """
        import sys
        from nnx_checkpoint.cli.command import main
        sys.argv = ["nnx", "conformance", "--help"]
        try:
            main()
        finally:
            assert not {"torch", "lightning", "numpy"} & set(sys.modules)
        """
    )
    assert "--badge" in done.stdout


def test_options_are_literals_where_they_can_be() -> None:
    parsed = conformance.parse_options(["a=3", "b=text", "c=[1, 'x']", "d=None", "e=x=y", "f="])
    assert parsed == {"a": 3, "b": "text", "c": [1, "x"], "d": None, "e": "x=y", "f": ""}


@pytest.mark.parametrize("columns", [20, 80])
def test_long_explanations_are_wrapped_and_say_everything(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    words = [f"word{number}" for number in range(60)]
    conformance._print_wrapped("found: " + " ".join(words))
    shown = capsys.readouterr().out
    assert shown.split() == ["found:", *words]
    assert max(len(line) for line in shown.splitlines()) <= max(60, columns)


def test_a_terminal_sees_which_check_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    announce = conformance._announcing(2)
    for check in all_checks()[:2]:
        announce(check)
        conformance._show(Result(check.name, check.group, check.promise, "passed", "", 1.0))
    captured = capsys.readouterr()
    first, second = (check.name for check in all_checks()[:2])
    assert captured.err == f"\r\x1b[K[1/2] {first} ...\r\x1b[K\r\x1b[K[2/2] {second} ...\r\x1b[K"
    assert [line.split()[2] for line in captured.out.splitlines()] == [first, second]


def test_one_rank_is_enough_and_four_are_too_many(nnx_conformance: Command) -> None:
    code, output, _ = nnx_conformance("ddp", "--only", "losses_float64", "--ranks", "1")
    assert code == 0 and "1 passed" in output
    code, _, errors = nnx_conformance("ddp", "--only", "losses_float64", "--ranks", "4")
    assert code == 2 and "--ranks" in errors


def test_the_accelerator_reaches_the_trainer(nnx_conformance: Command) -> None:
    code, output, _ = nnx_conformance("ddp", "--only", "losses_float64", "--accelerator", "abacus")
    assert code == 1
    assert "accelerator='abacus'" in " ".join(output.split()).replace("`", "")
