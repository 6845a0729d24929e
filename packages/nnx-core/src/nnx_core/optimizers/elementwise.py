"""Probe what one element's update of an optimizer depends on, without a list of names.

SGD, Adam, Lion look at one element at a time and do the same on a part of a parameter as on the whole.
LAMB, Muon, Adafactor look at norms, rows or columns of a parameter; SAM, LBFGS and whatever divides by the
norm of all gradients look at the whole model. A copy of the optimizer steps on small tensors: whole, in
parts, together and apart. The optimizer itself and the random state of the program stay as they are.
"""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_core._torch_compat import TorchDispatchMode
from nnx_core.errors import UnsupportedError
from nnx_core.optimizers.step_arguments import with_closure

__all__ = ["Dependence", "Trial", "dependence", "refuse_hidden_shards", "try_optimizer"]

Dependence = Literal["element", "parameter", "model"]
Shape = tuple[int, ...]

_LARGEST = {0: 1, 1: 256, 2: 192, 3: 24, 4: 16}
"""How large a dim of a tried tensor may be, by their number: large enough for code that asks for sizes."""
_GENERIC: tuple[Shape, ...] = ((32, 48), (16, 4, 3, 3))
_FEWEST_STEPS, _MOST_STEPS = 4, 24
_SCALES = (1.0, 64.0, 0.125, 2.0)
_SEED = 9176
_DROPPED = object()


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of probing an optimizer.

    Attributes:
        dependence: The dependence of the whole optimizer: the widest of its groups'.
        groups: The same for every param group.
        evaluations: The largest number of calls of the closure in a step.
        communicates: True if its step calls collectives by itself.
        error: Why nothing could be found out; then the dependence is ``"model"``, the safest answer.
    """

    dependence: Dependence
    groups: tuple[Dependence, ...]
    evaluations: int = 1
    communicates: bool = False
    error: str | None = None


def dependence(optimizer: Optimizer) -> Dependence:
    """Return what one element's update depends on: the ``"element"``, its ``"parameter"`` or the ``"model"``.

    Args:
        optimizer: An optimizer of any class, which is left alone.

    Returns:
        ``"element"`` if it may step on any part of a parameter; ``"parameter"`` if it needs each parameter
        whole; ``"model"`` if it needs all of them together, or cannot be tried.

    Example:
        >>> dependence(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))
        'element'
        >>> dependence(torch.optim.Muon([nn.Parameter(torch.zeros(4, 4))]))
        'parameter'
    """
    return try_optimizer(optimizer).dependence


def try_optimizer(
    optimizer: Optimizer, *, shape_of: Callable[[nn.Parameter], Sequence[int]] | None = None
) -> Trial:
    """Find out what an optimizer's updates depend on.

    Of torch's own optimizers the answer is kept for further ones with the same options and shapes.

    Args:
        optimizer: An optimizer of any class, which is left alone.
        shape_of: The shape of the whole of a parameter. Without it the parameter's own shape counts, and
            matrices and kernels are tried too, in case that an engine has flattened it.
    """
    key = _key_of(optimizer, shape_of or _own_shape) if _is_of_torch(optimizer) else None
    if key is None or key not in _found:
        trial = _tried(optimizer, shape_of)
        if key is None:
            return trial
        _found[key] = trial
    return _found[key]


_found: dict[Any, Trial] = {}
"""What trials of torch's own optimizers found, as a trial takes as long as several steps."""


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _key_of(optimizer: Optimizer, shape_of: Callable[[nn.Parameter], Sequence[int]]) -> Any:
    """All that a trial looks at: the step, the options, and the different shapes of each group."""
    groups = [
        (
            repr({name: value for name, value in group.items() if name != "params"}),
            len(group["params"]),
            tuple(dict.fromkeys((tuple(shape_of(one)), one.is_complex()) for one in group["params"])),
        )
        for group in optimizer.param_groups
    ]
    return type(optimizer), type(optimizer).step, shape_of is _own_shape, tuple(groups)


def _tried(optimizer: Optimizer, shape_of: Callable[[nn.Parameter], Sequence[int]] | None) -> Trial:
    generic = () if shape_of is not None else _GENERIC
    error = ""
    # Doubles tell rounding from a difference, but some optimizers make single precision tensors of their own.
    attempts = [
        (extra, dtype, sparse)
        for sparse in (False, True)
        for dtype in (torch.float64, torch.float32)
        for extra in dict.fromkeys((generic, ()))
    ]
    with _left_alone():
        for extra, dtype, sparse in attempts:
            try:
                subject = _Subject(optimizer, shape_of or _own_shape, extra, dtype=dtype, sparse=sparse)
                return subject.tried()
            except _CommunicatesError:
                return _unknown(optimizer, "its step calls collectives by itself", communicates=True)
            except Exception as raised:  # whatever a foreign optimizer raises on tensors of the trial's
                error = error or f"{type(raised).__name__}: {raised}"
    return _unknown(optimizer, error)


def _unknown(optimizer: Optimizer, error: str, *, communicates: bool = False) -> Trial:
    model: Dependence = "model"
    return Trial(model, (model,) * len(optimizer.param_groups), communicates=communicates, error=error)


def refuse_hidden_shards(optimizer: Optimizer, error: str) -> None:
    """Refuse an optimizer that could not be tried and holds shards where nobody makes them whole for it.

    Args:
        optimizer: The user's.
        error: The error of its trial.

    Raises:
        UnsupportedError: It has a sharded tensor that is neither a parameter nor in its state.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    attributes = {name: value for name, value in vars(optimizer).items() if name != "state"}
    for name, value in attributes.items():
        if any(id(tensor) not in known for tensor in _sharded_in(value)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} holds sharded tensors in its attribute {name!r}, outside of its "
                f"`state`, where they cannot be made whole for its step; it could not be tried either "
                f"({error.splitlines()[0][:80]}).",
                remedy="Keep them in `self.state[p]`, and make them in the first step, "
                "as the optimizers of torch do.",
            )


def _sharded_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, Optimizer):  # one that is wrapped: its state is as good as this one's
        yield from _sharded_in([v for k, v in vars(value).items() if k != "state"], depth - 1)
    elif isinstance(value, (list, tuple, dict)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sharded_in(item, depth - 1)


def _own_shape(parameter: nn.Parameter) -> Shape:
    return tuple(parameter.shape)


@contextmanager
def _left_alone() -> Iterator[None]:
    with torch.random.fork_rng(devices=()), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _CommunicatesError(Exception):
    """A collective was called."""


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call] # as torch has it
    """Make collectives raise instead of waiting for ranks that do not call them, in a context."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _CommunicatesError
        return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class _Tried:
    """A tensor to step on, in the place of one of the optimizer's parameters.

    Attributes:
        group: The index of its param group.
        stands_for: The parameter of the optimizer whose place it takes.
        start: Its first value.
        gradients: A constant part of its gradient for each step; the other part is the value itself.
    """

    group: int
    stands_for: nn.Parameter
    start: Tensor
    gradients: list[Tensor]

    def parts(self, dim: int) -> tuple[_Tried, _Tried]:
        """The same, of two parts of the tensor; they are uneven, so that blocks of some size are cut too."""
        size = self.start.shape[dim]
        first = max(1, size * 3 // 7)
        return self._narrow(dim, 0, first), self._narrow(dim, first, size - first)

    def _narrow(self, dim: int, start: int, length: int) -> _Tried:
        part = [tensor.narrow(dim, start, length) for tensor in (self.start, *self.gradients)]
        return _Tried(self.group, self.stands_for, part[0], part[1:])


class _Subject:
    """An optimizer under trial, and the tensors it is tried on.

    Args:
        optimizer: The user's.
        shape_of: The whole shape of a parameter.
        extra: Shapes that are tried in every group besides those of its parameters.
        dtype: The dtype of the tensors.
        sparse: True if gradients are sparse tensors, for an optimizer that takes no others.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shape_of: Callable[[nn.Parameter], Sequence[int]],
        extra: tuple[Shape, ...],
        *,
        dtype: torch.dtype,
        sparse: bool,
    ) -> None:
        self._optimizer = optimizer
        self._dtype = dtype
        self._sparse = sparse
        self._steps = _FEWEST_STEPS
        self._most_steps = _number_of_steps(optimizer)
        self._evaluations = 0
        self._moves_first = False
        kinds = [_kind(group) for group in optimizer.param_groups]
        self._same = [kinds.index(kind) for kind in kinds]  # for each group the first that is like it
        generator = torch.Generator().manual_seed(_SEED)
        self._tried: list[_Tried] = []
        for index in dict.fromkeys(self._same):
            alike = [
                parameter
                for group, first in zip(optimizer.param_groups, self._same, strict=True)
                if first == index
                for parameter in group["params"]
            ]
            self._tried += self._of_group(index, alike, shape_of, extra, generator)

    def _of_group(
        self,
        index: int,
        parameters: Sequence[nn.Parameter],
        shape_of: Callable[[nn.Parameter], Sequence[int]],
        extra: tuple[Shape, ...],
        generator: torch.Generator,
    ) -> Iterator[_Tried]:
        """One tensor for each shape of a group's, at most as many as it has parameters of its own."""
        shapes: dict[tuple[Shape, bool], None] = {}
        for parameter in parameters:
            shape = tuple(shape_of(parameter))
            if math.prod(shape):
                shapes[_clipped(shape), parameter.is_complex()] = None
        wanted = [*_spread([*shapes]), *((shape, False) for shape in extra)]
        own = self._optimizer.param_groups[index]["params"]
        for number, (shape, is_complex) in enumerate(wanted):
            dtype = self._dtype.to_complex() if is_complex else self._dtype
            tensors = [
                torch.randn(shape, dtype=dtype, generator=generator) for _ in range(self._most_steps + 1)
            ]
            gradients = [gradient * _SCALES[step % len(_SCALES)] for step, gradient in enumerate(tensors[1:])]
            stands_for = own[number] if number < len(own) else nn.Parameter(torch.empty(0))
            yield _Tried(index, stands_for, tensors[0] + 0.5, gradients)

    def tried(self) -> Trial:
        """Try a few steps, which find nearly everything, and then as many as the options ask for."""
        trial = self._tried_in_steps()
        if trial.dependence == "model" or self._most_steps == self._steps:
            return trial
        self._steps = self._most_steps
        return self._tried_in_steps()

    def _tried_in_steps(self) -> Trial:
        """Step on everything together, on each tensor alone, and on parts."""
        together = self._run(self._tried)
        if any(torch.equal(tried.start, end) for tried, end in zip(self._tried, together, strict=True)):
            raise RuntimeError("its step did not change a parameter")
        found: dict[int, Dependence] = {tried.group: "element" for tried in self._tried}
        for tried, end in zip(self._tried, together, strict=True):
            if len(self._tried) > 1 and not _is_same(tried.start, end, self._run([tried])[0]):
                return self._everywhere("model")
        for tried, end in zip(self._tried, together, strict=True):
            if found[tried.group] == "element" and self._depends_on_other_elements(tried, end):
                found[tried.group] = "parameter"
        if "parameter" in found.values() and not self._can_be_divided():
            return self._everywhere("model")
        groups = tuple(found.get(first, "element") for first in self._same)
        widest: Dependence = "parameter" if "parameter" in groups else "element"
        return Trial(widest, groups, evaluations=self._evaluations)

    def _can_be_divided(self) -> bool:
        """Return True if ranks may each step some parameters whole, after all have evaluated the closure."""
        if self._evaluations > 1 or self._moves_first:
            return False
        try:
            self._run([])
        except Exception:  # a rank may own none
            return False
        return True

    def _everywhere(self, verdict: Dependence) -> Trial:
        return Trial(verdict, (verdict,) * len(self._same), evaluations=self._evaluations)

    def _depends_on_other_elements(self, tried: _Tried, end: Tensor) -> bool:
        for dim, size in enumerate(tried.start.shape):
            if size < 2:
                continue
            try:
                ends = [self._run([part])[0] for part in tried.parts(dim)]
            except RuntimeError:  # of shapes that it does not take
                return True
            if not _is_same(tried.start, end, torch.cat(ends, dim)):
                return True
        return False

    def _run(self, tried: Sequence[_Tried]) -> list[Tensor]:
        """Step an optimizer like this one on some tensors alone, and return them."""
        parameters = [nn.Parameter(one.start.clone()) for one in tried]
        places = list(zip(tried, parameters, strict=True))
        trial = _Copy(self._optimizer, places, self._dtype).optimizer
        step = _plain_step(type(self._optimizer))
        with _NoCollectives():  # type: ignore[no-untyped-call]
            for number in range(self._steps):
                closure = _Closure(tried, parameters, number, sparse=self._sparse)
                closure()
                args, kwargs = with_closure(step, closure)
                step(trial, *args, **kwargs)
                self._evaluations = max(self._evaluations, closure.calls - 1)
                self._moves_first |= closure.moved_first
        return [parameter.detach() for parameter in parameters]


class _Closure:
    """Recomputes the gradients from the values that the parameters have when it is called.

    Attributes:
        calls: The number of calls, of which one is before the step.
        moved_first: True if the step had changed a parameter when it called it for the first time.
    """

    def __init__(
        self, tried: Sequence[_Tried], parameters: Sequence[nn.Parameter], step: int, *, sparse: bool
    ) -> None:
        self._tried, self._parameters, self._step, self._sparse = tried, parameters, step, sparse
        self._before = [parameter.detach().clone() for parameter in parameters]
        self.calls = 0
        self.moved_first = False

    def __call__(self) -> Tensor:
        self.calls += 1
        loss = torch.zeros((), dtype=torch.float64)
        for one, parameter, before in zip(self._tried, self._parameters, self._before, strict=True):
            value = parameter.detach()
            if self.calls == 2 and not torch.equal(value, before):
                self.moved_first = True
            gradient = one.gradients[self._step] + value
            parameter.grad = gradient.to_sparse(1) if self._sparse else gradient
            loss = loss + (one.gradients[self._step] * value + value * value / 2).real.sum()
        return loss


def _number_of_steps(optimizer: Optimizer) -> int:
    """Enough to get past what is done only every so many steps, as far as the options say so."""
    values = [value for group in optimizer.param_groups for value in group.values()]
    values += vars(optimizer).values()
    counts = [value for value in values if isinstance(value, int) and value < _MOST_STEPS]
    return max(_FEWEST_STEPS, *(count + 2 for count in counts), 0)


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key that groups of equal treatment share: all options but the sizes of numbers."""
    return tuple(
        (name, _kind_of(value)) for name, value in sorted(group.items(), key=lambda item: str(item[0]))
        if name != "params"
    )  # fmt: skip


def _kind_of(value: Any) -> Any:
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value == 0
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, list | tuple):
        return tuple(_kind_of(item) for item in value)
    return id(value)


def _clipped(shape: Shape) -> Shape:
    largest = _LARGEST.get(len(shape), 8)
    return tuple(min(size, largest) for size in shape)


def _spread(shapes: list[tuple[Shape, bool]]) -> list[tuple[Shape, bool]]:
    """At most eight, the smallest, the largest and some between."""
    ordered = sorted(shapes, key=lambda entry: (len(entry[0]), entry))
    if len(ordered) <= 8:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / 7)] for index in range(8)]


def _is_same(start: Tensor, end: Tensor, other: Tensor) -> bool:
    """Return True if two ways ended alike, measured by how far they went."""
    went = (end - start).abs().max()
    tolerance = 1e-3 if end.dtype in (torch.float32, torch.complex64) else 1e-6
    return bool(torch.isfinite(went)) and bool(((end - other).abs() <= tolerance * went).all())


def _plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """The class's step without the hooks that torch puts around it: these are not for a copy."""
    step: Any = kind.step
    return cast("Callable[..., Any]", step.__wrapped__ if getattr(step, "hooked", False) else step)


def _like_place(value: Any, parameter: Tensor, place: nn.Parameter) -> Any:
    """An entry of the state, made before the first step, for the tensor that takes a parameter's place."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    local = value.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    if value.shape != parameter.shape or not value.dim():
        return local.cpu().clone()
    return torch.full_like(place.detach(), local.flatten()[0].item() if local.numel() else 0.0)


class _Copy:
    """An optimizer like the user's over the trial's tensors, without state and hooks.

    Whatever holds its parameters follows: attributes, and optimizers inside of it.

    Args:
        optimizer: The user's.
        places: Each tried tensor and the parameter that holds it.
        dtype: The dtype of floating point options.
    """

    def __init__(
        self, optimizer: Optimizer, places: list[tuple[_Tried, nn.Parameter]], dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._remember(parameter, _DROPPED)
        for tried, stand_in in places:
            self._remember(tried.stands_for, stand_in)
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            own = [stand_in for tried, stand_in in places if tried.group == index]
            if places and not own:
                self._remember(group, _DROPPED)
                continue
            options = {name: self._option(name, value) for name, value in group.items() if name != "params"}
            groups.append(self._remember(group, {"params": own, **options}))
        self._remember(optimizer.param_groups, groups)
        self.optimizer: Optimizer = self._of_optimizer(optimizer)

    def _remember(self, original: Any, replacement: Any) -> Any:
        self._memo[id(original)] = replacement
        self._alive.append(original)
        return replacement

    def _option(self, name: str, value: Any) -> Any:
        """An option of a group; a learning rate of zero, as a warm-up begins with, would hide everything."""
        if name == "capturable":
            return False  # only where the parameter is on a device
        if isinstance(value, Tensor):
            value = self._of_tensor(value)
        if "lr" in name and isinstance(value, int | float | Tensor) and not isinstance(value, bool):
            return value if value != 0 else value + 0.01
        return self._of(value)

    def _of_optimizer(self, optimizer: Optimizer) -> Optimizer:
        trial: Any = object.__new__(type(optimizer))
        self._remember(optimizer, trial)
        state = self._remember(optimizer.state, defaultdict(dict))
        for parameter, entries in optimizer.state.items():
            place = self._memo.get(id(parameter))
            if isinstance(place, nn.Parameter):
                state[place] = {name: _like_place(value, parameter, place) for name, value in entries.items()}
        for name, value in vars(optimizer).items():
            if name == "step":  # a scheduler's or the engine's
                continue
            if isinstance(value, dict) and name.endswith("_hooks"):
                trial.__dict__[name] = type(value)()
            elif name == "_numel_cache":
                trial.__dict__[name] = None
            else:
                trial.__dict__[name] = self._of(value)
        return cast(Optimizer, trial)

    def _of(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        makers: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (Optimizer, self._of_optimizer),
            (Tensor, lambda tensor: self._remember(tensor, self._of_tensor(tensor))),
            (dict, self._of_dict),
            ((list, tuple, set), self._of_sequence),
            (types.MethodType, lambda method: types.MethodType(method.__func__, self._of(method.__self__))),
            (torch.Generator, lambda generator: self._remember(generator, generator.clone_state())),
            ((nn.Module, type, types.FunctionType), lambda shared: shared),
        )
        make = next((make for kinds, make in makers if isinstance(value, kinds)), self._of_object)
        return make(value)

    def _of_tensor(self, value: Tensor) -> Tensor:
        value = value.detach().cpu().clone()
        return value.to(self._dtype) if value.is_floating_point() else value

    def _of_dict(self, value: dict[Any, Any]) -> Any:
        replacement = self._remember(value, copy.copy(value))
        replacement.clear()
        pairs = [(self._of(key), self._of(item)) for key, item in value.items()]
        replacement.update((key, item) for key, item in pairs if key is not _DROPPED and item is not _DROPPED)
        return replacement

    def _of_sequence(self, value: Any) -> Any:
        items = [item for item in map(self._of, value) if item is not _DROPPED]
        named = hasattr(value, "_fields") and len(items) == len(value)
        return self._remember(value, type(value)(*items) if named else type(value)(items))

    def _of_object(self, value: Any) -> Any:
        if not hasattr(value, "__dict__"):
            return value
        try:
            replacement = self._remember(value, copy.copy(value))
            for name, attribute in vars(value).items():
                replacement.__dict__[name] = self._of(attribute)
        except Exception:  # an object that cannot be copied is shared
            return self._remember(value, value)
        return replacement
