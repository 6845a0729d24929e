"""Strategies that average gradients in each step, in fewer bytes: of Bagua, and `powersgd`.

Replicas stay equal. Gradients are exchanged after the backward that ends an accumulation, so clipping and
the step see the average, as under ``ddp``.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_comm.algorithm import Averaging, Tensors, all_finite, real_view
from nnx_comm.backend import SlowLink, SlowLinkBackend, log
from nnx_comm.options import BaguaOptions, CodecOptions, PowerSGDOptions
from nnx_comm.powersgd import PowerSGD
from nnx_comm.qadam import Momenta, QAdam
from nnx_comm.wire import Lossy, make_wire
from nnx_core.agree.divergence import refuse_unequal_gradient
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.backend import OptionsT
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.gradients import refuse_sparse_gradient
from nnx_core.optimizers.optimizer_probe import dependence
from nnx_core.optimizers.unsharded_optimizer import mean_loss

__all__ = ["BaguaBackend", "GradientBackend", "GradientExchange", "PowerSGDBackend", "QAdamBackend"]

T = TypeVar("T")


class GradientExchange(SlowLink[OptionsT]):
    """Averages gradients by an `Averaging` after the backward that ends an accumulation."""

    reduces_in_backward = True
    algorithm: Averaging

    def __init__(self, options: OptionsT) -> None:
        super().__init__(options)
        self._accumulates = self._overflowed = False
        self._scaler: torch.amp.GradScaler | None = None

    @abstractmethod
    def make_algorithm(self) -> Averaging:
        """Return the algorithm of the options."""

    @abstractmethod
    def average(self, module: nn.Module) -> None:
        """Average the gradients of a backward, or call `skip_step`. Collective."""

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Return a context in which gradients accumulate on each rank."""
        before, self._accumulates = self._accumulates, True
        try:
            with super().no_sync(module):
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
            with torch.no_grad():
                self.average(module)

    def exchange(self, gradients: Tensors) -> None:
        """Replace gradients by their mean, and count the bytes. Collective."""
        self.algorithm.scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        self._overflowed = False
        self.count(self.algorithm.exchange(gradients, step=0))

    def skip_step(self, module: nn.Module) -> None:
        """Exchange nothing, and let no rank step: errors stay as they are.

        A loss scaler skips the step of all ranks if one rank's gradients overflow, and reduces the scale.
        """
        self._overflowed = True
        self.count(0)
        if self._scaler is not None and self._scaler.is_enabled():
            return
        if self.context.rank == 0:
            log.warning("Gradients of a rank are not finite: no rank steps, and the codec's errors stay")
        for parameter in module.parameters():
            parameter.grad = None


class GradientBackend(GradientExchange[OptionsT], SlowLinkBackend[OptionsT]):
    """Averages the gradients of all ranks, each of which has the whole model."""

    def __init__(self, options: OptionsT) -> None:
        super().__init__(options)
        self._of_model: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._averaged: dict[nn.Parameter, weakref.ref[Tensor]] = {}
        self._usage = nn.Parameter(torch.empty(0), requires_grad=False)

    def average(self, module: nn.Module) -> None:
        """Average the gradients of the parameters that some rank used, or call `skip_step`. Collective."""
        names = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        trained = list(names.values())
        for name, parameter in names.items():
            if parameter.grad is not None:
                refuse_sparse_gradient(parameter.grad, name)
        own = {parameter: parameter.grad for parameter in trained if parameter.grad is not None}
        used = [parameter in own for parameter in trained]
        gradients: dict[nn.Parameter, Tensor] = {}
        if isinstance(self.algorithm.wire, Lossy):
            *used, overflows = used_anywhere([*used, not all_finite(own)])
            if overflows:
                self.skip_step(module)
                return
            gradients = _with_zeros(own, compress(trained, used))
            self.exchange(gradients)
        elif trained:
            gradients = _with_zeros(own, trained)
            # Flags travel with the gradients: a collective of their own takes time of the processor.
            usage = real_view(gradients[trained[0]]).new_tensor(used)
            self.exchange({**gradients, self._usage: usage})
            if not all(used):
                gradients = dict(compress(gradients.items(), usage.bool().tolist()))
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        self._averaged.update((parameter, weakref.ref(gradient)) for parameter, gradient in gradients.items())

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Step; an optimizer that reads more than gradients, as LBFGS reads losses, gets the mean loss."""
        if not self.is_alone and self._reads_loss(optimizer):
            args = tuple(map(self._with_mean_loss, args))
            kwargs = {name: self._with_mean_loss(value) for name, value in kwargs.items()}
        return step(*args, **kwargs)

    def _with_mean_loss(self, argument: Any) -> Any:
        """Return a closure with the mean loss over the ranks; other arguments as they are."""
        if not callable(argument):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            return mean_loss(argument(*args, **kwargs), self.context.device)

        return closure

    def _reads_loss(self, optimizer: Optimizer) -> bool:
        """Return True if an update depends on the whole model, so that it may depend on the loss, too."""
        if optimizer not in self._of_model:
            self._of_model[optimizer] = dependence(optimizer) == "model"
        return self._of_model[optimizer]

    def collect_gradients(self, module: nn.Module) -> None:
        """Refuse gradients of a rank's own samples, which user code assigned and nothing averages."""
        if self.is_alone or self._overflowed:
            return
        for name, parameter in module.named_parameters():
            averaged = self._averaged.get(parameter)
            if parameter.grad is not None and (averaged is None or averaged() is not parameter.grad):
                refuse_unequal_gradient(parameter.grad, name)


def _with_zeros(own: Tensors, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of parameters, with zeros for those that this rank has not used."""
    return {p: own[p] if p in own else torch.zeros_like(p) for p in parameters}


class BaguaBackend(GradientBackend[BaguaOptions]):
    """Averages gradients through a codec."""

    Options = BaguaOptions

    def make_algorithm(self) -> Averaging:
        """Return the average through the codec of the options."""
        codec = "int8" if self.options.algorithm == "bytegrad" else self.options.codec
        wire = make_wire(codec, self.options.density)
        return Averaging(wire, error_feedback=self.options.error_feedback)


class QAdamBackend(GradientBackend[CodecOptions]):
    """Averages the momenta of `QAdam` through a codec."""

    Options = CodecOptions
    algorithm: Momenta

    def make_algorithm(self) -> Momenta:
        """Return the average through the codec of the options."""
        wire = make_wire(self.options.codec, self.options.density)
        return Momenta(wire, error_feedback=self.options.error_feedback)

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers whose momenta travel."""
        super().setup_optimizers(module, optimizers)
        self.exchange_optimizers(module, optimizers)

    def exchange_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuse optimizers without a momentum to exchange.

        Raises:
            UnsupportedError: One is not a `QAdam`.
        """
        for optimizer in optimizers:
            if not isinstance(optimizer, QAdam):
                raise UnsupportedError(
                    f"'bagua_qadam' exchanges the momentum of nnx_comm.QAdam, and the optimizer is "
                    f"{type(optimizer).__name__}.",
                    remedy="Return nnx_comm.QAdam(self.parameters(), lr=..., warmup_steps=...) from "
                    "configure_optimizers, or use strategy='bagua_bytegrad', which takes any optimizer.",
                )
        self.algorithm.optimizers = optimizers


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
