"""Plan a run: trace a model once, and replay the step under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import import_reference
from nnx_core.plan.models import batch_size, fake_batch, fake_module, loss_of, optimizers_of, scaled_batch
from nnx_core.plan.plain import LIGHTNING
from nnx_core.plan.replay import Replay
from nnx_core.plan.trace import Trace
from nnx_core.plan.tracing import Step, fake_mode, trace_step

__all__ = ["estimator", "trace_module"]


def trace_module(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    precision: str = "32-true",
    accelerator: str = "cuda",
    optimizer: str = "AdamW",
    factor: int = 1,
    repeat: bool = True,
) -> Trace:
    """Trace one step of a module, without memory for its weights.

    Args:
        module: A module, or a function that makes one.
        batch: A batch of its ``training_step`` or forward, or a function from the module to one.
        precision: Lightning's precision string.
        accelerator: ``"cuda"`` or ``"cpu"``: on cuda optimizers update lists of tensors.
        optimizer: The class of ``torch.optim`` if the module has no ``configure_optimizers``.
        factor: The factor of the batch size.
        repeat: True to trace four of many equal layers.
    """
    with fake_mode() as mode:
        made = fake_module(mode, module)
        fake = fake_batch(mode, batch(made) if callable(batch) else batch)
        if factor != 1:
            fake = scaled_batch(fake, factor)
        step = Step(
            module=made,
            loss=loss_of(made),
            optimizers=lambda: optimizers_of(made, lists=accelerator == "cuda", default=optimizer),
            batch=fake,
            batch_size=batch_size(fake),
            precision=precision,
        )
        return trace_step(step, repeat=repeat)


def estimator(strategy: str) -> type[Replay] | None:
    """Return the estimator of a strategy; None if its plugin has none."""
    if strategy in LIGHTNING:
        return LIGHTNING[strategy]
    spec = StrategyRegistry.get(strategy)
    if not spec.memory:
        return None
    found: type[Replay] = import_reference(spec.memory, what=f"the memory of strategy {strategy!r}")
    return found
