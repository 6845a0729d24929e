"""Step sharded parameters unsharded on owner ranks, for optimizers whose update reads more than one element.

`nnx_core.optimizers.optimizer_probe` finds the dependence of an update. If it is the *parameter* (Muon, LAMB,
Shampoo), every sharded parameter gets an owner rank, balanced by work. In a step each owner receives the
weight and the gradient of its parameters, the user's optimizer steps there on unsharded tensors, and every
rank receives its shard of the new weights. If it is the *model* (SAM, LBFGS, a norm of all gradients), rank
zero owns all parameters. The other ranks evaluate the closure as often as rank zero's step does.

Optimizer state stays unsharded on the owner. The optimizer, its groups and its state dict remain the user's:
unsharded stand-ins replace its parameters during a step only.

The module reads only the shards that an engine describes, so it serves every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_base.dtypes import as_bytes
from nnx_base.ranks import (
    all_gather_object,
    control_group,
    exchange,
    gather_object,
    is_distributed,
    rank_and_size,
)
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint.reading.filling import fill_optimizer
from nnx_checkpoint.reading.state import OptimizerState, ShardOf, describe_optimizer, parameter_names
from nnx_core._torch_compat import run_step_hooks
from nnx_core.errors import NnxError, UnsupportedError
from nnx_core.optimizers.optimizer_probe import Trial, refuse_hidden_shards, try_optimizer
from nnx_core.optimizers.owners import (
    Item,
    Owned,
    Route,
    Transfer,
    _membership,
    choose_owners,
    empty,
    fill_from_bytes,
    from_owner,
    log_owners,
    to_owner,
)
from nnx_core.optimizers.step_arguments import StepArguments, take_closure

__all__ = ["OwnerRanks", "mean_loss"]

T = TypeVar("T")

_DONE, _EVALUATE, _FAILED = 0, 1, 2

_DROPPED, _WRITTEN = 1, 2


def mean_loss(loss: Any, device: torch.device) -> Any:
    """Return the mean of a loss over the ranks, which is the loss of one process. Collective.

    Args:
        loss: A tensor or a number; other values are returned as they are.
        device: The device of the collective.
    """
    if not isinstance(loss, Tensor | float | int):
        return loss
    mean = torch.as_tensor(loss).detach().to(device, copy=True)
    mean = mean if mean.is_floating_point() else mean.float()
    all_reduce(mean)
    mean /= dist.get_world_size()
    return mean if isinstance(loss, Tensor) else mean.item()


class OwnerRanks:
    """Steps the optimizers of one engine whose updates need unsharded parameters.

    An engine makes one, passes its optimizers in `Backend.setup_optimizers`, and steps and describes them
    through it. Elementwise optimizers step on shards, and replicated parameters need no owner.

    Args:
        shard: The engine's `Backend.shard`, which describes a parameter or its gradient.
        device: The device that this rank communicates from.

    Attributes:
        bytes_sent: Payload that this rank has sent to others in steps.
    """

    def __init__(self, shard: ShardOf, device: torch.device) -> None:
        self._shard = shard
        self._device = device
        self._owned: WeakKeyDictionary[Optimizer, Owned] = WeakKeyDictionary()
        self.bytes_sent = 0

    def setup(self, optimizers: Sequence[Optimizer]) -> None:
        """Probe the optimizers, and choose owner ranks for those that need them. Collective.

        Raises:
            UnsupportedError: An optimizer calls collectives by itself.
        """
        for optimizer in optimizers:
            self._owned.pop(optimizer, None)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if is_distributed() or any(isinstance(parameter, DTensor) for parameter in parameters):
                self._owned[optimizer] = self._plan(optimizer)
                log_owners(optimizer, self._owned[optimizer])

    def _plan(self, optimizer: Optimizer) -> Owned:
        trial = self._try(optimizer)
        if trial.communicates:
            raise UnsupportedError(
                f"{type(optimizer).__name__} calls collectives in its step, which expect unsharded "
                "parameters on every rank.",
                remedy="Use its version for a single device: nnx gathers the parameters that it needs.",
            )
        if trial.dependence == "element":
            return Owned(trial, _membership(optimizer))
        if trial.error is not None:
            refuse_hidden_shards(optimizer, trial.error)
        candidates = [
            parameter
            for group, verdict in zip(optimizer.param_groups, trial.groups, strict=True)
            for parameter in group["params"]
            if verdict != "element"
        ]
        shards = [self._shard(parameter) for parameter in candidates]
        held = all_gather_object(
            [
                (shard.boxes, parameter in optimizer.state)
                for parameter, shard in zip(candidates, shards, strict=True)
            ],
            control_group(),
        )
        routes = {
            parameter: Route(shard.shape, *zip(*(of_rank[index] for of_rank in held), strict=True))
            for index, (parameter, shard) in enumerate(zip(candidates, shards, strict=True))
        }
        if trial.dependence == "parameter":
            routes = {
                parameter: route
                for parameter, route in routes.items()
                if isinstance(parameter, DTensor) or not route.is_replicated
            }
        choose_owners(list(routes.values()), to_rank_0=trial.dependence == "model")
        owned = Owned(trial, _membership(optimizer), routes)
        owned.has_state = any(has for of_rank in held for _, has in of_rank)
        self._take_over_state(optimizer, owned)
        return owned

    def _try(self, optimizer: Optimizer) -> Trial:
        """Probe an optimizer on rank zero, and broadcast the result. Collective."""
        # Each rank probing for itself could give different results, such as after a failure on one of them.
        group = control_group()

        def on_rank_0() -> list[Trial]:
            if rank_and_size(group)[0]:
                return []
            return [try_optimizer(optimizer, shape_of=lambda parameter: self._shard(parameter).shape)]

        def for_all(found: list[list[Trial]]) -> list[Trial]:
            return found[0] * len(found)

        return exchange(group, on_rank_0, for_all, doing=f"probing {type(optimizer).__name__}")

    def _take_over_state(self, optimizer: Optimizer, owned: Owned) -> None:
        """Move sharded state that exists already to the owners. Collective.

        The optimizer's constructor may have made it. All ranks then hold entries of the same names.
        """
        rank = dist.get_rank()
        for parameter, route in owned.routes.items():
            for name, value in list(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    optimizer.state[parameter][name] = self._unsharded_state(value, parameter, route)
            if route.owner != rank:
                optimizer.state.pop(parameter, None)

    def _unsharded_state(self, value: Tensor, parameter: nn.Parameter, route: Route) -> Tensor:
        if isinstance(value, DTensor):
            return value.full_tensor()
        shard = self._shard(value, parameter=parameter)
        if shard.is_whole or shard.shape != route.shape:
            return value
        unsharded = value.new_empty(route.shape)
        self._exchange(to_owner([(route, shard.data, unsharded)]))
        return unsharded

    def _current(self, optimizer: Optimizer) -> Owned | None:
        """Return the facts about an optimizer; plan again if its groups changed. Collective then."""
        owned = self._owned.get(optimizer)
        if owned is None:
            return None
        if owned.membership != _membership(optimizer):
            owned = self._owned[optimizer] = self._plan(optimizer)
        return owned if owned.routes else None

    def refusal(self, optimizer: Optimizer) -> str | None:
        """Return the reason why user code cannot read an optimizer's state; None if it can."""
        owned = self._owned.get(optimizer)
        if owned is None or not (owned.routes and owned.has_state):
            return None
        return "each rank holds the state of the parameters that it owns"

    def serves(self, optimizer: Optimizer) -> bool:
        """Return True if owners step some of its parameters. Collective if its groups were changed."""
        return self._current(optimizer) is not None

    def step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run an optimizer's step, on unsharded parameters where its update needs them. Collective.

        The arguments after the optimizer are those of `Backend.optimizer_step`.
        """
        owned = self._current(optimizer)
        if owned is None:
            return step(*args, **kwargs)
        owned.has_state = True
        given = take_closure(args, kwargs)
        # The closure computes the gradients that owners gather, on all ranks, so it must run before the step.
        # A step that evaluates it twice, or changes a weight first, depends on the model: see the probe.
        if owned.trial.dependence == "model":
            return _RankZeroStep(self, optimizer, owned, given).step(step)
        if given.closure is not None and owned.trial.evaluations:
            with torch.enable_grad():
                loss = given.closure()
            args, kwargs = given.calling(lambda: loss)
        elif given.closure is not None:
            args, kwargs = given.calling(partial(_refuse_closure, optimizer))
        stand_ins = self._gather(owned)
        doing = f"the step of {type(optimizer).__name__}"
        with _fail_together(doing, self._device), _with_stand_ins(optimizer, stand_ins):
            result = step(*args, **kwargs)
        self._scatter(owned)
        return result

    @torch.no_grad()
    def _gather(self, owned: Owned) -> dict[nn.Parameter, nn.Parameter | None]:
        """Gather weights and gradients on the owners.

        Returns:
            The unsharded stand-in of every parameter that has an owner; None on other ranks.
        """
        rank = dist.get_rank()
        has_gradient = self._have_gradients(list(owned.routes))
        items: list[Item] = []
        for (parameter, route), has in zip(owned.routes.items(), has_gradient, strict=True):
            weight = self._shard(parameter)
            stand_in = owned.stand_ins.get(parameter)
            if route.owner == rank and stand_in is None:
                stand_in = owned.stand_ins[parameter] = _new_stand_in(parameter)
            if stand_in is not None:
                stand_in.grad = None
                stand_in.data = empty(weight, parameter)
            items.append((route, weight.data, stand_in))
            if not has:
                continue
            if stand_in is not None:
                stand_in.grad = torch.empty_like(stand_in)
            unsharded = None if stand_in is None else stand_in.grad
            items.append((route, self._gradient(parameter, weight), unsharded))
        self._exchange(to_owner(items))
        owned.gradients = {
            parameter: (stand_in.grad, stand_in.grad._version)
            for parameter, stand_in in owned.stand_ins.items()
            if stand_in.grad is not None
        }
        return {parameter: owned.stand_ins.get(parameter) for parameter in owned.routes}

    def _have_gradients(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Return True for each parameter that has a gradient on some rank. Collective."""
        flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self._device)
        all_reduce(flags, dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def _gradient(self, parameter: nn.Parameter, weight: Shard) -> tuple[Tensor, ...]:
        """Return this rank's shard of a gradient; zeros if only other ranks have one."""
        gradient = parameter.grad
        if gradient is None:
            return tuple(torch.zeros_like(view) for view in weight.data)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        return self._shard(gradient, parameter=parameter).data

    @torch.no_grad()
    def _scatter(self, owned: Owned) -> None:
        """Scatter the stand-ins of the owners to the shards, and free their memory."""
        items: list[Item] = [
            (route, self._shard(parameter).data, owned.stand_ins.get(parameter))
            for parameter, route in owned.routes.items()
        ]
        self._exchange(from_owner([*items, *self._changed_gradients(owned)]))
        owned.gradients.clear()
        for stand_in in owned.stand_ins.values():
            stand_in.grad = None
            stand_in.data = stand_in.data.new_empty(0)

    def _changed_gradients(self, owned: Owned) -> list[Item]:
        """Drop gradients that the step has dropped; return those that it has written. Collective.

        A step may call `zero_grad`, and user code may count on it: the next backward adds to what is left.
        """
        flags = torch.zeros(len(owned.routes), dtype=torch.uint8, device=self._device)
        for index, parameter in enumerate(owned.routes):
            stand_in, given = owned.stand_ins.get(parameter), owned.gradients.get(parameter)
            if stand_in is None or given is None:
                continue
            if stand_in.grad is None:
                flags[index] = _DROPPED
            elif stand_in.grad is not given[0] or stand_in.grad._version != given[1]:
                flags[index] = _WRITTEN
        all_reduce(flags, dist.ReduceOp.MAX)
        items: list[Item] = []
        for (parameter, route), flag in zip(owned.routes.items(), flags.tolist(), strict=True):
            if flag == _DROPPED:
                parameter.grad = None
            elif flag == _WRITTEN:
                stand_in = owned.stand_ins.get(parameter)
                own = self._gradient(parameter, self._shard(parameter))
                items.append((route, own, None if stand_in is None else stand_in.grad))
        return items

    def _exchange(self, transfers: Sequence[Transfer]) -> None:
        """Send slices of tensors to their target ranks, all in one collective."""
        rank, size = dist.get_rank(), dist.get_world_size()
        out: list[list[Tensor]] = [[] for _ in range(size)]
        into: list[list[Tensor]] = [[] for _ in range(size)]
        for transfer in transfers:
            if transfer.source == transfer.target == rank:
                transfer.received.copy_(transfer.sent)
            elif transfer.source == rank:
                out[transfer.target].append(as_bytes(transfer.sent.to(self._device)))
            elif transfer.target == rank:
                into[transfer.source].append(transfer.received)
        # Every rank lists the same transfers in the same order, so the bytes need no header.
        sent = torch.cat([data for of_rank in out for data in of_rank] or [self._no_bytes()])
        output_splits = [sum(view.numel() * view.element_size() for view in views) for views in into]
        received = self._no_bytes(sum(output_splits))
        splits = [sum(data.numel() for data in of_rank) for of_rank in out]
        dist.all_to_all_single(received, sent, output_splits, splits)
        self.bytes_sent += sent.numel()
        reached = 0
        for view in (view for views in into for view in views):
            length = view.numel() * view.element_size()
            fill_from_bytes(view, received[reached : reached + length])
            reached += length

    def _no_bytes(self, count: int = 0) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._device)

    def describe(self, module: nn.Module, optimizer: Optimizer, *, alone: bool = False) -> OptimizerState:
        """Describe an optimizer's state: owners hold theirs unsharded, other ranks none of it. Collective.

        Args:
            module: Owner of the parameters.
            optimizer: The optimizer with the state.
            alone: Describe only the state on this rank, without communication.
        """
        owned = self._owned.get(optimizer)
        routes: Mapping[nn.Parameter, Route] = {} if owned is None else owned.routes

        def shard(tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
            return shard_of(tensor) if parameter in routes else self._shard(tensor, parameter=parameter)

        state = describe_optimizer(module, optimizer, shard)
        if not routes or alone:
            return state
        names = parameter_names(module)
        own = {
            names[parameter]: state["state"][names[parameter]]
            for parameter, route in routes.items()
            if route.owner == dist.get_rank() and names[parameter] in state["state"]
        }
        for name, entries in _share(own).items():
            state["state"].setdefault(name, entries)
        return state

    def load(self, backend: Any, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        """Restore an optimizer in place: each rank fills the state that it owns, and its shards.

        Args:
            backend: Allocates the state of parameters that have no owner.
            module: Owner of the parameters.
            optimizer: The optimizer to restore.
            saved: The state, see `Backend.load_optimizer_state`.
        """
        owned = self._owned.get(optimizer)
        if owned is None or not owned.routes:
            fill_optimizer(backend, module, optimizer, saved)
            return
        owned.has_state = True
        names = parameter_names(module)
        rank = dist.get_rank()
        others = {names[parameter] for parameter, route in owned.routes.items() if route.owner != rank}
        state = {name: entries for name, entries in saved["state"].items() if name not in others}
        own = OptimizerState(state=state, param_groups=saved["param_groups"])
        fill_optimizer(_OwnState(self, backend, owned), module, optimizer, own)


def _new_stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Make an empty plain parameter with the user's attributes of the engine's parameter."""
    with torch.no_grad():
        stand_in = nn.Parameter(torch.empty(0, device=parameter.device), requires_grad=False)
    stand_in.requires_grad_(parameter.requires_grad)
    vars(stand_in).update(vars(parameter))
    return stand_in


@contextmanager
def _with_stand_ins(
    optimizer: Optimizer, stand_ins: Mapping[nn.Parameter, nn.Parameter | None]
) -> Iterator[None]:
    """Replace parameters by their stand-ins in the optimizer and the objects in it, in a context."""
    forward = {id(parameter): stand_in for parameter, stand_in in stand_ins.items()}
    replaced = _Replaced()
    replaced.walk(optimizer, forward)
    try:
        yield
    finally:
        replaced.restore({new: parameter for parameter, new in stand_ins.items() if new is not None})


class _Replaced:
    """The containers of an optimizer in which stand-ins replaced parameters."""

    def __init__(self) -> None:
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._dicts: list[dict[Any, Any]] = []
        self._seen: set[int] = set()

    def walk(self, value: Any, stand_ins: Mapping[int, nn.Parameter | None], depth: int = 0) -> None:
        """Replace parameters in lists and in keys of dicts, also in attributes of optimizers.

        Wrappers such as Lookahead, and optimizers of several optimizers, hold parameters outside of
        ``param_groups``, so the walk covers attributes. Its depth is limited, as they may refer to anything.
        """
        if id(value) in self._seen or depth > 4 or isinstance(value, Tensor):
            return
        self._seen.add(id(value))
        if isinstance(value, Optimizer):
            for attribute in vars(value).values():
                self.walk(attribute, stand_ins, depth + 1)
        elif isinstance(value, list):
            self._in_list(value, stand_ins, depth)
        elif isinstance(value, dict):
            self._in_dict(value, stand_ins, depth)
        elif isinstance(value, tuple):
            for item in value:
                self.walk(item, stand_ins, depth + 1)

    def _in_list(self, value: list[Any], stand_ins: Mapping[int, nn.Parameter | None], depth: int) -> None:
        if not any(id(item) in stand_ins for item in value):
            for item in value:
                self.walk(item, stand_ins, depth + 1)
            return
        self._lists.append((value, list(value)))
        # Parameters of other owners have no stand-in and drop out: the step must not touch their shards.
        value[:] = [item for item in (stand_ins.get(id(item), item) for item in value) if item is not None]

    def _in_dict(
        self, value: dict[Any, Any], stand_ins: Mapping[int, nn.Parameter | None], depth: int
    ) -> None:
        self._dicts.append(value)
        for key in list(value):
            stand_in = stand_ins.get(id(key))
            if stand_in is not None:
                value[stand_in] = value.pop(key)
        for item in value.values():
            self.walk(item, stand_ins, depth + 1)

    def restore(self, parameters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Restore the user's parameters, also as keys of state that the step made."""
        for value, before in self._lists:
            value[:] = before
        for entries in self._dicts:
            for key in [key for key in entries if isinstance(key, nn.Parameter) and key in parameters]:
                entries[parameters[key]] = entries.pop(key)


def _refuse_closure(optimizer: Optimizer) -> Any:
    """Refuse a call of the closure by an optimizer that called none when it was probed."""
    raise UnsupportedError(
        f"the step of {type(optimizer).__name__} calls its closure, and did not when it was probed, so its "
        "parameters were gathered before the backward.",
        remedy="Call the closure first in its step, for all options and states.",
    )


@contextmanager
def _fail_together(doing: str, device: torch.device) -> Iterator[None]:
    """Raise on every rank if the block fails on one: the others would wait for it in the next collective."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    failed = torch.tensor(float(error is not None), device=device)
    all_reduce(failed, dist.ReduceOp.MAX)
    if error is not None:
        raise error
    if failed.item():
        raise NnxError(f"{doing} failed on another rank.", remedy="Look at the error of that rank.")


class _RankZeroStep:
    """One step of an optimizer that runs on rank zero, while the other ranks serve its closure calls.

    The optimizer decides when, how often and at which weights it evaluates the closure. The closure is
    collective, so rank zero broadcasts a command before each evaluation, and one when its step ends.

    Args:
        owners: The owner ranks, which move tensors.
        optimizer: The user's optimizer.
        owned: The facts about it.
        given: The arguments of the step.
    """

    def __init__(self, owners: OwnerRanks, optimizer: Optimizer, owned: Owned, given: StepArguments) -> None:
        self._owners, self._optimizer, self._owned, self._given = owners, optimizer, owned, given
        self._result: Any = None
        self._replaced: _Replaced | None = None

    def step(self, step: Callable[..., T]) -> T:
        """Run the step on rank zero; the other ranks evaluate the closure on its commands."""
        stand_ins = self._owners._gather(self._owned)
        if dist.get_rank() == 0:
            return self._step_on_rank_zero(step, stand_ins)
        args, kwargs = self._given.calling(self._given.closure)
        run_step_hooks(self._optimizer, args, kwargs, before=True)
        command = self._receive()
        while command == _EVALUATE:
            self._evaluate()
            command = self._receive()
        if command == _FAILED:
            raise NnxError(
                f"the step of {type(self._optimizer).__name__} failed on rank 0.",
                remedy="Look at the error of rank 0.",
            )
        self._owners._scatter(self._owned)
        run_step_hooks(self._optimizer, args, kwargs, before=False)
        return cast(T, self._result)

    def _step_on_rank_zero(
        self, step: Callable[..., T], stand_ins: Mapping[nn.Parameter, nn.Parameter | None]
    ) -> T:
        closure = None if self._given.closure is None else self._evaluate_everywhere
        args, kwargs = self._given.calling(closure)
        self._replace(stand_ins)
        try:
            result = step(*args, **kwargs)
        except Exception:
            self._restore()
            self._send(_FAILED)
            raise
        self._restore()
        self._send(_DONE)
        self._owners._scatter(self._owned)
        return result

    def _evaluate_everywhere(self) -> Any:
        """Evaluate the closure on every rank at rank zero's current weights; return the mean loss."""
        self._restore()  # a `zero_grad` in the closure must reach the model's own parameters
        self._send(_EVALUATE)
        self._replace(self._evaluate())
        return self._result

    def _evaluate(self) -> Mapping[nn.Parameter, nn.Parameter | None]:
        assert self._given.closure is not None
        self._owners._scatter(self._owned)
        with torch.enable_grad():
            self._result = mean_loss(self._given.closure(), self._owners._device)
        return self._owners._gather(self._owned)

    def _replace(self, stand_ins: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
        self._replaced = _Replaced()
        self._replaced.walk(self._optimizer, {id(parameter): new for parameter, new in stand_ins.items()})

    def _restore(self) -> None:
        if self._replaced is not None:
            self._replaced.restore({new: parameter for parameter, new in self._owned.stand_ins.items()})
        self._replaced = None

    def _send(self, command: int) -> None:
        dist.broadcast(torch.tensor(command, device=self._owners._device), src=0)

    def _receive(self) -> int:
        command = torch.tensor(_DONE, device=self._owners._device)
        dist.broadcast(command, src=0)
        return int(command)


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Describes a tensor of an owner's state to the other ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _share(own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the state of all owners, as every rank describes it. Collective.

    Tensors of other owners are shards without a box. Other values are copied to every rank, except those with
    tensors in them, such as lists of preconditioners: they can be large, and only rank zero writes them.
    """
    known = {
        name: {
            key: _Elsewhere(value.shape, value.dtype) if isinstance(value, Shard) else value
            for key, value in entries.items()
            if isinstance(value, Shard) or not _has_tensors(value)
        }
        for name, entries in own.items()
    }
    rest = {
        name: {key: value for key, value in entries.items() if key not in known[name]}
        for name, entries in own.items()
    }
    group = control_group()
    described = all_gather_object((known, any(rest.values())), group)
    everything = {name: entries for known_by_rank, _ in described for name, entries in known_by_rank.items()}
    if any(has_rest for _, has_rest in described):
        for rest_of_rank in gather_object(rest, group) or []:
            for name, entries in rest_of_rank.items():
                everything[name].update(entries)
    return {
        name: {
            key: Shard(value.shape, value.dtype, (), ()) if isinstance(value, _Elsewhere) else value
            for key, value in entries.items()
        }
        for name, entries in everything.items()
    }


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tensors(item) for item in value.values())
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple | set) and any(_has_tensors(item) for item in value)
    )


class _OwnState:
    """Stands in for the backend in `fill_optimizer`, where owners hold unsharded state."""

    def __init__(self, owners: OwnerRanks, backend: Any, owned: Owned) -> None:
        self._owners, self._backend, self._owned = owners, backend, owned

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return this rank's handles."""
        return self._owners.describe(module, optimizer, alone=True)

    def new_optimizer_state(
        self,
        parameter: nn.Parameter,
        name: str,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        group: Mapping[str, Any],
    ) -> Tensor:
        """Allocate a state tensor; unsharded for a parameter that this rank owns."""
        if parameter not in self._owned.routes:
            made: Tensor = self._backend.new_optimizer_state(
                parameter, name, shape=shape, dtype=dtype, group=group
            )
            return made
        on_host = not shape and not (group.get("fused") or group.get("capturable"))
        return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
