"""Write names, sizes and arguments of one program as Python code, for rules.

`Names` returns identifiers. `OpWriter` is the `nnx_nnscaler.rules.rule.Writer` of one operator. Neither knows
placements beyond the size of a shard.
"""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnx_nnscaler.codegen.spelling import spell
from nnx_nnscaler.ir.graph import Argument, Code, Dim, Make, Op, Ref, Size, TensorMeta, text_of
from nnx_nnscaler.ir.placement import Placement, R

_TAKEN = frozenset(
    {"rt", "m", "w", "c", "torch", "F", "checkpoint", "math", "inf", "nan", "forward", "layer", "i", "_"}
)


class Names:
    """Identifiers of one function: unique, and none hides a builtin or a name that programs use.

    Example:
        >>> names = Names()
        >>> names.new("add"), names.new("add"), names.new("class"), names.new("w"), names.new("0.x")
        ('add', 'add_1', 'class_', 'w_', '_0_x')
    """

    def __init__(self) -> None:
        self._used: set[str] = set()

    def new(self, wish: str) -> str:
        """Return an identifier as close to the wish as possible."""
        name = re.sub(r"\W", "_", wish)
        if not name or name[0].isdigit():
            name = f"_{name}"
        if (
            keyword.iskeyword(name)
            or keyword.issoftkeyword(name)
            or hasattr(builtins, name)
            or name in _TAKEN
        ):
            name = f"{name}_"
        found, count = name, 0
        while found in self._used:
            count += 1
            found = f"{name}_{count}"
        self._used.add(found)
        return found


@dataclass(frozen=True, slots=True)
class BoundRef(Ref):
    """A reference with the code of the value in the placement of this use."""

    code: str = ""


def bound(argument: Argument, codes: list[str]) -> Argument:
    """Return an argument with every reference bound to the next of these codes."""
    if isinstance(argument, Ref):
        return BoundRef(argument.name, codes.pop(0))
    if isinstance(argument, list):
        return [bound(item, codes) for item in argument]
    if isinstance(argument, tuple):
        return tuple(bound(item, codes) for item in argument)
    if isinstance(argument, dict):
        return {key: bound(item, codes) for key, item in argument.items()}
    if isinstance(argument, Make):
        return Make(argument.type, bound(argument.fields, codes))
    return argument


def part_of(text: str, size: int) -> str:
    """Return the code of one rank's shard of a size.

    Example:
        >>> part_of("16", 2), part_of("B", 2), part_of("B + 1", 2), part_of("B", 1)
        ('8', 'B // 2', '(B + 1) // 2', 'B')
    """
    if size == 1:
        return text
    if text.isdigit():
        return str(int(text) // size)
    return f"{text} // {size}" if re.fullmatch(r"[\w*]+", text) else f"({text}) // {size}"


class OpWriter:
    """Writes the code of one operator, whose references are already bound.

    Args:
        size: The number of ranks of the unit.
        codes: The code of every operand by its name in the graph, for references that a rule makes itself.
        classes: The code of the classes of outputs, by `Make.type`.
    """

    def __init__(self, size: int, codes: dict[str, str], classes: Mapping[str, str]) -> None:
        self.size = size
        self._codes = codes
        self._classes = classes

    def value(self, argument: Argument) -> str:
        """Return an argument as Python code."""
        if isinstance(argument, Ref):
            return argument.code if isinstance(argument, BoundRef) else self._codes[argument.name]
        if isinstance(argument, (Size, Code)):
            return argument.expr if isinstance(argument, Size) else argument.text
        if isinstance(argument, (list, tuple, dict, Make)):
            return self._container(argument)
        return _literal(argument)

    def _container(self, argument: list[Any] | tuple[Any, ...] | dict[str, Any] | Make) -> str:
        if isinstance(argument, list):
            return f"[{', '.join(map(self.value, argument))}]"
        if isinstance(argument, tuple):
            return f"({', '.join(map(self.value, argument))}{',' if len(argument) == 1 else ''})"
        if isinstance(argument, dict):
            return f"{{{', '.join(f'{key!r}: {self.value(item)}' for key, item in argument.items())}}}"
        fields = (f"{name}={self.value(item)}" for name, item in argument.fields.items())
        return f"{self._classes[argument.type]}({', '.join(fields)})"

    def dim(self, dim: Dim, *, sharded: bool = False) -> str:
        """Return a size as code: the global one, or the size of one rank's shard."""
        return part_of(text_of(dim), self.size if sharded else 1)

    def shape(self, meta: TensorMeta, placement: Placement = R) -> str:
        """Return a local shape as code."""
        cut = placement.dim if placement.is_shard else None
        return f"[{', '.join(self.dim(dim, sharded=i == cut) for i, dim in enumerate(meta.shape))}]"

    def call(self, op: Op) -> str:
        """Return the operator's call on its arguments, in the most readable form."""
        if op.target == "module":
            args = [self.value(argument) for argument in op.args]
            args += [f"{name}={self.value(argument)}" for name, argument in op.kwargs.items()]
            return f"rt.run({', '.join([f'm.get_submodule({op.module!r})', *args])})"
        return spell(op.target, op.args, op.kwargs, self.value)


def _literal(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
