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
from nnx_core.view.modules import Layers

__all__ = ["Model", "estimator", "trace_module"]

_RECOMPUTE = "activation_checkpointing"


def trace_module(
    module: nn.Module | Callable[[], nn.Module],
    batch: Any,
    *,
    precision: str = "32-true",
    accelerator: str = "cuda",
    optimizer: str = "AdamW",
    factor: int = 1,
    recompute: object = None,
    like: Trace | None = None,
) -> Trace:
    """Trace one step of a module, without memory for its weights.

    Args:
        module: A module, or a function that makes one.
        batch: A batch of its ``training_step`` or forward, or a function from the module to one.
        precision: Lightning's precision string.
        accelerator: ``"cuda"`` or ``"cpu"``: on cuda optimizers update lists of tensors.
        optimizer: The class of ``torch.optim`` if the module has no ``configure_optimizers``.
        factor: The factor of the batch size.
        recompute: Classes of layers, or their names, whose activations are recomputed in backward.
        like: A trace of the same model and optimizers, whose optimizer state is taken over.
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
        with recomputing(made, Layers(recompute, option=_RECOMPUTE)):
            try:
                return trace_step(step, like)
            except NnxError:
                raise
            except Exception as error:
                return formula_trace(step, reason_of(error))


class Model:
    """A model to plan, with a trace for each batch size that is asked for.

    Args:
        module: A module, or a function that makes one.
        batch: The batch of `trace_module`.
        options: The options of the strategies.
        settings: Further arguments of `trace_module`.
    """

    def __init__(
        self,
        module: nn.Module | Callable[[], nn.Module],
        batch: Any,
        *,
        options: Mapping[str, Any] | None = None,
        precision: str = "32-true",
        **settings: Any,
    ) -> None:
        self._module, self._batch, self._settings = module, batch, settings
        self._options, self._precision = dict(options or {}), precision
        self._traces: dict[tuple[int, str, str], Trace] = {}

    def trace(self, *, factor: int = 1, recompute: object = None, precision: str = "") -> Trace:
        """Return the trace for a factor of the batch size."""
        precision = precision or self._precision
        key = factor, str(Layers(recompute, option=_RECOMPUTE)), precision
        if key not in self._traces:
            like = self.trace(precision=precision) if factor != 1 or recompute else None
            changes: dict[str, Any] = {
                "factor": factor,
                "recompute": recompute,
                "precision": precision,
                "like": like,
            }
            self._traces[key] = trace_module(self._module, self._batch, **self._settings, **changes)
        return self._traces[key]

    def replay(
        self, strategy: str, world: World, *, factor: int = 1, recompute: object = None
    ) -> Replay | None:
        """Return the replay of a strategy, which has not run; None if its plugin has no estimator."""
        found = estimator(strategy)
        if found is None:
            return None
        own = dict(StrategyRegistry.get(strategy).init_params) if strategy in StrategyRegistry else {}
        options = {**own, **self._options}
        trace = self.trace(
            factor=factor,
            recompute=recompute or options.get(_RECOMPUTE),
            precision=found.traced_precision(self._precision),
        )
        return found(trace, world, options)

    def estimate(
        self, strategy: str, world: World, *, factor: int = 1, recompute: object = None
    ) -> Estimate | None:
        """Return the estimate of a strategy; None if its plugin has no estimator."""
        found = self.replay(strategy, world, factor=factor, recompute=recompute)
        return None if found is None else found.run()


def estimator(strategy: str) -> type[Replay] | None:
    """Return the estimator of a strategy; None if its plugin has none."""
    if strategy in LIGHTNING:
        return LIGHTNING[strategy]
    spec = StrategyRegistry.get(strategy)
    if not spec.memory:
        return None
    found: type[Replay] = import_reference(spec.memory, what=f"the memory of strategy {strategy!r}")
    return found
