"""Measure a step's activations by running forward and backward on tensors without memory.

The run restores the module and never fails: if a model cannot run this way, the result is empty and has the
reason. The first real step would come too late for measuring, because the plan decides before it which
weights are on the device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nnx_colossalai._torch_compat import (
    FakeTensorMode,
    TorchDispatchMode,
    flops_of,
    tree_leaves,
    tree_map,
)
from nnx_colossalai.plan.units import FoundUnit
from nnx_core.errors import UnsupportedError
from nnx_core.random_state import forked
from nnx_core.view.side_effects import PythonState


@dataclass(frozen=True, slots=True)
class Probe:
    """The memory and work of one step of a model on one rank.

    Attributes:
        activation_bytes: The bytes that each unit's forward saves for backward; recomputed activations are
            not saved.
        flops: The floating point operations of forward and backward, by unit.
        temporary_bytes: The peak beyond all activations, without gradients of weights.
        used_outside: The names of units whose weights were used outside of their module's forward; these
            cannot be units.
        note: The reason why the model could not run; empty if it ran.
    """

    activation_bytes: Mapping[str, int] = field(default_factory=dict)
    flops: Mapping[str, int] = field(default_factory=dict)
    temporary_bytes: int = 0
    used_outside: frozenset[str] = frozenset()
    note: str = ""


def probe(
    units: Sequence[FoundUnit],
    call: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    working: torch.dtype | None = None,
    mixed: bool = False,
) -> Probe:
    """Run a step on tensors without memory, and measure its activations and operations.

    Args:
        units: All units of the model; the last one is the root's.
        call: The root, a submodule of it, or a function that calls it; its result is differentiated.
        args: The positional arguments of the call; tensors may be on any device, also on the meta device.
        kwargs: The keyword arguments of the call.
        device: The device whose operators run: those of a GPU need fewer temporaries than those of a CPU.
        working: The dtype of the weights in forward and backward; None keeps the module's own.
        mixed: True if autocast to `working` is on.

    Example:
        >>> from nnx_colossalai.plan.units import find_units
        >>> model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
        >>> found = probe(find_units(model), model, [torch.ones(16, 400)])
        >>> found.activation_bytes["2"], found.activation_bytes[""]  # the output; the input and the ReLU's
        (25600, 51200)
    """
    root, place = units[-1].module, torch.device(device)
    other = None if mixed else working
    try:
        with torch.inference_mode(False), restored(root), FakeTensorMode(allow_non_fake_inputs=True):
            weights = stand_in_weights(root, place, parameters=working, buffers=other)
            tracker = _Tracker(units, weights)
            arguments, keywords = inputs_of((list(args), dict(kwargs or {})), place, other)
            for value in tree_leaves((arguments, keywords)):
                tracker.note_made(value)
            with tracker.following(), torch.enable_grad():
                with torch.autocast(place.type, dtype=working, enabled=mixed):
                    output = call(*arguments, **keywords)
                tracker.forward_ended()
                _backward(output)
            return tracker.result()
    # The model's own code runs here, which may raise anything.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        return Probe(note=f"activations are not counted: {type(error).__name__}: {reason}")


def _backward(output: Any) -> None:
    ends = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if ends:
        # Backward on a GPU would run in another thread, where the dispatch modes are not active.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


class _Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the memory of every tensor that operators make, from its creation to its deletion.

    Args:
        units: The units of the model.
        weights: The stand-in of each parameter, by the id of the original.
    """

    def __init__(self, units: Sequence[FoundUnit], weights: Mapping[int, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = units
        self._running = [""]
        self._inside: Counter[str] = Counter({"": 1})
        self._storages: dict[int, weakref.ref[Any]] = {}
        # Pairs of a storage's number and the bytes that it allocates or, if negative, frees.
        self._events: list[tuple[int, int]] = []
        self._made_in: list[str] = []
        self._gradients: set[int] = set()
        self._forward_flops: Counter[str] = Counter()
        self._backward_flops = 0
        self._forward_events: int | None = None
        self._used_outside: set[str] = set()
        self._unit_of = {
            id(weights[id(parameter)].untyped_storage()): unit.name
            for unit in units
            for parameter in unit.parameters.values()
        }
        self._weights = list(weights.values())
        self._buffers = [buffer.untyped_storage() for buffer in units[-1].module.buffers()]
        self._there = {*self._unit_of, *map(id, self._buffers)}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Context manager that tracks operators and the running unit; `restored` removes its hooks."""
        for unit in self._units[:-1]:
            unit.module.register_forward_pre_hook(self._entering(unit.name), prepend=True)
            unit.module.register_forward_hook(self._leaving(unit.name), always_call=True)
        for weight in self._weights:
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._gradient_is_done)  # type: ignore[no-untyped-call]
        with self:
            yield

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._running.append(name)
            self._inside[name] += 1

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._running.pop()
            self._inside[name] -= 1

        return hook

    def _gradient_is_done(self, weight: Tensor) -> None:
        """Exclude a weight's gradient from the count."""
        # The memory model counts it already, as the gradient or on its way to the master.
        if weight.grad is not None:
            number = weight.grad.untyped_storage().__dict__.get("nnx_number")
            if number is not None:
                self._gradients.add(number)
            weight.grad = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            raise RuntimeError("it communicates with other ranks")
        result = func(*args, **kwargs)
        flops = flops_of(func, args, kwargs, result)
        if self._forward_events is None:
            self._forward_flops[self._running[-1]] += flops
            for value in tree_leaves((args, kwargs)):
                self._note_use(value)
        else:
            self._backward_flops += flops
        for value in tree_leaves(result):
            self.note_made(value)
        return result

    def _note_use(self, value: Any) -> None:
        if isinstance(value, Tensor):
            unit = self._unit_of.get(id(value.untyped_storage()))
            if unit is not None and not self._inside[unit]:
                self._used_outside.add(unit)

    def note_made(self, value: Any) -> None:
        """Count a tensor's memory until it is freed, unless it is counted already."""
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key = id(storage)
        if key in self._there or key in self._storages:
            return
        number, size = len(self._made_in), storage.nbytes()
        self._made_in.append(self._running[-1])
        self._events.append((number, size))

        def gone(_: Any) -> None:
            self._events.append((number, -size))
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, gone)
        storage.__dict__["nnx_number"] = number

    def forward_ended(self) -> None:
        """Mark the end of the forward: live tensors are activations."""
        self._forward_events = len(self._events)

    def result(self) -> Probe:
        """Return the measurement."""
        kept: Counter[str] = Counter()
        for number, size in self._events[: self._forward_events]:
            kept[self._made_in[number]] += size
        now = most = 0
        for number, size in self._events:
            now += 0 if number in self._gradients else size
            most = max(most, now)
        # The unit of a backward operation is unknown: units share them in proportion to the forward's.
        forward = sum(self._forward_flops.values())
        factor = 1 + (self._backward_flops / forward if forward else 0)
        return Probe(
            activation_bytes={unit.name: kept[unit.name] for unit in self._units},
            flops={unit.name: round(self._forward_flops[unit.name] * factor) for unit in self._units},
            temporary_bytes=max(most - sum(kept.values()), 0),
            used_outside=frozenset(self._used_outside),
        )


_LOGGERS = ("log", "log_dict")
"""The logging methods of a LightningModule."""


@contextmanager
def restored(root: nn.Module) -> Iterator[None]:
    """Context manager that restores modules, the Python state that their code reaches, and random states.

    Raises:
        UnsupportedError: The code may advance a Python generator, which cannot be restored.
    """
    state = PythonState(root)
    if state.generators:
        raise UnsupportedError(f"the forward may advance {state.generators[0]!r}, a generator of Python.")
    modules = [vars(module) for module in root.modules()]
    dicts = [held for space in modules for held in space.values() if isinstance(held, dict)]
    saved = [(held, dict(held)) for held in (*modules, *dicts)]
    # Logged values are dropped: the Trainer would keep them outside of the module.
    for module in root.modules():
        if all(callable(getattr(type(module), name, None)) for name in _LOGGERS):
            vars(module).update(dict.fromkeys(_LOGGERS, _ignore))
    with forked(), state.contents_restored():
        try:
            yield
        finally:
            for held, before in saved:
                held.clear()
                held.update(before)
            state.restore()


def _ignore(*_: Any, **__: Any) -> None:
    """Log nothing."""


def stand_in_weights(
    root: nn.Module, device: torch.device, *, parameters: torch.dtype | None, buffers: torch.dtype | None
) -> dict[int, nn.Parameter]:
    """Replace every parameter and buffer by a stand-in without memory, inside of `restored` and a fake mode.

    Args:
        root: The module.
        device: The device that the stand-ins report.
        parameters: The dtype of floating-point parameters; None keeps theirs.
        buffers: The dtype of floating-point buffers; None keeps theirs.

    Returns:
        The new parameters, by the id of the old ones.
    """
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = _empty_like(parameter, device, parameters)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _empty_like(buffer, device, buffers)
        # An RNN keeps its parameters in a list too.
        if isinstance(module, nn.RNNBase):
            names = [name for names in module._all_weights for name in names]
            vars(module)["_flat_weights"] = [module._parameters.get(name) for name in names]
    return made


def inputs_of(values: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Return a structure of arguments with stand-ins without memory for its tensors."""

    def stand_in(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return _empty_like(value, device, dtype).requires_grad_(value.requires_grad)

    return tree_map(stand_in, values)


def _empty_like(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=wanted, device=device)
