"""Plain attributes that a forward may read: a program stands for the values that they had when traced.

``if self.warm: ...`` is decided by tracing. Such attributes are found in the code of ``forward``
and of the methods and properties that it names, so that setting one brings about another program.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, complex, str, type(None))
_NOTHING = object()
_OWN_OF_MODULES = frozenset(vars(nn.Module())) | {"training"}


def read_by_forward(root: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where each such attribute is, or would be if set: the ``__dict__`` of its module, and its name.

    Example:
        >>> dropout = nn.Dropout(0.1)
        >>> sorted(name for _, name in read_by_forward(dropout))
        ['inplace', 'p']
    """
    found = []
    for module in root.modules():
        names = _names_in_forward(type(module))  # type: ignore[arg-type] # mypy on hashes
        space, cls = vars(module), type(module)
        found += [(space, name) for name in names if _is_plain(space.get(name, getattr(cls, name, _NOTHING)))]
    return found


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


@cache
def _names_in_forward(cls: type) -> tuple[str, ...]:
    """Names in the code that a class's forward reaches on the object itself."""
    seen: set[str] = set()
    reached = ["forward"]
    while reached:
        name = reached.pop()
        for function in _functions(cls, name):
            for other in _names(function.__code__):
                if other not in seen:
                    seen.add(other)
                    reached.append(other)
    return tuple(sorted(seen - _OWN_OF_MODULES))


def _functions(cls: type, name: str) -> Iterator[FunctionType]:
    """What a name stands for on a class and its bases, for ``super()`` reaches those."""
    for base in cls.__mro__:
        if base in (nn.Module, object):
            return
        member = vars(base).get(name)
        if isinstance(member, property):
            member = member.fget
        member = getattr(member, "__func__", member)
        if isinstance(member, FunctionType):
            yield member


def _names(code: CodeType) -> set[str]:
    """Every name that a function's code uses, inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names, *(name for function in inner for name in _names(function))}
