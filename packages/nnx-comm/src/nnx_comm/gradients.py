"""Strategies that average gradients in each step, in fewer bytes: `bagua`, `bagua_bytegrad`, `powersgd`.

Replicas stay equal. Gradients are exchanged after the backward that ends an accumulation, so clipping and
the step see the average, as under ``ddp``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_comm.algorithm import Averaging, all_finite
from nnx_comm.backend import SlowLinkBackend, log
from nnx_comm.options import BaguaOptions, PowerSGDOptions
from nnx_comm.powersgd import PowerSGD
from nnx_comm.wire import make_wire
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.backend import OptionsT
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.gradients import refuse_sparse_gradient

__all__ = ["BaguaBackend", "GradientBackend", "PowerSGDBackend"]


class GradientBackend(SlowLinkBackend[OptionsT]):
    """Averages the gradients of all ranks after a backward."""

    reduces_in_backward = True
    algorithm: Averaging

    def __init__(self, options: OptionsT) -> None:
        super().__init__(options)
        self._accumulates = False
        self._scaler: torch.amp.GradScaler | None = None

    @abstractmethod
    def make_algorithm(self) -> Averaging:
        """Return the algorithm of the options."""

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which gradients accumulate on each rank."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def grad_scaler(self, default: torch.amp.GradScaler) -> torch.amp.GradScaler | None:
        """Return the scaler, whose scale errors are kept without."""
        self._scaler = super().grad_scaler(default)
        return self._scaler

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, and average them unless they accumulate. Collective then."""
        super().backward(module, loss, *args, **kwargs)
        if not (self._accumulates or self.is_alone):
            self._average(module)

    @torch.no_grad()
    def _average(self, module: nn.Module) -> None:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        own = {parameter: parameter.grad for parameter in trained if parameter.grad is not None}
        names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, gradient in own.items():
            refuse_sparse_gradient(gradient, names[parameter])
        overflows = self.algorithm.wire.loses and not all_finite(own)
        *are_used, overflowed = used_anywhere([*(parameter in own for parameter in trained), overflows])
        if overflowed:
            self._skip(trained)
            return
        used = [parameter for parameter, is_used in zip(trained, are_used, strict=True) if is_used]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        scaled = self._scaler is not None and self._scaler.is_enabled()
        self.algorithm.scale = self._scaler.get_scale() if scaled and self._scaler is not None else 1.0
        gradients = {parameter: parameter.grad for parameter in used if parameter.grad is not None}
        self.count(self.algorithm.exchange(gradients, step=0))

    def _skip(self, trained: Sequence[nn.Parameter]) -> None:
        """Exchange nothing, and let no rank step: errors stay as they are.

        A loss scaler skips the step of all ranks if one rank's gradients overflow, and reduces the scale.
        """
        self.count(0)
        if self._scaler is not None and self._scaler.is_enabled():
            return
        if self.context.rank == 0:
            log.warning("Gradients of a rank are not finite: no rank steps, and the codec's errors stay")
        for parameter in trained:
            parameter.grad = None


class BaguaBackend(GradientBackend[BaguaOptions]):
    """Averages gradients through a codec."""

    Options = BaguaOptions

    def make_algorithm(self) -> Averaging:
        """Return the average through the codec of the options."""
        codec = "int8" if self.options.algorithm == "bytegrad" else self.options.codec
        wire = make_wire(codec, self.options.density)
        return Averaging(wire, error_feedback=self.options.error_feedback)


class PowerSGDBackend(GradientBackend[PowerSGDOptions]):
    """Averages gradients as products of thin matrices."""

    Options = PowerSGDOptions

    def make_algorithm(self) -> Averaging:
        """Return the average through torch's hook."""
        options = self.options
        wire = PowerSGD(
            rank=options.matrix_approximation_rank,
            start=options.start_powerSGD_iter,
            least=options.min_compression_rate,
        )
        return Averaging(wire, error_feedback=options.error_feedback)

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuse several optimizers: the matrices of one would replace those of the other.

        Raises:
            UnsupportedError: There are several.
        """
        super().setup_optimizers(module, optimizers)
        if len(optimizers) > 1:
            raise UnsupportedError(
                f"'powersgd' keeps matrices for the gradients of one optimizer, and there are "
                f"{len(optimizers)}.",
                remedy="Use one optimizer with several param groups, or strategy='bagua', codec='bf16'.",
            )
