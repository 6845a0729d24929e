"""Probe the dependence of one element's update in an optimizer, without a list of names.

SGD, Adam and Lion read one element at a time, so they can step on shards. LAMB, Muon and Adafactor read
norms, rows or columns of a parameter. SAM, LBFGS and optimizers that divide by the norm of all gradients read
the whole model. The probe steps a copy of the optimizer on small tensors: uncut, cut in two, together and
apart. Different results show the dependence. The optimizer and the program's random state do not change.
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
"""The largest size of a dim of a probed tensor, by the number of dims: enough for code that checks sizes."""
_GENERIC: tuple[Shape, ...] = ((32, 48), (16, 4, 3, 3))
_FEWEST_STEPS, _MOST_STEPS = 4, 24
_SCALES = (1.0, 64.0, 0.125, 2.0)
_SEED = 9176
_DROPPED = object()


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of probing an optimizer.

    Attributes:
        dependence: The dependence of the optimizer: the widest of its groups' dependences.
        groups: The dependence of every param group.
        evaluations: The largest number of calls of the closure in a step.
        communicates: True if its step calls collectives by itself.
        error: The reason why the probe failed; the dependence is then ``"model"``, the safest answer.
    """

    dependence: Dependence
    groups: tuple[Dependence, ...]
    evaluations: int = 1
    communicates: bool = False
    error: str | None = None


def dependence(optimizer: Optimizer) -> Dependence:
    """Return the dependence of one element's update: ``"element"``, ``"parameter"`` or ``"model"``.

    Args:
        optimizer: An optimizer of any class, which does not change.

    Returns:
        ``"element"`` if it can step on any shard of a parameter; ``"parameter"`` if it needs each parameter
        unsharded; ``"model"`` if it needs all of them together, or if the probe fails.

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
    """Probe the dependence of an optimizer's updates.

    The results for torch's own optimizers are cached by options and shapes.

    Args:
        optimizer: An optimizer of any class, which does not change.
        shape_of: Returns the unsharded shape of a parameter. Without it the parameter's own shape counts, and
            matrices and kernels are probed too, in case an engine has flattened it.
    """
    key = _key_of(optimizer, shape_of or _own_shape) if _is_of_torch(optimizer) else None
    if key is None or key not in _found:
        trial = _tried(optimizer, shape_of)
        if key is None:
            return trial
        _found[key] = trial
    return _found[key]


_found: dict[Any, Trial] = {}
"""The cached results for torch's own optimizers, because a probe takes as long as several steps."""


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _key_of(optimizer: Optimizer, shape_of: Callable[[nn.Parameter], Sequence[int]]) -> Any:
    """Return all that a probe reads: the step, the options, and the different shapes of each group."""
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
    # float64 tells rounding from a real difference, but some optimizers make float32 tensors of their own.
    attempts = [
        (extra, dtype, sparse)
        for sparse in (False, True)
        for dtype in (torch.float64, torch.float32)
        for extra in dict.fromkeys((generic, ()))
    ]
    with _undisturbed():
        for extra, dtype, sparse in attempts:
            try:
                subject = _Subject(optimizer, shape_of or _own_shape, extra, dtype=dtype, sparse=sparse)
                return subject.tried()
            except _CommunicatesError:
                return _unknown(optimizer, "its step calls collectives by itself", communicates=True)
            except Exception as raised:  # any error of a foreign optimizer on tensors of the probe
                error = error or f"{type(raised).__name__}: {raised}"
    return _unknown(optimizer, error)


def _unknown(optimizer: Optimizer, error: str, *, communicates: bool = False) -> Trial:
    model: Dependence = "model"
    return Trial(model, (model,) * len(optimizer.param_groups), communicates=communicates, error=error)


def refuse_hidden_shards(optimizer: Optimizer, error: str) -> None:
    """Refuse an optimizer whose probe failed and which holds shards that its step could not gather.

    Args:
        optimizer: The user's optimizer.
        error: The error of its probe.

    Raises:
        UnsupportedError: It has a sharded tensor that is neither a parameter nor in its state.
    """
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    attributes = {name: value for name, value in vars(optimizer).items() if name != "state"}
    for name, value in attributes.items():
        if any(id(tensor) not in known for tensor in _sharded_in(value)):
            raise UnsupportedError(
                f"{type(optimizer).__name__} holds sharded tensors in its attribute {name!r}, outside of its "
                f"`state`, where they cannot be gathered for its step; probing it failed, too "
                f"({error.splitlines()[0][:80]}).",
                remedy="Keep them in `self.state[p]`, and make them in the first step, "
                "as torch's optimizers do.",
            )


def _sharded_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, Optimizer):  # a wrapped one, whose state is gathered like this one's
        yield from _sharded_in([v for k, v in vars(value).items() if k != "state"], depth - 1)
    elif isinstance(value, (list, tuple, dict)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _sharded_in(item, depth - 1)


def _own_shape(parameter: nn.Parameter) -> Shape:
    return tuple(parameter.shape)


@contextmanager
def _undisturbed() -> Iterator[None]:
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
    """A tensor to step on, which replaces one of the optimizer's parameters.

    Attributes:
        group: The index of its param group.
        stands_for: The parameter of the optimizer that it replaces.
        start: Its first value.
        gradients: The constant term of its gradient for each step; the other term is the current value, so
            that errors of one step show in the next gradient.
    """

    group: int
    stands_for: nn.Parameter
    start: Tensor
    gradients: list[Tensor]

    def halves(self, dim: int) -> tuple[_Tried, _Tried]:
        """Cut the tensor in two, unevenly: an even cut may fall between the blocks of a blockwise update."""
        size = self.start.shape[dim]
        first = max(1, size * 3 // 7)
        return self._narrow(dim, 0, first), self._narrow(dim, first, size - first)

    def _narrow(self, dim: int, start: int, length: int) -> _Tried:
        cut = [tensor.narrow(dim, start, length) for tensor in (self.start, *self.gradients)]
        return _Tried(self.group, self.stands_for, cut[0], cut[1:])


class _Subject:
    """An optimizer under probe, and the tensors that its copies step on.

    Args:
        optimizer: The user's optimizer.
        shape_of: Returns the unsharded shape of a parameter.
        extra: Shapes to probe in every group besides those of its parameters.
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
        self._same = [kinds.index(kind) for kind in kinds]  # for each group the first one of its kind
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
        """Yield one tensor for each shape of a group."""
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
        """Probe a few steps, which find nearly all dependences, and then as many as the options suggest."""
        trial = self._tried_in_steps()
        if trial.dependence == "model" or self._most_steps == self._steps:
            return trial
        self._steps = self._most_steps
        return self._tried_in_steps()

    def _tried_in_steps(self) -> Trial:
        """Step on all tensors together, on each one alone, and on each one cut in two."""
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
        """Return True if owners may each step some parameters, after one evaluation of the closure."""
        if self._evaluations > 1 or self._moves_first:
            return False
        try:
            self._run([])
        except Exception:  # on a rank that owns no parameter
            return False
        return True

    def _everywhere(self, verdict: Dependence) -> Trial:
        return Trial(verdict, (verdict,) * len(self._same), evaluations=self._evaluations)

    def _depends_on_other_elements(self, tried: _Tried, end: Tensor) -> bool:
        for dim, size in enumerate(tried.start.shape):
            if size < 2:
                continue
            try:
                ends = [self._run([half])[0] for half in tried.halves(dim)]
            except RuntimeError:  # the step refuses the shape of the half
                return True
            if not _is_same(tried.start, end, torch.cat(ends, dim)):
                return True
        return False

    def _run(self, tried: Sequence[_Tried]) -> list[Tensor]:
        """Step a copy of the optimizer on some of the tensors, and return their new values."""
        parameters = [nn.Parameter(one.start.clone()) for one in tried]
        stand_ins = list(zip(tried, parameters, strict=True))
        trial = _Copy(self._optimizer, stand_ins, self._dtype).optimizer
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
    """A closure that computes gradients from the current values of the parameters.

    Attributes:
        calls: The number of calls, the one before the step included.
        moved_first: True if the step changed a parameter before its first call of the closure.
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
    """Return enough steps to cover updates at an interval, such as ``k=5``, as far as options show it."""
    values = [value for group in optimizer.param_groups for value in group.values()]
    values += vars(optimizer).values()
    counts = [value for value in values if isinstance(value, int) and value < _MOST_STEPS]
    return max(_FEWEST_STEPS, *(count + 2 for count in counts), 0)


def _kind(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key of groups that the step treats alike: all options, except the sizes of numbers."""
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
    """Return at most eight shapes: the smallest, the largest and some in between."""
    ordered = sorted(shapes, key=lambda entry: (len(entry[0]), entry))
    if len(ordered) <= 8:
        return ordered
    return [ordered[round(index * (len(ordered) - 1) / 7)] for index in range(8)]


def _is_same(start: Tensor, end: Tensor, other: Tensor) -> bool:
    """Return True if two results are equal, with a tolerance relative to the size of the update."""
    went = (end - start).abs().max()
    tolerance = 1e-3 if end.dtype in (torch.float32, torch.complex64) else 1e-6
    return bool(torch.isfinite(went)) and bool(((end - other).abs() <= tolerance * went).all())


def _plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the class's step without the hooks that torch wraps it in: the copy must not run them."""
    step: Any = kind.step
    return cast("Callable[..., Any]", step.__wrapped__ if getattr(step, "hooked", False) else step)


def _converted(value: Any, parameter: Tensor, stand_in: nn.Parameter) -> Any:
    """Convert an entry of existing state to the tensor that replaces a parameter in the probe."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    local = value.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    if value.shape != parameter.shape or not value.dim():
        return local.cpu().clone()
    return torch.full_like(stand_in.detach(), local.flatten()[0].item() if local.numel() else 0.0)


class _Copy:
    """A copy of the user's optimizer over the probe's tensors, without state and hooks.

    All references to its parameters are replaced, also in attributes and in optimizers inside of it.

    Args:
        optimizer: The user's optimizer.
        stand_ins: Each probed tensor and the parameter that holds it.
        dtype: The dtype of floating point options.
    """

    def __init__(
        self, optimizer: Optimizer, stand_ins: list[tuple[_Tried, nn.Parameter]], dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._remember(parameter, _DROPPED)
        for tried, stand_in in stand_ins:
            self._remember(tried.stands_for, stand_in)
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            own = [stand_in for tried, stand_in in stand_ins if tried.group == index]
            if stand_ins and not own:
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
        """Copy an option of a group; a learning rate of zero, as of a warm-up, would hide all dependences."""
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
            new = self._memo.get(id(parameter))
            if isinstance(new, nn.Parameter):
                state[new] = {name: _converted(value, parameter, new) for name, value in entries.items()}
        for name, value in vars(optimizer).items():
            if name in ("step", "zero_grad"):  # a scheduler's or the engine's, bound to the original
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
