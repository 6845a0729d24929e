"""What a check is: one promise of a strategy, and the function that tries it.

Each module or package in `nnx.testing.conformance.checks` is a group of checks. Nothing here runs one (see
`runner`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Literal

from nnx.errors import NnxError
from nnx.spec import Capabilities

if TYPE_CHECKING:
    from nnx.testing.conformance.bench import Bench

__all__ = [
    "GROUPS",
    "Check",
    "CheckFailed",
    "Kind",
    "NotApplicable",
    "Refused",
    "all_checks",
    "check",
    "expect",
    "missing_capability",
]

GROUPS = ("numbers", "stages", "structure", "names", "habits", "checkpoints", "manners")
"""The groups in the order in which they run: what fails first explains most."""

Kind = Literal["backend", "strategy", "lightning"]
"""What stands behind a name: an `nnx.Backend`, a plugin's own Lightning strategy, or one of Lightning's."""

DEADLINE = 60.0
"""Seconds that a check may take before it counts as hung."""


class CheckFailed(NnxError):  # noqa: N818 - a verdict, not an accident
    """The strategy does not keep the promise; the message says what was seen and what was expected."""


class NotApplicable(NnxError):  # noqa: N818
    """The check has nothing to try on this strategy; the message says why."""


class Refused(NnxError):  # noqa: N818
    """The strategy refuses what the check tries, on every rank and with a remedy; the message is its own."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise.

    Attributes:
        name: Unique, lower snake case; the name under which it is reported and chosen.
        group: Module that it comes from; one of `GROUPS`.
        promise: What the strategy promises, in one sentence.
        run: Tries it; raises `CheckFailed` or `NotApplicable`.
        requires: Capabilities without which the promise is not made: ``"clip_by_norm"`` for a flag,
            ``"precisions:bf16-mixed"`` for an entry of a list.
        kinds: What the promise can be asked of.
        full: Only tried in the full profile.
        of_adapter: Whether it tries Lightning's code or the adapter's, which is the same under every engine.
            The suite of this repository tries it on one strategy of each adapter; `nnx conformance` always.
        refusable: Whether a strategy may name the check in `Capabilities.refuses`.
        deadline: Seconds after which it counts as hung.
    """

    name: str
    group: str
    promise: str
    run: Callable[[Bench], None]
    requires: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ("backend", "strategy", "lightning")
    full: bool = False
    of_adapter: bool = False
    refusable: bool = False
    deadline: float = DEADLINE


_CHECKS: dict[str, Check] = {}


def check(
    *requires: str,
    name: str = "",
    kinds: tuple[Kind, ...] = ("backend", "strategy", "lightning"),
    full: bool = False,
    of_adapter: bool = False,
    refusable: bool = False,
    deadline: float = DEADLINE,
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Register a function as a check; its name and the first line of its docstring are the check's.

    Args:
        *requires: See `Check`.
        name: Instead of the function's name, for functions made in a loop.
        kinds: See `Check`.
        full: See `Check`.
        of_adapter: See `Check`.
        refusable: See `Check`.
        deadline: See `Check`.
    """

    def register(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        made = Check(
            name=name or function.__name__,
            group=function.__module__.partition(".checks.")[2].partition(".")[0],
            promise=(function.__doc__ or "").strip().partition("\n")[0],
            run=function,
            requires=requires,
            kinds=kinds,
            full=full,
            of_adapter=of_adapter,
            refusable=refusable,
            deadline=deadline,
        )
        if made.name in _CHECKS or not made.promise:
            where = " and in ".join(one.run.__module__ for one in (_CHECKS.get(made.name), made) if one)
            raise ValueError(f"check {made.name!r} is defined twice or has no docstring: in {where}")
        for requirement in requires:
            missing_capability(Capabilities(), requirement)
        _CHECKS[made.name] = made
        return function

    return register


@cache
def all_checks() -> tuple[Check, ...]:
    """Every check, by group and then in the order of definition."""
    for group in GROUPS:
        importlib.import_module(f"nnx.testing.conformance.checks.{group}")
    return tuple(sorted(_CHECKS.values(), key=lambda one: GROUPS.index(one.group)))


def missing_capability(capabilities: Capabilities, requirement: str) -> str:
    """How the declaration says that a requirement is not met; empty where it is.

    Example:
        >>> missing_capability(Capabilities(fabric=False), "fabric")
        'fabric=False'
        >>> missing_capability(Capabilities(), "precisions:bf16-mixed")
        "precisions without 'bf16-mixed'"
        >>> missing_capability(Capabilities(), "clip_by_norm")
        ''
    """
    flag, _, entry = requirement.partition(":")
    if flag not in {field.name for field in fields(Capabilities)}:
        raise ValueError(f"{flag!r} is not a capability")
    value = getattr(capabilities, flag)
    if entry:
        return "" if entry in value else f"{flag} without {entry!r}"
    return "" if value else f"{flag}=False"


def expect(condition: bool, message: str) -> None:
    """Fail the check unless the condition holds.

    Args:
        condition: What was promised.
        message: What was seen and what was expected.

    Raises:
        CheckFailed: It does not hold.
    """
    if not condition:
        raise CheckFailed(message)
