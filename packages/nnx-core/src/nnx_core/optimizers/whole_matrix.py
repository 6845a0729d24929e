"""Optimizers that need more of a parameter than a rank holds: one owner rank steps each parameter whole.

Where `nnx_core.optimizers.elementwise` finds that an update depends on the whole *parameter* (Muon, LAMB,
Shampoo), every parameter that is held in parts gets an owner, balanced by work. In a step each owner receives
the gradient and the weight of its parameters, the user's optimizer steps there on complete tensors, and every
rank gets its part of the new weights back. Where an update depends on the *model* (SAM, LBFGS, a norm of all
gradients), rank 0 owns all parameters, and the other ranks follow it: they evaluate the closure whenever its
step does.

State stays with the owner, whole, and is described so. The optimizer, its groups and its state dict stay
the user's: for the time of a step complete tensors are in its parameters' places.

This module knows parameters by the shards that an engine describes, so it serves every engine.
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
from nnx_core.optimizers.elementwise import Trial, refuse_hidden_shards, try_optimizer
from nnx_core.optimizers.owners import (
    Item,
    Owned,
    Parcel,
    Route,
    _membership,
    choose_owners,
    empty,
    fill_from_bytes,
    from_owner,
    tell,
    to_owner,
)
from nnx_core.optimizers.step_arguments import StepArguments, take_closure

__all__ = ["OwnerRanks"]

T = TypeVar("T")

_DONE, _EVALUATE, _FAILED = 0, 1, 2

_DROPPED, _WRITTEN = 1, 2


class OwnerRanks:
    """Steps the optimizers of one engine whose updates need whole parameters.

    An engine makes one, hands it its optimizers in `Backend.setup_optimizers`, and lets it step and describe
    them. Optimizers of single elements, and parameters that every rank holds whole, are left to themselves.

    Args:
        shard: The engine's `Backend.shard`: where a parameter, or its gradient, lies.
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
        """Find out which optimizers need owners, and choose them. Collective.

        Raises:
            UnsupportedError: An optimizer calls collectives by itself.
        """
        for optimizer in optimizers:
            self._owned.pop(optimizer, None)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if is_distributed() or any(isinstance(parameter, DTensor) for parameter in parameters):
                self._owned[optimizer] = self._plan(optimizer)
                tell(optimizer, self._owned[optimizer])

    def _plan(self, optimizer: Optimizer) -> Owned:
        trial = self._try(optimizer)
        if trial.communicates:
            raise UnsupportedError(
                f"{type(optimizer).__name__} calls collectives in its step, which expect whole parameters on "
                "every rank.",
                remedy="Use the version of it for a single device: nnx gathers what it needs.",
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
        """Try an optimizer on rank 0, for all ranks: they must not come to different answers. Collective."""
        group = control_group()

        def on_rank_0() -> list[Trial]:
            if rank_and_size(group)[0]:
                return []
            return [try_optimizer(optimizer, shape_of=lambda parameter: self._shard(parameter).shape)]

        def for_all(found: list[list[Trial]]) -> list[Trial]:
            return found[0] * len(found)

        return exchange(
            group, on_rank_0, for_all, doing=f"finding out what {type(optimizer).__name__} depends on"
        )

    def _take_over_state(self, optimizer: Optimizer, owned: Owned) -> None:
        """Move sharded state that the optimizer made before to owners. Collective.

        Its constructor may have made it; ranks hold the same names then.
        """
        rank = dist.get_rank()
        for parameter, route in owned.routes.items():
            for name, value in list(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    optimizer.state[parameter][name] = self._whole_state(value, parameter, route)
            if route.owner != rank:
                optimizer.state.pop(parameter, None)

    def _whole_state(self, value: Tensor, parameter: nn.Parameter, route: Route) -> Tensor:
        if isinstance(value, DTensor):
            return value.full_tensor()
        shard = self._shard(value, parameter=parameter)
        if shard.is_whole or shard.shape != route.shape:
            return value
        whole = value.new_empty(route.shape)
        self._exchange(to_owner([(route, shard.data, whole)]))
        return whole

    def _current(self, optimizer: Optimizer) -> Owned | None:
        """Return the facts about an optimizer; collect them again if its groups changed. Collective then."""
        owned = self._owned.get(optimizer)
        if owned is None:
            return None
        if owned.membership != _membership(optimizer):
            owned = self._owned[optimizer] = self._plan(optimizer)
        return owned if owned.routes else None

    def refusal(self, optimizer: Optimizer) -> str | None:
        """Why user code cannot look at an optimizer's state: it is whole, and only where it is stepped."""
        owned = self._owned.get(optimizer)
        if owned is None or not (owned.routes and owned.has_state):
            return None
        return "each rank has that of the parameters that it owns"

    def serves(self, optimizer: Optimizer) -> bool:
        """Return True if owners step some of its parameters. Collective if its groups were changed."""
        return self._current(optimizer) is not None

    def step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run an optimizer's step, on whole parameters where it needs them. Collective.

        The arguments after the optimizer are those of `Backend.optimizer_step`.
        """
        owned = self._current(optimizer)
        if owned is None:
            return step(*args, **kwargs)
        owned.has_state = True
        given = take_closure(args, kwargs)
        if owned.trial.dependence == "model":
            return _Led(self, optimizer, owned, given).step(step)
        if given.closure is not None and owned.trial.evaluations:
            with torch.enable_grad():
                loss = given.closure()
            args, kwargs = given.calling(lambda: loss)
        elif given.closure is not None:
            args, kwargs = given.calling(partial(_refuse_closure, optimizer))
        places = self._gather(owned)
        doing = f"the step of {type(optimizer).__name__}"
        with _on_every_rank(doing, self._device), _in_places(optimizer, places):
            result = step(*args, **kwargs)
        self._scatter(owned)
        return result

    @torch.no_grad()
    def _gather(self, owned: Owned) -> dict[nn.Parameter, nn.Parameter | None]:
        """Give owners the weights and gradients of their parameters.

        Returns:
            For every parameter that has an owner the complete one in its place; None on other ranks.
        """
        rank = dist.get_rank()
        has_gradient = self._have_gradients(list(owned.routes))
        items: list[Item] = []
        for (parameter, route), has in zip(owned.routes.items(), has_gradient, strict=True):
            weight = self._shard(parameter)
            place = owned.places.get(parameter)
            if route.owner == rank and place is None:
                place = owned.places[parameter] = _new_place(parameter)
            if place is not None:
                place.grad = None
                place.data = empty(weight, parameter)
            items.append((route, weight.data, place))
            if not has:
                continue
            if place is not None:
                place.grad = torch.empty_like(place)
            items.append((route, self._gradient(parameter, weight), None if place is None else place.grad))
        self._exchange(to_owner(items))
        owned.gradients = {
            parameter: (place.grad, place.grad._version)
            for parameter, place in owned.places.items()
            if place.grad is not None
        }
        return {parameter: owned.places.get(parameter) for parameter in owned.routes}

    def _have_gradients(self, parameters: Sequence[nn.Parameter]) -> list[bool]:
        """Which parameters have a gradient on some rank."""
        flags = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=self._device)
        all_reduce(flags, dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def _gradient(self, parameter: nn.Parameter, weight: Shard) -> tuple[Tensor, ...]:
        """This rank's part of a gradient; zeros where only other ranks have one."""
        gradient = parameter.grad
        if gradient is None:
            return tuple(torch.zeros_like(view) for view in weight.data)
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        return self._shard(gradient, parameter=parameter).data

    @torch.no_grad()
    def _scatter(self, owned: Owned) -> None:
        """Give every rank its part of what owners have in their parameters' places, and free these."""
        items: list[Item] = [
            (route, self._shard(parameter).data, owned.places.get(parameter))
            for parameter, route in owned.routes.items()
        ]
        self._exchange(from_owner([*items, *self._changed_gradients(owned)]))
        owned.gradients.clear()
        for place in owned.places.values():
            place.grad = None
            place.data = place.data.new_empty(0)

    def _changed_gradients(self, owned: Owned) -> list[Item]:
        """Drop gradients that the step has dropped; return those that it has written. Collective.

        A step may call `zero_grad`, and user code may count on it: the next backward adds to what is left.
        """
        flags = torch.zeros(len(owned.routes), dtype=torch.uint8, device=self._device)
        for index, parameter in enumerate(owned.routes):
            place, given = owned.places.get(parameter), owned.gradients.get(parameter)
            if place is None or given is None:
                continue
            if place.grad is None:
                flags[index] = _DROPPED
            elif place.grad is not given[0] or place.grad._version != given[1]:
                flags[index] = _WRITTEN
        all_reduce(flags, dist.ReduceOp.MAX)
        items: list[Item] = []
        for (parameter, route), flag in zip(owned.routes.items(), flags.tolist(), strict=True):
            if flag == _DROPPED:
                parameter.grad = None
            elif flag == _WRITTEN:
                place = owned.places.get(parameter)
                own = self._gradient(parameter, self._shard(parameter))
                items.append((route, own, None if place is None else place.grad))
        return items

    def _exchange(self, parcels: Sequence[Parcel]) -> None:
        """Send pieces of tensors where they belong, all of them in one collective."""
        rank, size = dist.get_rank(), dist.get_world_size()
        out: list[list[Tensor]] = [[] for _ in range(size)]
        into: list[list[Tensor]] = [[] for _ in range(size)]
        for parcel in parcels:
            if parcel.source == parcel.target == rank:
                parcel.received.copy_(parcel.sent)
            elif parcel.source == rank:
                out[parcel.target].append(as_bytes(parcel.sent.to(self._device)))
            elif parcel.target == rank:
                into[parcel.source].append(parcel.received)
        sent = torch.cat([piece for pieces in out for piece in pieces] or [self._no_bytes()])
        output_splits = [sum(view.numel() * view.element_size() for view in views) for views in into]
        received = self._no_bytes(sum(output_splits))
        splits = [sum(piece.numel() for piece in pieces) for pieces in out]
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
        """Describe an optimizer's state: owners hold theirs whole, other ranks nothing of it. Collective.

        Args:
            module: Owner of the parameters.
            optimizer: The optimizer with the state.
            alone: Describe what this rank holds only, without communicating.
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
        """Restore an optimizer in place; each rank fills the state that it owns, and its shards.

        Args:
            backend: Allocates the state of parameters that have no owner.
            module: Owner of the parameters.
            optimizer: The optimizer to restore.
            saved: As for `Backend.load_optimizer_state`.
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


def _new_place(parameter: nn.Parameter) -> nn.Parameter:
    """A plain parameter with the attributes that the user gave the engine's."""
    with torch.no_grad():
        place = nn.Parameter(torch.empty(0, device=parameter.device), requires_grad=False)
    place.requires_grad_(parameter.requires_grad)
    vars(place).update(vars(parameter))
    return place


@contextmanager
def _in_places(optimizer: Optimizer, places: Mapping[nn.Parameter, nn.Parameter | None]) -> Iterator[None]:
    """Give the optimizer, and the objects in it, the complete parameters that it owns, in a context."""
    forward = {id(parameter): place for parameter, place in places.items()}
    changed = _Replaced()
    changed.walk(optimizer, forward)
    try:
        yield
    finally:
        changed.give_back({place: parameter for parameter, place in places.items() if place is not None})


class _Replaced:
    """Containers of an optimizer in which parameters were replaced, and how to give them back."""

    def __init__(self) -> None:
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._dicts: list[dict[Any, Any]] = []
        self._seen: set[int] = set()

    def walk(self, value: Any, places: Mapping[int, nn.Parameter | None], depth: int = 0) -> None:
        """Replace parameters in lists and keys of dicts, in attributes of optimizers too."""
        if id(value) in self._seen or depth > 4 or isinstance(value, Tensor):
            return
        self._seen.add(id(value))
        if isinstance(value, Optimizer):
            for attribute in vars(value).values():
                self.walk(attribute, places, depth + 1)
        elif isinstance(value, list):
            self._in_list(value, places, depth)
        elif isinstance(value, dict):
            self._in_dict(value, places, depth)
        elif isinstance(value, tuple):
            for item in value:
                self.walk(item, places, depth + 1)

    def _in_list(self, value: list[Any], places: Mapping[int, nn.Parameter | None], depth: int) -> None:
        if not any(id(item) in places for item in value):
            for item in value:
                self.walk(item, places, depth + 1)
            return
        self._lists.append((value, list(value)))
        value[:] = [item for item in (places.get(id(item), item) for item in value) if item is not None]

    def _in_dict(self, value: dict[Any, Any], places: Mapping[int, nn.Parameter | None], depth: int) -> None:
        self._dicts.append(value)
        for key in list(value):
            place = places.get(id(key))
            if place is not None:
                value[place] = value.pop(key)
        for item in value.values():
            self.walk(item, places, depth + 1)

    def give_back(self, parameters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Put the user's parameters back, also for state that was made meanwhile."""
        for value, before in self._lists:
            value[:] = before
        for entries in self._dicts:
            for key in [key for key in entries if isinstance(key, nn.Parameter) and key in parameters]:
                entries[parameters[key]] = entries.pop(key)


def _refuse_closure(optimizer: Optimizer) -> Any:
    """The closure for an optimizer that called none when it was probed."""
    raise UnsupportedError(
        f"the step of {type(optimizer).__name__} calls its closure, and did not when it was tried, so that "
        "its parameters were gathered before the backward.",
        remedy="Let its step call the closure first, whatever its options and state are.",
    )


@contextmanager
def _on_every_rank(doing: str, device: torch.device) -> Iterator[None]:
    """Let a failure of one rank fail all ranks, before they wait for each other."""
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


class _Led:
    """One step of an optimizer that rank 0 takes for all, and that the other ranks follow.

    Args:
        owners: The owner ranks, which move tensors.
        optimizer: The user's.
        owned: Describes the owned parameter.
        given: The arguments of the step, whose closure every rank has to evaluate together.
    """

    def __init__(self, owners: OwnerRanks, optimizer: Optimizer, owned: Owned, given: StepArguments) -> None:
        self._owners, self._optimizer, self._owned, self._given = owners, optimizer, owned, given
        self._result: Any = None
        self._replaced: _Replaced | None = None

    def step(self, step: Callable[..., T]) -> T:
        """Run the step on rank 0; elsewhere evaluate the closure whenever it does."""
        places = self._owners._gather(self._owned)
        if dist.get_rank() == 0:
            return self._lead(step, places)
        args, kwargs = self._given.calling(self._given.closure)
        run_step_hooks(self._optimizer, args, kwargs, before=True)
        command = self._hear()
        while command == _EVALUATE:
            self._evaluate()
            command = self._hear()
        if command == _FAILED:
            raise NnxError(
                f"the step of {type(self._optimizer).__name__} failed on rank 0.",
                remedy="Look at the error of rank 0.",
            )
        self._owners._scatter(self._owned)
        run_step_hooks(self._optimizer, args, kwargs, before=False)
        return cast(T, self._result)

    def _lead(self, step: Callable[..., T], places: Mapping[nn.Parameter, nn.Parameter | None]) -> T:
        closure = None if self._given.closure is None else self._evaluate_everywhere
        args, kwargs = self._given.calling(closure)
        self._put(places)
        try:
            result = step(*args, **kwargs)
        except Exception:
            self._give_back()
            self._say(_FAILED)
            raise
        self._give_back()
        self._say(_DONE)
        self._owners._scatter(self._owned)
        return result

    def _evaluate_everywhere(self) -> Any:
        """The closure as rank 0's optimizer sees it: at the weights of now, with the loss of all ranks."""
        self._give_back()
        self._say(_EVALUATE)
        self._put(self._evaluate())
        return self._result

    def _evaluate(self) -> Mapping[nn.Parameter, nn.Parameter | None]:
        assert self._given.closure is not None
        self._owners._scatter(self._owned)
        with torch.enable_grad():
            self._result = self._mean(self._given.closure())
        return self._owners._gather(self._owned)

    def _mean(self, loss: Any) -> Any:
        """The mean of a loss over the ranks: what one process would have computed."""
        if not isinstance(loss, Tensor | float | int):
            return loss
        mean = torch.as_tensor(loss).detach().to(self._owners._device, copy=True)
        mean = mean if mean.is_floating_point() else mean.float()
        all_reduce(mean)
        mean /= dist.get_world_size()
        return mean if isinstance(loss, Tensor) else mean.item()

    def _put(self, places: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
        self._replaced = _Replaced()
        self._replaced.walk(self._optimizer, {id(parameter): place for parameter, place in places.items()})

    def _give_back(self) -> None:
        if self._replaced is not None:
            self._replaced.give_back({place: own for own, place in self._owned.places.items()})
        self._replaced = None

    def _say(self, command: int) -> None:
        dist.broadcast(torch.tensor(command, device=self._owners._device), src=0)

    def _hear(self) -> int:
        command = torch.tensor(_DONE, device=self._owners._device)
        dist.broadcast(command, src=0)
        return int(command)


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Stands for a tensor of an owner's state where other ranks describe it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _share(own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The state of all owners, as every rank describes it.

    Tensors of others are shards without a box here. Other values are known everywhere; those with tensors
    in them, as lists of preconditioners, only to rank 0, which writes them.
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
    """The backend for `fill_optimizer`, where owners hold complete state."""

    def __init__(self, owners: OwnerRanks, backend: Any, owned: Owned) -> None:
        self._owners, self._backend, self._owned = owners, backend, owned

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """This rank's handles."""
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
        """Allocate a state tensor; whole for a parameter of this rank's own."""
        if parameter not in self._owned.routes:
            made: Tensor = self._backend.new_optimizer_state(
                parameter, name, shape=shape, dtype=dtype, group=group
            )
            return made
        on_host = not shape and not (group.get("fused") or group.get("capturable"))
        return torch.zeros(shape, dtype=dtype, device="cpu" if on_host else parameter.device)
