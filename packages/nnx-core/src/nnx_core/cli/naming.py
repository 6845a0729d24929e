"""Which names and texts a new plugin may have, checked by ``nnx new`` before anything is written.

A name is free if no strategy, distribution or module that this installation or the catalog knows has it.
Nothing is asked of the package index.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys

from nnx_core.catalog import historical, known
from nnx_core.errors import OptionError, PluginError
from nnx_core.plugins import inventory
from nnx_core.registry import StrategyRegistry
from nnx_core.spec import LIGHTNING_NAMES, StrategySpec

__all__ = ["check_distribution", "check_line", "check_strategy"]

_DISTRIBUTION = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# So that the lines of source that hold them stay within the formatter's width.
_LONGEST_NAME = 32
_LONGEST_LINE = 80


def check_distribution(name: str) -> None:
    """Refuse a name under which a distribution could not be published or imported.

    Raises:
        OptionError: With what is wrong, and a name to use instead where there is one.
    """
    _check_length("the distribution", name)
    if not _DISTRIBUTION.fullmatch(name):
        raise OptionError(
            f"the distribution cannot be called {name!r}: expected lower case letters, digits and single "
            "dashes, beginning with a letter.",
            remedy="Choose a name such as 'nnx-mine'.",
        )
    if name == "nnx-core" or name in {entry.distribution for entry in known().values()}:
        raise OptionError(f"{name!r} is a distribution of nnx's catalog.", remedy="Choose another name.")
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or _is_taken(module, name):
        raise OptionError(
            f"the distribution {name!r} would be imported as {module!r}, which is taken.",
            remedy=f"Choose another name, for example 'nnx-{name.removeprefix('nnx-')}'.",
        )


def check_strategy(name: str, *, distribution: str) -> None:
    """Refuse a strategy name that is not valid, or that somebody else provides.

    Args:
        name: The strategy.
        distribution: What is going to provide it; a name that it provides already is its own.

    Raises:
        OptionError: With what is wrong.
    """
    _check_length("the strategy", name)
    try:
        StrategySpec(name, "some.module:Name")
    except PluginError as error:
        raise OptionError(error.message, remedy=error.remedy) from error
    if owner := _owner(name, distribution):
        raise OptionError(
            f"the strategy {name!r} already exists: {owner}.", remedy="Choose another name for yours."
        )


def check_line(what: str, text: str, *, may_be_empty: bool = False) -> None:
    """Refuse a text that does not fit between quotes on one line of TOML, YAML and Python.

    Raises:
        OptionError: It is empty, too long, or has quotes, backslashes, braces or control characters.
    """
    if not text and not may_be_empty:
        raise OptionError(f"the {what} is empty.", remedy="Say it in a few words.")
    if len(text) > _LONGEST_LINE or not text.isprintable() or set(text) & set('"\\{}'):
        raise OptionError(
            f"the {what} {text!r} is not a plain line: expected at most {_LONGEST_LINE} characters, without "
            "double quotes, backslashes, braces and line breaks.",
            remedy="Shorten or reword it.",
        )


def _check_length(what: str, name: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise OptionError(
            f"{what} is called {name!r}, which has {len(name)} characters: expected at most {_LONGEST_NAME}.",
            remedy="Choose a shorter name.",
        )


def _owner(name: str, distribution: str) -> str:
    """Who has the strategy name, other than the distribution itself; empty where nobody has."""
    if name in LIGHTNING_NAMES:
        return "it is one of Lightning's own"
    if name in historical():
        return f"old scripts mean {historical()[name].was} by it"
    if name in known() and known()[name].distribution != distribution:
        return f"the catalog has it from {known()[name].distribution}"
    if name in StrategyRegistry and StrategyRegistry.owner(name).partition(" ")[0] != distribution:
        return f"{StrategyRegistry.owner(name)} provides it here"
    return ""


def _is_taken(module: str, distribution: str) -> bool:
    """Whether something else already answers to this import; an installed plugin of that name is this one."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:  # nothing, or a mere directory of that name
        return False
    return distribution not in {plugin.distribution for plugin in inventory().plugins}
