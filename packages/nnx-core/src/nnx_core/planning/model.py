"""Trace a model for the batch sizes that a plan asks for, and estimate it under a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from nnx_core.errors import NnxError
from nnx_core.names.registry import StrategyRegistry
from nnx_core.names.spec import import_reference
from nnx_core.planning.estimate import Estimate, World
from nnx_core.planning.fakes import (
    DTYPES,
    batch_size,
    convert,
    converted_batch,
    fake_batch,
    fake_module,
    loss_of,
    optimizers_of,
    recomputing,
    scaled_batch,
)
from nnx_core.planning.plain import LIGHTNING
from nnx_core.planning.replay import Replay
from nnx_core.planning.trace import Trace
from nnx_core.planning.tracing import Step, fake_mode, formula_trace, reason_of, trace_step

__all__ = ["Model", "estimator", "trace_module"]


def trace_module(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    precision: str = "32-true",
    accelerator: str = "cuda",
    optimizer: str = "AdamW",
    factor: int = 1,
    repeat: bool = True,
    recompute: bool = False,
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
        recompute: True to recompute the activations of equal layers in backward.
    """
    with fake_mode() as mode:
        made = fake_module(mode, module)
        fake = fake_batch(mode, batch(made) if callable(batch) else batch)
        if precision in DTYPES:
            convert(made, DTYPES[precision])
            fake = converted_batch(fake, DTYPES[precision])
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
        with recomputing(made, recompute):
            try:
                return trace_step(step, repeat=repeat)
            except NnxError:
                raise
            except Exception as error:
                return formula_trace(step, reason_of(error))


class Model:
    """A model to plan, with a trace for each batch size that is asked for.

    Args:
        module: A module, or a function that makes one.
        batch: The batch of `trace_module`.
        settings: Further arguments of `trace_module`.
    """

    def __init__(self, module: nn.Module | Callable[[], nn.Module], batch: Any, **settings: Any) -> None:
        self._module, self._batch, self._settings = module, batch, settings
        self._traces: dict[tuple[int, bool, str], Trace] = {}

    def trace(self, *, factor: int = 1, recompute: bool = False, precision: str = "") -> Trace:
        """Return the trace for a factor of the batch size."""
        key = factor, recompute, precision or self._settings.get("precision", "32-true")
        if key not in self._traces:
            settings = {**self._settings, "precision": key[2]}
            self._traces[key] = trace_module(
                self._module, self._batch, factor=factor, recompute=recompute, **settings
            )
        return self._traces[key]

    def estimate(
        self,
        strategy: str,
        world: World,
        *,
        factor: int = 1,
        recompute: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Estimate | None:
        """Return the estimate of a strategy; None if its plugin has no estimator."""
        found = estimator(strategy)
        if found is None:
            return None
        own = dict(StrategyRegistry.get(strategy).init_params) if strategy in StrategyRegistry else {}
        precision = found.traced_precision(self._settings.get("precision", "32-true"))
        trace = self.trace(factor=factor, recompute=recompute, precision=precision)
        return found(trace, world, {**own, **(options or {})}).run()


def estimator(strategy: str) -> type[Replay] | None:
    """Return the estimator of a strategy; None if its plugin has none."""
    if strategy in LIGHTNING:
        return LIGHTNING[strategy]
    spec = StrategyRegistry.get(strategy)
    if not spec.memory:
        return None
    found: type[Replay] = import_reference(spec.memory, what=f"the memory of strategy {strategy!r}")
    return found
