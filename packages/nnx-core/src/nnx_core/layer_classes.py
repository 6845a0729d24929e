"""What options that choose layers by their class are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from nnx_core.errors import OptionError


def as_classes(
    value: type[nn.Module] | Iterable[type[nn.Module]], *, option: str
) -> tuple[type[nn.Module], ...]:
    """One layer class or several, as a tuple.

    Raises:
        OptionError: Something in it is not a module class.
    """
    classes: tuple[Any, ...] = (value,)
    if isinstance(value, Iterable) and not isinstance(value, type):
        classes = tuple(value)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise OptionError(
                f"{option} holds {cls!r}, which is not a module class.",
                remedy="Pass a subclass of torch.nn.Module, such as TransformerBlock, or a list of them.",
            )
    return classes
