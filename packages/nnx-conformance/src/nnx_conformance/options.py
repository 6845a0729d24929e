"""Parse the options of strategies, as ``name=value``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from nnx_core.errors import OptionError

_WORDS = {"true": "True", "false": "False", "none": "None"}
"""Words of command lines for Python literals."""


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """Parse ``name=value`` options; a value that is no Python literal is text.

    Example:
        >>> parse_options(["min_num_params=100", "state_dict_type=sharded"])
        {'min_num_params': 100, 'state_dict_type': 'sharded'}
        >>> parse_options(["find_unused_parameters=true"])
        {'find_unused_parameters': True}

    Raises:
        OptionError: An option has no ``=``.
    """
    parsed = {}
    for option in options:
        name, sign, value = option.partition("=")
        if not sign:
            raise OptionError(f"--option {option!r} has no value.", remedy="Write --option name=value.")
        try:
            parsed[name] = ast.literal_eval(_WORDS.get(value, value))
        except (ValueError, SyntaxError):
            parsed[name] = value
    return parsed
