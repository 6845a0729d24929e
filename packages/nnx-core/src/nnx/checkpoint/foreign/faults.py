"""What every reader of another program's files says when they are not as that program writes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nnx.errors import CheckpointError

__all__ = ["malformed_explained"]


@contextmanager
def malformed_explained(path: Any, program: str) -> Iterator[None]:
    """Turn the errors of looking into nested data that is not as expected into one that names the files."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        IndexError,
        KeyError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"'{path}' is not as {program} writes it: {type(error).__name__}: {error}.",
            remedy=f"Restore it from a backup; if it is whole, it is of a version of {program} that nnx does "
            "not know: merge it with that program first.",
        ) from error
