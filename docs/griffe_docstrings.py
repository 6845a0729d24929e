"""Teach mkdocstrings the docstring conventions of nnx while it builds the reference.

Docstrings use `Example:`, of which griffe knows only the plural. Fields of dataclasses have their description
in `option(default, help=...)`; the page shows that default and that description. No other code loads this.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import Attribute, Docstring, ExprCall, ExprKeyword, Extension, Object

_SINGULAR = re.compile(r"^(\s*)Example:\s*$", re.MULTILINE)
_ONE_LINE = re.compile(r"^(\s*)``([^`\n]+)``$", re.MULTILINE)
_BEFORE_A_BLOCK = re.compile(r"::$", re.MULTILINE)
_FIELDS = ("option", "_capability")


class ReadOurDocstrings(Extension):
    """Gives griffe the names and values that it expects."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Let examples become highlighted code, and end the sentence before a block as Markdown does."""
        if obj.docstring is not None:
            text = _SINGULAR.sub(r"\1Examples:", obj.docstring.value)
            text = _ONE_LINE.sub(r"\1```python\n\1\2\n\1```", text)
            obj.docstring.value = _BEFORE_A_BLOCK.sub(":", text)

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        """Let a field have its default and its help."""
        call = attr.value
        if not isinstance(call, ExprCall) or str(call.function) not in _FIELDS:
            return
        positional = [item for item in call.arguments if not isinstance(item, ExprKeyword)]
        named = {item.name: item.value for item in call.arguments if isinstance(item, ExprKeyword)}
        text = named.get("help") or positional[1]
        attr.docstring = Docstring(str(_literal(text)), parent=attr, lineno=attr.lineno)
        attr.value = positional[0] if positional else None


def _literal(text: Any) -> object:
    """The text that an expression stands for; an f-string as it is written."""
    try:
        return ast.literal_eval(str(text))
    except ValueError:
        return str(text).removeprefix("f").strip("'\"")
