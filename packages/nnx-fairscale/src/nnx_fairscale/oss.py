"""The OSS of fairscale behind ``fairscale_oss``: optimizer state of whole parameters, shared out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_checkpoint.collective import all_gather_object, control_group, is_distributed
from nnx_checkpoint.naming import StoredName
from nnx_checkpoint.restore import fill_optimizer_tensors, restore_groups
from nnx_checkpoint.shard import Shard
from nnx_checkpoint.state import OptimizerState, describe_optimizer, parameter_names
from nnx_core.backend import Backend, Sample
from nnx_core.errors import UnsupportedError
from nnx_core.materialize import broadcast_module, lay_in_order, materialize, move_to, with_strides
from nnx_fairscale.options import OSSOptions
from nnx_fairscale.ownership import Ownership
from nnx_fairscale.reducer import GradientReducer

__all__ = [
    "OSSBackend",
    "OwnedParameters",
]


# --- state that one rank owns ---------------------------------------------------------------------
# Optimizer state of whole parameters that one rank each has: described alike, loaded by owners.


def describe_owned(backend: Backend[Any], module: nn.Module, ownership: Ownership) -> OptimizerState:
    """Handles on this rank's optimizer state, and empty ones where it is another rank's. Collective.

    What the tensors are, and values that are no tensors, is told by the owner, so that all ranks describe the
    same names in the same order.
    """
    described = _describe_here(backend, module, ownership)
    names = parameter_names(module)
    mine = {
        name: {key: _tell(value) for key, value in entries.items()}
        for name, entries in described["state"].items()
    }
    told = all_gather_object(mine, control_group())
    state: dict[str, dict[str, Any]] = {}
    for parameter in ownership.parameters():
        name = names[parameter]
        entries = told[ownership.owner(parameter) if len(told) > 1 else 0].get(name)
        if entries is None:
            continue
        here = described["state"].get(name, {}) if ownership.owns(parameter) else {}
        state[name] = {key: here.get(key, _elsewhere(value)) for key, value in entries.items()}
    described["state"] = state
    return described


def _describe_here(backend: Backend[Any], module: nn.Module, ownership: Ownership) -> OptimizerState:
    described = describe_optimizer(module, ownership.optimizer, backend.shard)
    names = {name: parameter for parameter, name in parameter_names(module).items()}
    described["state"] = {
        name: entries for name, entries in described["state"].items() if ownership.owns(names[name])
    }
    return described


def _tell(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Shard) else [value]


def _elsewhere(told: Any) -> Any:
    return Shard(told[0], told[1], (), ()) if isinstance(told, tuple) else told[0]


def load_owned(backend: Backend[Any], module: nn.Module, ownership: Ownership, saved: OptimizerState) -> None:
    """Restore what this rank owns of an optimizer, in place. It does not communicate."""
    names = parameter_names(module)
    optimizer = ownership.optimizer
    restore_groups(optimizer, names, saved["param_groups"])
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = saved["state"].get(names[parameter])
            if entries and ownership.owns(parameter):
                optimizer.state[parameter] = _allocate(backend, parameter, entries, group, optimizer)
    fill_optimizer_tensors(_describe_here(backend, module, ownership), saved)


def _allocate(
    backend: Backend[Any],
    parameter: nn.Parameter,
    entries: Mapping[str, Any],
    group: Mapping[str, Any],
    optimizer: Optimizer,
) -> dict[str, Any]:
    state = {}
    for name, value in entries.items():
        shape = getattr(value, "shape", None)
        if shape is None:
            state[name] = value
            continue
        dtype = value.dtype
        if isinstance(value, StoredName) and name != "step" and value.parameter_dtype == dtype:
            dtype = parameter.dtype
        state[name] = backend.new_optimizer_state(
            parameter, name, shape=tuple(shape), dtype=dtype, group=group
        )
    return state


# --- the backend ----------------------------------------------------------------------------------


T = TypeVar("T")


class OwnedParameters(Backend[Any]):
    """What the two engines share whose parameters are whole on every rank and owned by one."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._strides: dict[nn.Module, dict[nn.Parameter, Tensor]] = {}
        self._owners: dict[Optimizer, Ownership] = {}
        self._optimizers: dict[nn.Module, list[Optimizer]] = {}
        self._reduced: dict[Optimizer, int] = {}  # how often, when it stepped last

    @property
    def reductions(self) -> int:
        """How often gradients were reduced."""
        raise NotImplementedError

    def summary(self, module: nn.Module) -> str:
        """What ranks own."""
        return "every parameter is updated by the rank that owns it"

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Give every rank rank 0's weights, on its device."""
        if module not in self._strides:
            materialize(module, self.context.device, name="")
            move_to(module, self.context.device)
            broadcast_module(module)
            self._strides[module] = lay_in_order(module.parameters())
        return {}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Share the parameters of each optimizer out over the ranks."""
        for optimizer in optimizers:
            self._owners[optimizer] = Ownership(
                optimizer, rank=self.context.rank, broadcast_fp16=self.options.broadcast_fp16
            )
        self._optimizers.setdefault(module, []).extend(optimizers)

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Give every parameter its own memory, and the strides it had."""
        for optimizer in self._optimizers.pop(module, ()):
            self._owners.pop(optimizer).remove()
            self._reduced.pop(optimizer, None)
        for parameter, strided in self._strides.pop(module, {}).items():
            parameter.data = with_strides(parameter.data, strided)
        for parameter in module.parameters():
            parameter.grad = None
        return {}

    def teardown(self) -> None:
        """Give every optimizer its state back, also after an error."""
        for owners in self._owners.values():
            owners.state.remove()
        super().teardown()

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Update what this rank owns and broadcast it."""
        owners = self._owners.get(optimizer)
        if owners is None:
            return step(*args, **kwargs)
        return owners.step(lambda: self._refuse_unreduced(optimizer), step, *args, **kwargs)

    def _refuse_unreduced(self, optimizer: Optimizer) -> None:
        """Refuse gradients that no reduction has made: they are of this rank's samples alone."""
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        before, self._reduced[optimizer] = self._reduced.get(optimizer, 0), self.reductions
        if is_distributed() and before == self.reductions and any(one is not None for one in gradients):
            raise UnsupportedError(
                "the optimizer steps with gradients, and no backward of the strategy came since its last: "
                "gradients of another origin, such as `torch.autograd.grad`, are of each rank's own samples.",
                remedy="Call `self.manual_backward(loss)` before each step, and change `p.grad` then.",
            )

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Handles on the state of the parameters that this rank owns. Collective."""
        owners = self._owners.get(optimizer)
        if owners is None:
            return super().optimizer_state(module, optimizer)
        with owners.state.shown():
            return describe_owned(self, module, owners)

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore the state of the parameters that this rank owns."""
        owners = self._owners.get(optimizer)
        if owners is None:
            super().load_optimizer_state(module, optimizer, saved)
        else:
            with owners.state.shown():
                load_owned(self, module, owners, saved)


class OSSBackend(OwnedParameters):
    """Averages gradients on every rank, as DDP does, and lets each rank update what it owns."""

    Options = OSSOptions
    options: OSSOptions

    def __init__(self, options: OSSOptions) -> None:
        super().__init__(options)
        self._reducers: dict[nn.Module, GradientReducer] = {}

    @property
    def reductions(self) -> int:
        """How often gradients were averaged."""
        return sum(reducer.reductions for reducer in self._reducers.values())

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Give every rank rank 0's weights, and average gradients from now on."""
        replaced = super().parallelize(module, sample)
        if module not in self._reducers:
            self._reducers[module] = GradientReducer(
                (p for p in module.parameters() if p.is_floating_point() or p.is_complex()),
                bucket_bytes=self.options.bucket_cap_mb * 2**20,
            )
        return replaced

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Take it all off the module."""
        reducer = self._reducers.pop(module, None)
        if reducer is not None:
            reducer.remove()
        return super().unparallelize(module)

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, averaged when it ends."""
        with ExitStack() as stack:
            for reducer in self._reducers.values():
                stack.enter_context(reducer.in_backward())
            super().backward(module, loss, *args, **kwargs)

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Keep gradients on this rank until the first backward outside of it."""
        with ExitStack() as stack:
            for reducer in self._reducers.values():
                stack.enter_context(reducer.no_sync())
            yield
