"""Example inputs of a module's forward, for engines that trace it. Computed only when asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nnx.errors import UnsupportedError
from nnx.lightning.compat import running_stage_loader

__all__ = ["example_inputs", "trainer_example_inputs"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def example_inputs(module: nn.Module) -> Inputs:
    """What a module says of itself: ``dummy_forward_args`` or ``example_input_array``.

    Returns:
        Positional and keyword arguments.

    Raises:
        UnsupportedError: The module has neither.
    """
    inputs = _declared(module)
    if inputs is None:
        raise UnsupportedError(
            f"{type(module).__name__} has no example inputs to trace its forward with.",
            remedy="Set `self.example_input_array`, or a dict `dummy_forward_args`, in its `__init__`.",
        )
    return inputs


def trainer_example_inputs(trainer: Any, module: nn.Module) -> Inputs:
    """What the module says of itself, or the first batch of the running stage's loader.

    ``dummy_forward_args_fn(batch)``, where the module has it, turns the batch into keyword arguments;
    otherwise the batch itself is the forward's first argument. The random state is left as it was.

    Raises:
        UnsupportedError: There are neither declared inputs nor a batch.
    """
    declared = _declared(module)
    if declared is not None:
        return declared
    with torch.random.fork_rng():
        batch = next(iter(running_stage_loader(trainer)), None)
    if batch is None:
        return example_inputs(module)
    batch = trainer.strategy.batch_to_device(batch)
    convert = getattr(module, "dummy_forward_args_fn", None)
    if callable(convert):
        return (), dict(convert(batch))
    return (batch,), {}


def _declared(module: nn.Module) -> Inputs | None:
    keywords = getattr(module, "dummy_forward_args", None)
    if isinstance(keywords, dict):
        return (), keywords
    example: Any = getattr(module, "example_input_array", None)
    if example is None:
        return None
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}
