"""Run the program for a call in place of a module's forward, or fall back to the module's own forward.

`Programs` replaces ``module.forward`` on the instance. It looks up the program for the form of a call, and
compiles a missing one. If that fails, the user's own forward runs in eager mode on every rank of the unit:
the result is correct and only slower, and a log line says why, once. It plans nothing and stores no
parameter.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_core._torch_compat import tree_flatten
from nnx_core.errors import UnsupportedError
from nnx_nnscaler._torch_compat import has_any_global_hook
from nnx_nnscaler.codegen.emit import inputs_of
from nnx_nnscaler.compile.compiler import Compiled, Compiler, FixedLayout, ModelCall, compile_together
from nnx_nnscaler.ir.graph import Graph, text_of
from nnx_nnscaler.runtime.functions import Runtime
from nnx_nnscaler.trace.fingerprint import current
from nnx_nnscaler.trace.guard import caller_modes
from nnx_nnscaler.trace.reads import read_by_forward
from nnx_nnscaler.trace.structure import is_constant

__all__ = [
    "Programs",
    "Variant",
]


log = logging.getLogger("nnx.nnscaler")

_FALLS_BACK = "falls back to eager on every rank of its unit, which is correct but slower"
_UNSET = ("an attribute that has its class's value",)
MOST_VARIANTS = 8
"""Maximum programs of one module; a call of a further form falls back to eager."""


class Programs:
    """The programs of one module on one rank.

    Args:
        root: The module whose forward they replace.
        compiler: The compiler of the programs.
        runtime: The runtime for the programs' communication.
        device: The device of the programs.
        unit: The ranks that work on one batch together, as a group whose collectives take CPU tensors; None
            for a unit of one rank.
        world: All ranks, as a group of the same kind. The first program is compiled once for all of them,
            because parameters need the same placement in every unit.
        local: The context of a program, in which parameters are this rank's shards.
        speaks: True if this rank logs each fallback to eager.
        layout: The placement of parameters, if another module's programs have decided it.
        otherwise: The beginning of the log line about a call without a program; the cause follows it.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        compiler: Compiler,
        runtime: Runtime,
        device: torch.device,
        unit: dist.ProcessGroup | None = None,
        world: dist.ProcessGroup | None = None,
        local: Callable[[], AbstractContextManager[Any]] = nullcontext,
        speaks: bool | None = None,
        layout: FixedLayout | None = None,
        otherwise: str = "",
    ) -> None:
        self.root = root
        self.layout = layout or FixedLayout({}, frozenset())
        self.causes: list[str] = []
        self.summary = "the forward runs in eager mode on each rank"
        self._logged: set[str] = set()
        self._otherwise = otherwise or f"{type(root).__name__} {_FALLS_BACK}"
        self._compiler = compiler
        self._runtime = runtime
        self._device = device
        self._unit = unit
        self._world = world
        self._local = local
        self._logs = runtime.rank == 0 if speaks is None else speaks
        self._weights: Mapping[str, Tensor] = {}
        self._variants: dict[Any, list[Variant]] = {}
        self._refused: dict[Any, str] = {}
        self._never = ""
        self._own: Callable[..., Any] = root.forward
        self._signature = _signature_of(self._own)
        self._kept: frozenset[str] = frozenset()
        self._tree = _Tree(root)
        self._arrive: Callable[[str], None] = _no_check

    @property
    def variants(self) -> list[Compiled]:
        """The existing programs, the oldest first."""
        found = [variant for variants in self._variants.values() for variant in variants]
        return [variant.compiled for variant in sorted(found, key=lambda variant: variant.number)]

    def prepare(self, call: ModelCall, *, bring: Callable[[], bool] | None = None) -> Compiled | None:
        """Compile the first program, once for the whole world, before parameters are sharded. Collective.

        Args:
            call: The arguments of the call.
            bring: A function for a call that cannot be traced. It gives the parameters values on the device,
                so that more code can be traced, and returns True if they had no values before.

        Returns:
            The program, whose plan places the parameters; None if the forward cannot be traced. Then such
            calls fall back to eager, and parameters stay unsharded.
        """
        call = self._bound(call)
        try:
            key, tensors = self._key(call)
        except TypeError as error:
            self._warn(str(error))
            return None
        try:
            compiled = self._compile(call, self._world, fixed_batch=_is_single(tensors), layout=None)
        except UnsupportedError as error:
            if bring is not None and bring():
                return self.prepare(call)
            self._refused[key] = str(error)
            self._warn(str(error))
            if self._compiler.needs_first:
                self._never = str(error)
            return None
        self.layout = FixedLayout.of(compiled.plan)
        self._kept = frozenset(compiled.graph.kept)
        self._tree = _Tree(self.root, besides=self._kept)
        self._keep(self._key(call)[0], compiled)
        return compiled

    def attach(self, weights: Mapping[str, Tensor], *, arrive: Callable[[str], None] | None = None) -> None:
        """Replace the forward on the instance.

        Args:
            weights: This rank's shard of every parameter, and every buffer, by fully qualified name; read at
                each use.
            arrive: `CollectiveOrder.arrive`, because a program's collectives need all ranks of the unit.
        """
        self._weights, self._arrive = weights, arrive or _no_check
        self._tree = _Tree(self.root, besides=self._kept)
        self._own = self.root.forward
        self.root.forward = _Forward(self)

    def detach(self) -> None:
        """Restore the module's own forward."""
        if isinstance(self.root.__dict__.get("forward"), _Forward):
            _restore(self.root, self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's forward on these arguments."""
        return self.run(ModelCall(args, kwargs), lambda: self._own(*args, **kwargs))

    def run(self, call: ModelCall, otherwise: Callable[[], Any]) -> Any:
        """Return the result of the program for a call, or of a function if no program fits."""
        variant, tensors = self._find(call)
        if variant is None:
            return otherwise()
        if not variant.runs:
            variant.runs = True
            for note in (*variant.compiled.graph.notes, *variant.compiled.plan.notes):
                self._log_once(f"{type(self.root).__name__}: {note}")
        name = type(self.root).__name__
        self._arrive(f"the forward of {name}")
        with self._local():
            outputs = variant.compiled.program(
                self._runtime, self.root, self._weights, variant.compiled.constants, *tensors
            )
        if torch.is_grad_enabled():
            _at_backward(outputs, functools.partial(self._arrive, f"the backward of {name}"))
        return outputs

    def _find(self, call: ModelCall) -> tuple[Variant | None, list[Tensor]]:
        """Return the program for a call and its tensors; None to fall back to eager."""
        if torch.compiler.is_compiling() or has_any_global_hook():
            self._warn("a trace of the model, or a hook on all modules, needs every submodule's call")
            return None, []
        if self._tree.changed():
            self._warn("a submodule or parameter of the module was replaced after planning")
            return None, []
        call = self._bound(call)
        try:
            key, tensors = self._key(call)
            variants = self._variants.get(key, ())
        except TypeError as error:
            self._warn(str(error))
            return None, []
        fitting = (variant for variant in variants if variant.shapes_fit(tensors))
        found = next(fitting, None) or self._compiled_for(key, call)
        hindrance = "" if found is None else found.hindrance(tensors)
        if hindrance:
            self._warn(hindrance)
        return None if hindrance else found, tensors

    def _compiled_for(self, key: Any, call: ModelCall) -> Variant | None:
        """Compile a program for a call that fits no program; return None if that is impossible."""
        cause = self._never or self._refused.get(key)
        if cause is None and max(len(self.variants), len(self._refused)) >= MOST_VARIANTS:
            cause = f"{MOST_VARIANTS} programs were compiled or tried already, and none fits"
        if cause is None:
            self._arrive(f"the compilation of {type(self.root).__name__}")
            try:
                compiled = self._compile(call, self._unit, fixed_batch=False, layout=self.layout)
                return self._keep(key, compiled)
            except UnsupportedError as error:
                cause = str(error)
                if cause in self._refused.values():  # two forms fail alike: other calls would fail too
                    self._never = cause
                self._refused[key] = cause
        self._warn(cause)
        return None

    def _compile(
        self,
        call: ModelCall,
        group: dist.ProcessGroup | None,
        *,
        fixed_batch: bool,
        layout: FixedLayout | None,
    ) -> Compiled:
        with self.own_forward():
            return compile_together(
                self._compiler,
                self.root,
                call,
                group=group,
                device=self._device,
                layout=layout,
                fixed_batch=fixed_batch,
            )

    def _keep(self, key: Any, compiled: Compiled) -> Variant:
        name = type(self.root).__name__
        for fqn, reason in compiled.graph.kept.items():
            self._log_once(f"{fqn} of {name} falls back to eager on every rank of its unit: {reason}")
        variant = Variant(compiled, number=len(self.variants))
        self._variants.setdefault(key, []).append(variant)
        return variant

    @contextmanager
    def own_forward(self) -> Iterator[None]:
        """Context manager that restores the module's own forward, for a trace."""
        standing = self.root.__dict__.get("forward")
        if not isinstance(standing, _Forward):
            yield
            return
        _restore(self.root, self._own)
        try:
            yield
        finally:
            self.root.forward = standing

    def _bound(self, call: ModelCall) -> ModelCall:
        """Return the same call with keyword arguments moved to their positions."""
        if not call.kwargs or self._signature is None:
            return call
        try:
            bound = self._signature.bind(*call.args, **call.kwargs)
        except TypeError:
            return call  # the forward itself raises the clearer error
        return ModelCall(bound.args, bound.kwargs)

    def _key(self, call: ModelCall) -> tuple[Any, list[Tensor]]:
        """Return the form of a call without sizes, and its tensors.

        Raises:
            TypeError: An argument is not a tensor, a plain value or a container of them.
        """
        leaves, spec = tree_flatten((call.args, call.kwargs))
        tensors: list[Tensor] = []
        looks: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                looks.append((leaf.dtype, leaf.ndim, leaf.requires_grad))
            elif is_constant(leaf):
                looks.append((type(leaf), leaf))
            else:
                raise TypeError(
                    "an argument of the forward is neither a tensor nor a plain value, "
                    f"but a {type(leaf).__name__}"
                )
        key = (spec, tuple(looks), caller_modes(), self._tree.state())
        hash(key)
        return key, tensors

    # The key must hold everything that decides which operators a trace records. The modes (autocast, grad)
    # and the module's state belong to it: a program of another state would be silently wrong.
    def _warn(self, cause: str) -> None:
        if cause in self.causes:
            return
        self.causes.append(cause)
        self._log_once(f"{self._otherwise}: {cause}")

    def _log_once(self, text: str) -> None:
        """Log a warning once, on the ranks that log."""
        if text not in self._logged and self._logs:
            log.warning(text)
        self._logged.add(text)


def _no_check(place: str) -> None:
    """Check nothing, because no other rank has programs of this module yet."""


def _at_backward(outputs: Any, function: Callable[[], None]) -> None:
    """Call a function once, when a backward reaches the first of these outputs."""
    nodes = {leaf.grad_fn for leaf in tree_flatten(outputs)[0] if isinstance(leaf, Tensor) and leaf.grad_fn}
    waiting = [function]

    def begin(_: Any) -> None:
        if waiting:
            waiting.pop()()

    for node in nodes:
        node.register_prehook(begin)


class _Forward:
    """Replaces a module's forward; a copy of the module gets its own forward back."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        functools.update_wrapper(self, programs._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.programs(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        root, own = self.programs.root, self.programs._own
        if not _is_of_class(root, own):
            return copy.deepcopy(own, memo)
        return MethodType(type(root).forward, memo.get(id(root), root))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.programs.root, "forward")


class _Tree:
    """The state of a module tree that decides if a program still fits it.

    Args:
        root: The root of the tree. Its own hooks run outside of the forward, so they do not count.
        besides: Names of submodules that run in eager mode, so that the values they read do not count.
    """

    def __init__(self, root: nn.Module, *, besides: frozenset[str] = frozenset()) -> None:
        self._spaces = [module.__dict__ for module in root.modules()]
        self._children = [
            (space["_modules"], tuple(space["_modules"].values()))
            for space in self._spaces
            if space["_modules"]
        ]
        self._parameters = [
            (space["_parameters"], tuple(space["_parameters"].values()))
            for space in self._spaces
            if space["_parameters"]
        ]

        self._read = read_by_forward(root, besides=besides)

    def changed(self) -> bool:
        """Return True if a submodule or a parameter was replaced."""
        for now, before in (*self._children, *self._parameters):
            if len(now) != len(before) or not all(map(is_, now.values(), before)):
                return True
        return False

    def state(self) -> tuple[Any, ...]:
        """Return the training flags, the submodules with hooks, and values that the forward may read.

        Raises:
            TypeError: A value is too large to compare.
        """
        flags = tuple([space["training"] for space in self._spaces])
        hooked = tuple(
            [
                index
                for index, space in enumerate(self._spaces)
                if index
                and (
                    space["_forward_hooks"]
                    or space["_forward_pre_hooks"]
                    or space["_backward_hooks"]
                    or space["_backward_pre_hooks"]
                )
            ]
        )
        known: dict[int, Any] = {}  # submodules often share one configuration: read it once
        values = [space.get(name, _UNSET) for space, name in self._read]
        for value in values:
            if id(value) not in known:
                known[id(value)] = current(value)
        return flags, hooked, tuple([known[id(value)] for value in values])


def _restore(root: nn.Module, own: Callable[..., Any]) -> None:
    if _is_of_class(root, own):
        del root.forward
    else:
        root.forward = own


def _is_of_class(root: nn.Module, own: Callable[..., Any]) -> bool:
    """Return True if a module's forward is its class's own."""
    return isinstance(own, MethodType) and own.__self__ is root and own.__func__ is type(root).forward


def _is_single(tensors: list[Tensor]) -> bool:
    """Return True for a batch of one: torch specializes it, so a symbolic size means two or more."""
    return any(tensor.ndim > 0 and tensor.shape[0] == 1 for tensor in tensors[:1])


def _signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


# Sizes are checked by one generated expression, because every call of a program needs the check.


@dataclass(slots=True)
class Variant:
    """A program with its conditions.

    Attributes:
        compiled: The program.
        number: Its index among the programs of its module, in order of compilation.
        runs: True after its first call.
    """

    compiled: Compiled
    number: int
    runs: bool = False
    _fits: Callable[..., bool] = field(init=False)
    _hindrance: Callable[..., str] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.compiled.graph
        fitting = [*_shape_conditions(graph), *(f"({guard})" for guard in graph.guards)]
        self._fits = _function(graph, " and ".join(fitting) or "True")
        conditions = [
            (f"{symbol} >= 2", f"its batch has a size of {{{symbol}}}, and programs need two or more")
            for symbol in graph.symbols
        ]
        conditions += [
            (f"({size}) % {number} == 0", f"{size} = {{{size}}} is not a multiple of {number}")
            for size, number in self.compiled.plan.divisible
        ]
        reasons = "".join(f"f{text!r} if not ({condition}) else " for condition, text in conditions)
        self._hindrance = _function(graph, f"{reasons}''")

    def shapes_fit(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if tensors have the program's sizes, and its symbols have traced values."""
        return self._fits(*[tensor.shape for tensor in tensors])

    def hindrance(self, tensors: Sequence[Tensor]) -> str:
        """Return the reason why the program must not run at these sizes; empty if there is none."""
        return self._hindrance(*[tensor.shape for tensor in tensors])


def _shape_conditions(graph: Graph) -> list[str]:
    conditions = []
    for index, name in enumerate(inputs_of(graph)):
        dims = "".join(f"{text_of(dim)}, " for dim in graph.metas[name].shape)
        conditions.append(f"shape_{index} == ({dims})")
    return conditions


def _function(graph: Graph, result: str) -> Callable[..., Any]:
    """Return a function of the shapes of the inputs, with the graph's symbols bound."""
    names = inputs_of(graph)
    arguments = ", ".join(f"shape_{index}" for index in range(len(names)))
    lines = [f"def function({arguments}):"]
    lines += [
        f"    {symbol} = shape_{names.index(name)}[{dim}]" for symbol, (name, dim) in graph.symbols.items()
    ]
    lines.append(f"    return {result}")
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    function: Callable[..., Any] = space["function"]
    return function
