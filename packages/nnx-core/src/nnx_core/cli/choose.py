"""``nnx choose``: a strategy from the answers to at most five questions.

`QUESTIONS` and `CHOICES` are the only source of the decision: ``docs/choosing.md`` shows the same two tables,
and a test compares them. Reads no plugin but to say how to install one; imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from typing_extensions import TypedDict

from nnx_checkpoint.cli.output import print_error, print_json, print_note, print_pairs
from nnx_core.errors import OptionError
from nnx_core.names.catalog import known
from nnx_core.names.registry import StrategyRegistry
from nnx_core.options import check_choice

__all__ = ["CHOICES", "QUESTIONS", "Choice", "Question", "choose", "next_question", "run"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the meaning of each answer by its word."""

    name: str
    text: str
    answers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy, chosen if every answer in `when` was given and no choice above it fits.

    Attributes:
        when: The required answers, by the name of the question.
        strategy: The name of the strategy.
        reason: One sentence without a full stop.
        extra: Arguments of ``nnx.strategy``, beyond the name.
        trainer: Arguments of the Trainer, beyond the strategy.
    """

    when: Mapping[str, str]
    strategy: str
    reason: str
    extra: str = ""
    trainer: str = ""

    @property
    def use(self) -> str:
        """The line of code.

        Example:
            >>> Choice({}, "bagua", "", extra='codec="int8"').use
            'Trainer(strategy=nnx.strategy("bagua", codec="int8"))'
        """
        strategy = f'nnx.strategy("{self.strategy}", {self.extra})' if self.extra else f'"{self.strategy}"'
        return f"Trainer({', '.join(filter(None, [f'strategy={strategy}', self.trainer]))})"


QUESTIONS = (
    Question(
        "engine",
        "Does your code depend on another engine?",
        {
            "no": "no, or only its checkpoints",
            "deepspeed": "on DeepSpeed: its engine or its config files",
            "fairscale": "on fairscale's FSDP, OSS or ShardedDDP",
        },
    ),
    Question(
        "failures",
        "Do machines fail, join or leave while you train?",
        {"no": "no, or a restart is fine", "yes": "yes, and training must go on"},
    ),
    Question(
        "fit",
        "Where do weights, gradients and optimizer state fit?",
        {
            "one": "on each device",
            "all": "on all devices together",
            "host": "only with the help of host memory",
        },
    ),
    Question(
        "links",
        "How fast are the links between devices?",
        {
            "fast": "fast between all devices",
            "nodes": "fast within a node, slow between nodes",
            "slow": "slow between all devices",
        },
    ),
    Question(
        "layers",
        "Which layers does the model have?",
        {
            "blocks": "repeated blocks, as a transformer has",
            "other": "no repeated blocks",
            "large": "single layers that are too large for one device",
        },
    ),
)
"""The questions, in the order of asking."""

CHOICES = (
    Choice(
        {"engine": "deepspeed", "fit": "one"},
        "nnx_deepspeed_1",
        "DeepSpeed shards the optimizer state, and its checkpoints resume under every strategy",
    ),
    Choice(
        {"engine": "deepspeed", "fit": "all"},
        "nnx_deepspeed_3",
        "DeepSpeed shards parameters, gradients and optimizer state",
    ),
    Choice(
        {"engine": "deepspeed"},
        "nnx_deepspeed_3_cpu",
        "DeepSpeed shards all model states, and keeps them in host memory",
    ),
    Choice(
        {"engine": "fairscale", "fit": "one"},
        "fairscale_sharded",
        "ShardedDDP with its bugs fixed, on today's torch",
    ),
    Choice(
        {"engine": "fairscale"},
        "fairscale_fsdp",
        "fairscale's FSDP on today's torch; fsdp_auto resumes its checkpoints",
    ),
    Choice(
        {"failures": "yes", "fit": "one"},
        "torchft_ddp",
        "a killed group costs seconds, and the weights are those of an undisturbed run",
    ),
    Choice(
        {"failures": "yes", "fit": "all"},
        "torchft_hsdp",
        "a killed group costs seconds, and each group shards the model over its processes",
    ),
    Choice(
        {"failures": "yes"},
        "colossalai",
        "no elastic strategy offloads; restarted processes resume from copies in memory",
        extra="memory_checkpoint=5",
    ),
    Choice(
        {"fit": "one", "links": "fast"},
        "ddp",
        "replication is fastest; this checkpoint moves to any other strategy later",
        trainer="plugins=[nnx.CheckpointIO()]",
    ),
    Choice(
        {"fit": "one", "links": "nodes"},
        "bagua",
        "gradients travel in a quarter of the bytes of ddp; the loss comes near that of ddp",
        extra='codec="int8"',
    ),
    Choice(
        {"fit": "one"},
        "diloco",
        "weights travel every 20 steps instead of gradients in each; the loss differs from that of ddp",
    ),
    Choice(
        {"fit": "all", "links": "nodes", "layers": "large"},
        "nnscaler_hybrid",
        "stages across the slow links, tensor parallelism within a node",
    ),
    Choice(
        {"fit": "all", "layers": "large"},
        "nnscaler_tp",
        "weights are split within each layer, without changes to the model",
    ),
    Choice(
        {"fit": "all", "links": "nodes"},
        "fsdp_hybrid",
        "parameters travel within a node, which must hold the model, and gradients between nodes",
    ),
    Choice(
        {"fit": "all", "links": "slow"},
        "nnscaler_pp",
        "each device holds some of the layers, and only activations travel",
    ),
    Choice(
        {"fit": "all", "layers": "other"},
        "nnscaler_zero",
        "parameters, gradients and optimizer state are sharded for any model",
    ),
    Choice(
        {"fit": "all"},
        "fsdp_auto",
        "each rank stores its shard; layers are wrapped automatically, and the log gives the reason",
    ),
    Choice(
        {"fit": "host"},
        "colossalai",
        "a planner offloads as much as your memory limits ask for",
    ),
)
"""The strategies; the first whose answers were given is chosen."""


class Chosen(TypedDict):
    """The output of ``nnx choose --json``.

    Attributes:
        answers: The answers that decided, by the name of the question.
        use: The line of code.
        install: The command that installs the strategy; empty if it can be used.
        next: The commands to run next.
    """

    answers: dict[str, str]
    strategy: str
    reason: str
    use: str
    install: str
    next: list[str]


def next_question(answers: Mapping[str, str]) -> Question | None:
    """Return the first question whose answer can still change the choice; None if the choice is made.

    Example:
        >>> next_question({"engine": "no", "failures": "no", "fit": "one"}).name
        'links'
        >>> next_question({"engine": "no", "failures": "no", "fit": "host"})
    """
    unanswered: set[str] = set()
    for candidate in _candidates(answers):
        missing = candidate.when.keys() - answers.keys()
        if not missing:
            break
        unanswered |= missing
    return next((question for question in QUESTIONS if question.name in unanswered), None)


def choose(answers: Mapping[str, str]) -> Choice:
    """Return the choice for answers after which no question is left.

    Example:
        >>> choose({"engine": "no", "failures": "no", "fit": "host"}).strategy
        'colossalai'
    """
    return next(_candidates(answers))


def run(given: Mapping[str, str | None], *, as_json: bool) -> int:
    """Print the chosen strategy, after asking the questions that have no answer; return 2 without answers."""
    try:
        answers = {name: answer for name, answer in given.items() if answer is not None}
        for question in QUESTIONS:
            if question.name in answers:
                check_choice(question.name, answers[question.name], tuple(question.answers))
        while unanswered := next_question(answers):
            answers[unanswered.name] = _ask(unanswered)
    except OptionError as error:
        print_error(error)
        return 2
    _print(choose(answers), answers, as_json=as_json)
    return 0


def _candidates(answers: Mapping[str, str]) -> Iterator[Choice]:
    """Yield the choices that contradict no answer."""
    for choice in CHOICES:
        if all(answers.get(name, needed) == needed for name, needed in choice.when.items()):
            yield choice


def _ask(question: Question) -> str:
    """Return the user's answer: the word or its number; the user may retry."""
    words = list(question.answers)
    # On standard error, so that the result stays alone on standard output.
    print_note(question.text)
    for number, (word, meaning) in enumerate(question.answers.items(), start=1):
        print_note(f"  {number}. {word}: {meaning}")
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        if not (line := sys.stdin.readline()):
            raise OptionError(
                f"there is no answer to {question.text!r}.",
                remedy=f"Pass --{question.name} {', '.join(words[:-1])} or {words[-1]}.",
            )
        answer = line.strip().lower()
        if answer.isdecimal() and 0 < int(answer) <= len(words):
            return words[int(answer) - 1]
        if answer in words:
            return answer
        print_note(f"Answer with {', '.join(words)}, or a number.")


def _print(choice: Choice, answers: Mapping[str, str], *, as_json: bool) -> None:
    name = choice.strategy
    install = "" if name not in known() or name in StrategyRegistry else known()[name].install
    commands = [f"nnx show {name}", f"nnx plan my.models:Net --strategy {name}"]
    chosen: Chosen = {
        "answers": {
            question.name: answers[question.name] for question in QUESTIONS if question.name in answers
        },
        "strategy": name,
        "reason": choice.reason,
        "use": choice.use,
        "install": install,
        "next": commands,
    }
    if as_json:
        print_json(chosen)
        return
    print_pairs(
        [
            ("strategy", name),
            ("reason", choice.reason),
            ("install", install),
            ("use it", choice.use),
            *(("next", command) for command in commands),
        ]
    )
