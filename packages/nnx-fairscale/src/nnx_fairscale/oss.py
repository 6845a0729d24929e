"""Shard optimizer state with fairscale's OSS: each parameter's state is on one owner (``fairscale_oss``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from fairscale.optim import OSS
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base.ranks import all_gather_object, control_group, is_distributed
from nnx_base.shard import Shard
from nnx_checkpoint.reading.filling import fill_optimizer_tensors, restore_groups
from nnx_checkpoint.reading.naming import StoredName
from nnx_checkpoint.reading.state import OptimizerState, describe_optimizer, parameter_names
from nnx_core.agree.divergence import Writes, refuse_unequal_gradient
from nnx_core.agree.parameter_usage import used_anywhere
from nnx_core.backend import Backend, Sample
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.optimizer_probe import dependence
from nnx_core.optimizers.own_optimizers import OwnOptimizers
from nnx_core.view.hidden_optimizer_state import HiddenState
from nnx_core.view.modules import broadcast_module, lay_in_order, materialize, move_to, with_strides
from nnx_fairscale.options import OSSOptions
from nnx_fairscale.reducer import GradientReducer

__all__ = [
    "OSSBackend",
    "OwnedParameters",
    "Ownership",
]


# fairscale's OSS gives each parameter an owner, concatenates the parameters of one owner in a buffer, and
# broadcasts the buffer after each step. OSS also creates an optimizer for the rank's own parameters. Here the
# user's optimizer takes that role: it holds every parameter and steps with the gradients of its own ones. So
# only these get state, and schedulers, hooks and callbacks see the user's optimizer. Only this module and
# `sharded` use private names of OSS.


T = TypeVar("T")


class Ownership:
    """The owners of one optimizer's parameters.

    Args:
        optimizer: The user's optimizer. Its parameters become views of their owners' buffers.
        rank: This rank.
        broadcast_fp16: True to send updated parameters in float16.

    Attributes:
        oss_list: The instances of fairscale's OSS, one for each dtype.

    Raises:
        UnsupportedError: The optimizer needs all parameters on one rank.
    """

    def __init__(self, optimizer: Optimizer, *, rank: int, broadcast_fp16: bool = False) -> None:
        if is_distributed() and dependence(optimizer) == "model":
            raise UnsupportedError(
                f"{type(optimizer).__name__} computes with all parameters at once, or its update is unknown, "
                "so parameters cannot have different owners.",
                remedy="Use an optimizer that steps each parameter alone (Adam, LAMB, Muon, ...), or "
                "strategy 'ddp'; for the norm of all gradients, use `gradient_clip_val`.",
            )
        self.optimizer = optimizer
        self._rank = rank
        self._broadcast_fp16 = broadcast_fp16
        self.oss_list: list[Any] = []
        self._assign_owners()
        self.state = HiddenState(optimizer, "each rank has the state of its own parameters")

    def _assign_owners(self) -> None:
        self._parameters = _parameters(self.optimizer)
        self._sizes = {parameter: parameter.numel() for parameter in self._parameters}
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self._parameters:
            if parameter.numel():
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        self.oss_list = [self._make_oss(same) for same in by_dtype.values()]
        self._owners = {p: rank for oss in self.oss_list for p, rank in oss._param_to_rank.items()}
        self._trainable = [parameter.requires_grad for parameter in self._parameters]

    def _make_oss(self, parameters: list[nn.Parameter]) -> Any:
        """Return an OSS for parameters of one dtype, because a buffer of fairscale holds one dtype."""
        return OSS(
            [{"params": [parameter]} for parameter in parameters],
            optim=lambda groups, **_: self.optimizer,
            broadcast_fp16=self._broadcast_fp16,
        )

    def refresh(self) -> None:
        """Update owners after parameters were added, frozen or unfrozen.

        New parameters get a new `oss_list`.
        """
        if len(_parameters(self.optimizer)) != len(self._parameters):
            self._assign_owners()
        trainable = [parameter.requires_grad for parameter in self._parameters]
        if trainable != self._trainable:
            self._trainable = trainable
            for oss in self.oss_list:
                oss.refresh_trainable()

    def owns(self, parameter: nn.Parameter) -> bool:
        """Return True if this rank updates the parameter; every rank updates a parameter without elements."""
        return bool(self._owners.get(parameter, self._rank) == self._rank)

    def owner(self, parameter: nn.Parameter) -> int:
        """Return the rank that updates the parameter."""
        return int(self._owners.get(parameter, 0))

    def parameters(self) -> list[nn.Parameter]:
        """Return every parameter of the optimizer, in the order of its groups."""
        return self._parameters

    def step(self, check: Callable[[], None], step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Update this rank's parameters, then broadcast every owner's parameters.

        Args:
            check: A function to call when the gradients exist, after the closure.
            step: The optimizer's own step.
            args: The positional arguments of the step.
            kwargs: The keyword arguments of the step.
        """
        self.refresh()
        hidden: dict[nn.Parameter, Tensor] = {}
        given: dict[nn.Parameter, tuple[Tensor, int]] = {}

        def hide() -> None:
            check()
            for parameter in self._parameters:
                if parameter.grad is None:
                    continue
                if self.owns(parameter):
                    given[parameter] = parameter.grad, parameter.grad._version
                else:
                    hidden[parameter] = parameter.grad
                    parameter.grad = None

        args, kwargs = _around_closure(self.state.user_code, hide, args, kwargs)
        try:
            with self.state.stepping():
                result = step(*args, **kwargs)
        finally:
            for parameter, gradient in hidden.items():
                parameter.grad = gradient
        self._follow_owners(given)
        with self._copying_assigned():
            for oss in self.oss_list:
                oss._broadcast_params()
        return result

    @torch.no_grad()
    def _follow_owners(self, given: Mapping[nn.Parameter, tuple[Tensor, int]]) -> None:
        """Drop gradients that the owner's step has dropped, and copy those that it has written. Collective.

        A step may call `zero_grad`, and user code may count on it: the next backward adds to what is left.

        Args:
            given: This rank's own gradients before the step, and their versions.
        """
        left = {parameter: parameter.grad for parameter in given}
        is_dropped = [parameter in left and left[parameter] is None for parameter in self._parameters]
        is_written = [
            (gradient := left.get(parameter)) is not None
            and (gradient is not given[parameter][0] or gradient._version != given[parameter][1])
            for parameter in self._parameters
        ]
        count = len(self._parameters)
        flags = used_anywhere([*is_dropped, *is_written])
        for parameter, dropped, written in zip(self._parameters, flags[:count], flags[count:], strict=True):
            if dropped:
                parameter.grad = None
            elif written:
                own = left.get(parameter)
                whole = torch.empty_like(parameter) if own is None else own.to_dense().contiguous()
                if is_distributed() and parameter in self._owners:
                    dist.broadcast(whole, self.owner(parameter))
                parameter.grad = whole

    @contextmanager
    def _copying_assigned(self) -> Iterator[None]:
        """Copy parameters with an assigned ``data`` into the buffers and back, around a broadcast.

        Such parameters are no views of the buffers. They keep their new memory, because user code may hold it
        too.
        """
        assigned: list[tuple[nn.Parameter, Any, int]] = []
        for bucket in _buckets(self.oss_list):
            begin = 0
            address, size = bucket.buffer.data_ptr(), bucket.buffer.element_size()
            for parameter in bucket._params:
                numel = self._sizes[parameter]
                if parameter.data_ptr() != address + begin * size or parameter.numel() != numel:
                    _check_assigned(parameter, numel, bucket.buffer)
                    assigned.append((parameter, bucket, begin))
                begin += numel
        for parameter, bucket, begin in assigned:
            _bucket_view(bucket, begin, parameter).copy_(parameter.detach())
        yield
        for parameter, bucket, begin in assigned:
            parameter.data.copy_(_bucket_view(bucket, begin, parameter))

    def remove(self) -> None:
        """Give every parameter its own memory, and the optimizer its state."""
        self.state.remove()
        for parameter in self._parameters:
            parameter.data = parameter.data.clone()


def _bucket_view(bucket: Any, begin: int, parameter: nn.Parameter) -> Tensor:
    flat: Tensor = bucket.buffer[begin : begin + parameter.numel()]
    return flat.view(parameter.shape)


def _check_assigned(parameter: nn.Parameter, numel: int, buffer: Tensor) -> None:
    if (parameter.numel(), parameter.dtype, parameter.device) != (numel, buffer.dtype, buffer.device):
        raise UnsupportedError(
            f"`data` with {parameter.numel()} elements of {parameter.dtype} on {parameter.device} was "
            f"assigned to a parameter with {numel} elements of {buffer.dtype} on {buffer.device}.",
            remedy="Assign data of the same size and dtype, or change the parameter before training begins.",
        )


def _buckets(oss_list: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the buffers that hold trained parameters."""
    for oss in oss_list:
        for of_device in oss.buckets.values():
            yield from of_device.values()


def _around_closure(
    around: Callable[[], AbstractContextManager[None]],
    then: Callable[[], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a step's arguments with a call of `then` after the closure; without a closure, call it now."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        then()
        return args, kwargs

    def closure_and_then() -> Any:
        with around():
            loss = closure()
        then()
        return loss

    return ((closure_and_then, *args[1:]), kwargs) if args else ((), {**kwargs, "closure": closure_and_then})


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return [parameter for group in groups for parameter in group["params"]]


# Each rank describes the optimizer state of all parameters in the same order, and loads the state of its own.


def describe_owned(backend: Backend[Any], module: nn.Module, ownership: Ownership) -> OptimizerState:
    """Return handles on this rank's optimizer state, and empty handles on other ranks' state. Collective.

    The owner sends shapes, dtypes and values that are no tensors, so that all ranks describe the same names
    in the same order.
    """
    described = _describe_local(backend, module, ownership)
    names = parameter_names(module)
    mine = {
        name: {key: _describe_value(value) for key, value in entries.items()}
        for name, entries in described["state"].items()
    }
    by_rank = all_gather_object(mine, control_group())
    state: dict[str, dict[str, Any]] = {}
    for parameter in ownership.parameters():
        name = names[parameter]
        entries = by_rank[ownership.owner(parameter) if len(by_rank) > 1 else 0].get(name)
        if entries is None:
            continue
        here = described["state"].get(name, {}) if ownership.owns(parameter) else {}
        state[name] = {key: here.get(key, _remote_value(value)) for key, value in entries.items()}
    described["state"] = state
    return described


def _describe_local(backend: Backend[Any], module: nn.Module, ownership: Ownership) -> OptimizerState:
    described = describe_optimizer(module, ownership.optimizer, backend.shard)
    names = {name: parameter for parameter, name in parameter_names(module).items()}
    described["state"] = {
        name: entries for name, entries in described["state"].items() if ownership.owns(names[name])
    }
    return described


def _describe_value(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Shard) else [value]


def _remote_value(described: Any) -> Any:
    return Shard(described[0], described[1], (), ()) if isinstance(described, tuple) else described[0]


def load_owned(backend: Backend[Any], module: nn.Module, ownership: Ownership, saved: OptimizerState) -> None:
    """Restore this rank's optimizer state in place, without communication."""
    names = parameter_names(module)
    optimizer = ownership.optimizer
    restore_groups(optimizer, names, saved["param_groups"])
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entries = saved["state"].get(names[parameter])
            if entries and ownership.owns(parameter):
                optimizer.state[parameter] = _allocate(backend, parameter, entries, group, optimizer)
    fill_optimizer_tensors(_describe_local(backend, module, ownership), saved)


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


class OwnedParameters(Backend[Any]):
    """Base of the two engines with replicated parameters and one owner for each parameter.

    Attributes:
        reduces_to_every_rank: True if every rank has the averaged gradients after backward.
    """

    reduces_to_every_rank: ClassVar[bool] = False

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._strides: dict[nn.Module, dict[nn.Parameter, Tensor]] = {}
        self._owners: dict[Optimizer, Ownership] = {}
        self._optimizers: dict[nn.Module, list[Optimizer]] = {}
        self._own_optimizers: dict[nn.Module, OwnOptimizers] = {}
        self._reduced: dict[Optimizer, int] = {}  # the number of reductions at the last step
        self._writes = Writes(lambda: self.is_watched)

    @property
    def reductions(self) -> int:
        """The number of reductions of gradients."""
        raise NotImplementedError

    def summary(self, module: nn.Module) -> str:
        """Return one line about owners."""
        return "every parameter is updated by the rank that owns it"

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Give every rank rank zero's weights, on its device."""
        if module not in self._strides:
            materialize(module, self.context.device, name="")
            move_to(module, self.context.device)
            broadcast_module(module)
            self._strides[module] = lay_in_order(module.parameters())
        return {}

    def setup_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Assign the parameters of each optimizer to owners."""
        for optimizer in optimizers:
            self._owners[optimizer] = Ownership(
                optimizer, rank=self.context.rank, broadcast_fp16=self.options.broadcast_fp16
            )
        self._optimizers.setdefault(module, []).extend(optimizers)
        if module not in self._own_optimizers:
            self._own_optimizers[module] = OwnOptimizers(
                module,
                lambda: chain.from_iterable(self._optimizers.values()),
                engine="fairscale",
                only_in_backward=self.reduces_to_every_rank,
            )

    @contextmanager
    def _deferring_optimizers(self) -> Iterator[None]:
        """Let no optimizer step before a backward is over, because its gradients are reduced then."""
        with ExitStack() as stack:
            for own in self._own_optimizers.values() if is_distributed() else ():
                stack.enter_context(own.in_backward())
            yield

    def exchange_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Assign the parameters of new optimizers to owners. Collective."""
        before = self._optimizers.pop(module, [])
        for optimizer in before:
            if optimizer not in optimizers:
                self._forget(optimizer)
        self._optimizers[module] = [optimizer for optimizer in optimizers if optimizer in before]
        self.setup_optimizers(module, [optimizer for optimizer in optimizers if optimizer not in before])

    def _forget(self, optimizer: Optimizer) -> None:
        self._owners.pop(optimizer).remove()
        self._reduced.pop(optimizer, None)

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Give every parameter its own memory and its original strides."""
        for optimizer in self._optimizers.pop(module, ()):
            self._forget(optimizer)
        if own := self._own_optimizers.pop(module, None):
            own.remove()
        for parameter, strided in self._strides.pop(module, {}).items():
            parameter.data = with_strides(parameter.data, strided)
        for parameter in module.parameters():
            parameter.grad = None
        return {}

    def teardown(self) -> None:
        """Give every optimizer its state back, also after an error."""
        for owners in self._owners.values():
            owners.state.remove()
        for own in self._own_optimizers.values():
            own.remove()
        super().teardown()

    def optimizer_step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Update this rank's parameters and broadcast them."""
        owners = self._owners.get(optimizer)
        if owners is None:
            return step(*args, **kwargs)

        def check() -> None:
            self._refuse_unreduced(optimizer)
            # The broadcast is about to replace this rank's copies of other ranks' parameters.
            for parameter in owners.parameters() if self.is_watched else ():
                self._writes.add(parameter, parameter)

        return owners.step(check, step, *args, **kwargs)

    def written(self, module: nn.Module) -> Mapping[str, int]:
        """Return checksums of this rank's copies, taken before the owners' values replaced them."""
        return self._writes.take(module)

    def _refuse_unreduced(self, optimizer: Optimizer) -> None:
        """Refuse gradients that no reduction has made, because they cover this rank's samples only."""
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        before, self._reduced[optimizer] = self._reduced.get(optimizer, 0), self.reductions
        if is_distributed() and before == self.reductions and any(one is not None for one in gradients):
            raise UnsupportedError(
                "the optimizer steps with gradients, and no backward of the strategy came since its last "
                "step: gradients of `torch.autograd.grad`, for instance, cover each rank's own samples.",
                remedy="Call `self.manual_backward(loss)` before each step, and change `p.grad` then.",
            )

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return handles on the state of this rank's parameters. Collective."""
        owners = self._owners.get(optimizer)
        if owners is None:
            return super().optimizer_state(module, optimizer)
        with owners.state.stepping():
            return describe_owned(self, module, owners)

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore the state of this rank's parameters."""
        owners = self._owners.get(optimizer)
        if owners is None:
            super().load_optimizer_state(module, optimizer, saved)
        else:
            with owners.state.stepping():
                load_owned(self, module, owners, saved)


class OSSBackend(OwnedParameters):
    """Averages gradients on every rank, as DDP does, and lets each rank update its own parameters."""

    reduces_to_every_rank = True

    Options = OSSOptions
    options: OSSOptions

    def __init__(self, options: OSSOptions) -> None:
        super().__init__(options)
        self._reducers: dict[nn.Module, GradientReducer] = {}

    @property
    def reductions(self) -> int:
        """The number of reductions of gradients."""
        return sum(reducer.reductions for reducer in self._reducers.values())

    def parallelize(self, module: nn.Module, sample: Sample) -> Mapping[nn.Parameter, nn.Parameter]:
        """Give every rank rank zero's weights, and average gradients from now on."""
        replaced = super().parallelize(module, sample)
        if module not in self._reducers:
            self._reducers[module] = GradientReducer(
                (p for p in module.parameters() if p.is_floating_point() or p.is_complex()),
                bucket_bytes=self.options.bucket_cap_mb * 2**20,
            )
        return replaced

    def unparallelize(self, module: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        """Remove the reducer and the owners from the module."""
        reducer = self._reducers.pop(module, None)
        if reducer is not None:
            reducer.remove()
        return super().unparallelize(module)

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, and average them at the end."""
        with ExitStack() as stack:
            for reducer in self._reducers.values():
                stack.enter_context(reducer.in_backward())
            stack.enter_context(self._deferring_optimizers())
            super().backward(module, loss, *args, **kwargs)

    def _refuse_unreduced(self, optimizer: Optimizer) -> None:
        """Also check each gradient alone: a backward may have made some, and user code others."""
        super()._refuse_unreduced(optimizer)
        names = {p: name for module in self._reducers for name, p in module.named_parameters()}
        for parameter in self._owners[optimizer].parameters():
            was_reduced = any(parameter in reducer.reduced for reducer in self._reducers.values())
            if parameter.grad is not None and not was_reduced:
                refuse_unequal_gradient(parameter.grad, names.get(parameter, "a parameter"))
            for reducer in self._reducers.values():
                reducer.reduced.discard(parameter)

    @contextmanager
    def no_sync(self, module: nn.Module) -> Iterator[None]:
        """Accumulate gradients on this rank until the first backward outside of it."""
        with ExitStack() as stack:
            for reducer in self._reducers.values():
                stack.enter_context(reducer.no_sync())
            yield
