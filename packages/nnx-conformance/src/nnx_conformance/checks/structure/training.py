"""How most checks of structure compare."""

from __future__ import annotations

from typing import Any

from nnx_conformance.check import Bench, expect_parity
from nnx_conformance.task import Plain, Task


def trains(bench: Bench, model: type[Plain], *, like: type[Plain] | None = None, **changes: Any) -> None:
    """Every rank trains the model as one process does, or as one process trains another model.

    Args:
        bench: The bench of the check.
        model: The model to train.
        like: The model that gives the same numbers in one process; by default it is the same one.
        **changes: To the task.
    """
    expect_parity(bench, Task(model=model, **changes), like=Task(model=like or model, **changes))
