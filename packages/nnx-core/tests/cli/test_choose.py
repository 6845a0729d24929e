"""`nnx choose`: every set of answers leads to one strategy that exists, by no more questions than needed."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Callable

import pytest

from nnx_checkpoint.cli.command import main
from nnx_core.cli.choose import CHOICES, QUESTIONS, choose, next_question
from nnx_core.names.catalog import known

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def nnx_choose(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `nnx choose` with typed lines; return exit code, standard output and error."""

    def run(*arguments: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nnx", "choose", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


def every_answer() -> list[dict[str, str]]:
    names = [question.name for question in QUESTIONS]
    return [
        dict(zip(names, words, strict=True))
        for words in itertools.product(*(question.answers for question in QUESTIONS))
    ]


def asked(answers: dict[str, str]) -> dict[str, str]:
    """The answers that are asked for, of somebody with these answers."""
    given: dict[str, str] = {}
    while question := next_question(given):
        given[question.name] = answers[question.name]
    return given


def test_every_set_of_answers_has_a_choice_and_every_choice_a_set_of_answers() -> None:
    chosen = {choose(answers).strategy for answers in every_answer()}
    assert chosen == {choice.strategy for choice in CHOICES}
    firsts = [choose(answers) for answers in every_answer()]
    assert [choice for choice in CHOICES if choice not in firsts] == []


def test_skipped_questions_would_not_have_changed_the_choice() -> None:
    for answers in every_answer():
        assert choose(asked(answers)) is choose(answers), answers


def test_the_common_case_asks_four_and_no_case_asks_more_than_five() -> None:
    assert list(asked({"engine": "no", "failures": "no", "fit": "one", "links": "fast"})) == [
        *("engine", "failures", "fit", "links"),
    ]
    assert max(len(asked(answers)) for answers in every_answer()) == len(QUESTIONS) == 5


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.strategy)
def test_a_choice_names_a_known_strategy_and_known_answers(choice: object) -> None:
    names = {question.name: question.answers for question in QUESTIONS}
    assert isinstance(choice, type(CHOICES[0]))
    assert choice.strategy in {"ddp", *known()}
    assert all(answer in names[name] for name, answer in choice.when.items())
    compile(choice.use, "use", "eval")


def test_the_command_asks_and_keeps_the_result_apart(nnx_choose: Run) -> None:
    code, output, error = nnx_choose("--json", "--engine", "no", typed="1\nwhat\nall\nfast\nBlocks\n")
    assert code == 0
    content = json.loads(output)
    assert content["answers"] == {
        "engine": "no", "failures": "no", "fit": "all", "links": "fast", "layers": "blocks",
    }  # fmt: skip
    assert content["use"] == 'Trainer(strategy="fsdp_auto")'
    assert error.count("Answer with one, all, host, or a number.") == 1
    assert "depend on another engine" not in error
    assert "  2. all: on all devices together\n" in error


def test_the_command_names_the_option_of_a_question_that_nobody_answers(nnx_choose: Run) -> None:
    code, output, error = nnx_choose("--engine", "no", "--failures", "no")
    assert (code, output) == (2, "")
    assert error.endswith(
        "error: there is no answer to 'Where do weights, gradients and optimizer state fit?'.\n"
        "remedy: Pass --fit one, all or host.\n"
    )


def test_an_answer_that_is_not_one_is_refused(nnx_choose: Run) -> None:
    assert nnx_choose("--fit", "maybe") == (
        2, "", "error: fit='maybe' is not allowed.\nremedy: Use one of 'one', 'all', 'host'.\n",
    )  # fmt: skip


def test_a_strategy_that_is_missing_comes_with_its_installation(site: object, nnx_choose: Run) -> None:
    site.hide("nnx-comm")  # type: ignore[attr-defined]
    arguments = ["--engine", "no", "--failures", "no", "--fit", "one", "--links", "slow"]
    code, output, _ = nnx_choose(*arguments)
    assert code == 0
    assert "install:   pip install nnx-comm\n" in output
