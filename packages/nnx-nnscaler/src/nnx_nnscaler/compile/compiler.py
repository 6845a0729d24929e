"""Compile a call of a module to a program that runs: trace, plan, emit, store, load.

`Store` keeps programs between runs. `Compiler` works in one process. `compile_together` compiles on one rank
for all ranks of a group, and raises its error on every one of them. A `ProgramForm` makes the plan and the
source of a program. `nnx_nnscaler.compile.programs` decides when to compile.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nnx_base.ranks import all_gather_object, together
from nnx_core.errors import NnxError, PlanError, UnsupportedError
from nnx_nnscaler.codegen.emit import Program, emit, load_program
from nnx_nnscaler.compile.store import Entry, Store, key_of
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.ir.graph_json import graph_from_json, graph_to_json
from nnx_nnscaler.ir.placement import Placement
from nnx_nnscaler.plan.pipeline_plan import AnyPlan, any_plan_from_text, any_plan_to_text
from nnx_nnscaler.rules.registry import unsupported_message
from nnx_nnscaler.trace import trace_forward
from nnx_nnscaler.trace.fingerprint import fingerprint
from nnx_nnscaler.trace.guard import caller_modes, hooks_of_the_user
from nnx_nnscaler.trace.structure import BatchDims

log = logging.getLogger("nnx.nnscaler")

T = TypeVar("T")


class ModelCall(NamedTuple):
    """The arguments of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class FixedLayout(NamedTuple):
    """The present placement of the parameters, which every later program has to use.

    Attributes:
        stored: The placement of every parameter by fully qualified name.
        synchronized: The parameters whose partial gradients the reducer sums.
        homes: The rank along the pipe that stores each parameter; None without a pipeline.
    """

    stored: Mapping[str, Placement]
    synchronized: frozenset[str]
    homes: Mapping[str, int] | None = None

    @classmethod
    def of(cls, plan: AnyPlan) -> FixedLayout:
        """Return the layout of a plan."""
        return cls(dict(plan.stored), plan.synchronized, plan.homes)


Planner = Callable[[Graph, FixedLayout | None], AnyPlan]
"""A function that plans a graph; with a layout, its plan keeps the placement of the parameters."""


@dataclass(frozen=True)
class ProgramForm:
    """The form of plans and programs: one function for all ranks of a unit.

    Attributes:
        planner: The function that makes plans.
    """

    planner: Planner

    def plan(self, graph: Graph, layout: FixedLayout | None) -> Any:
        """Return the plan of a graph."""
        return self.planner(graph, layout)

    def source(self, graph: Graph, plan: Any, *, title: str, recompute: Sequence[str]) -> str:
        """Return the source of the program, as `emit` writes it."""
        return emit(graph, plan, title=title, recompute=recompute)

    def text(self, plan: Any) -> str:
        """Return the plan as text."""
        return any_plan_to_text(plan)

    def load(self, entry: Entry, graph: Graph, path: Path | None) -> tuple[Any, Program]:
        """Return the plan and the program of texts by `source` and `text`."""
        return any_plan_from_text(entry.plan), load_program(entry.source, path=path)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program that can be called.

    Attributes:
        graph: The traced graph.
        plan: The plan of the graph.
        program: The generated function.
        constants: The graph's constants, on the device of the program.
        source: The generated source.
        path: The path of the source; None for a program in memory only.
    """

    graph: Graph
    plan: AnyPlan
    program: Program
    constants: dict[str, Tensor]
    source: str
    path: Path | None

    @classmethod
    def load(cls, entry: Entry, path: Path | None, device: torch.device, form: ProgramForm) -> Compiled:
        """Load a program from its texts."""
        graph = graph_from_json(entry.graph)
        constants = {name: tensor.to(device) for name, tensor in graph.constants.items()}
        plan, program = form.load(entry, graph, path)
        return cls(graph, plan, program, constants, entry.source, path)


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """Compiles calls of one module.

    Attributes:
        form: The maker of plans and programs.
        size: The number of ranks of a unit.
        identity: JSON values that programs depend on besides the module, its inputs and the size: policy and
        options. See `code_digest` for functions.
        store: The store of programs; None keeps them in memory.
        reuse: ``"match"``, ``"override"``, ``"moo"`` or ``"graph"``.
        fixed_batch: True if a program serves one batch size only.
        recompute: Patterns of names of submodules whose activations backward recomputes.
        needs_first: True if no later call can have a program if the first has none.
        strict: True if no submodule may fall back to eager, as for `trace_forward`.
        check: A function that raises for a wrong program, called with the module, the graph, the plan and the
            call before first use; None checks nothing.
    """

    form: ProgramForm
    size: int
    identity: Mapping[str, Any] = field(default_factory=dict)
    store: Store | None = None
    reuse: str = "match"
    fixed_batch: bool = False
    recompute: tuple[str, ...] = ()
    needs_first: bool = False
    strict: bool = False
    check: Callable[[nn.Module, Graph, AnyPlan, ModelCall], None] | None = None
    _warned: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def compile(
        self,
        root: nn.Module,
        call: ModelCall,
        *,
        layout: FixedLayout | None = None,
        fixed_batch: bool = False,
        device: torch.device | None = None,
    ) -> tuple[Entry, Path | None]:
        """Return the texts of the program of one call, from the store or newly compiled, with its path.

        Args:
            root: The module. Its parameters may be sharded, because only logical shapes are read.
            call: The arguments of the call.
            layout: The present layout of the parameters.
            fixed_batch: True to trace this batch size only.
            device: The device of the program; by default the module's.

        Raises:
            UnsupportedError: The forward cannot be traced.
            PlanError: No plan fits, or the stored program is broken.
        """
        fixed_batch = fixed_batch or self.fixed_batch
        traced_from = {
            "fingerprint": fingerprint(root, *call),
            "modes": str(caller_modes()),
            "hooked": _hooked(root),
            "fixed_batch": fixed_batch,
            "versions": _versions(),
        }
        made_from = {**traced_from, **self.identity, "size": self.size}
        made_from |= {"layout": _layout_digest(layout), "recompute": list(self.recompute)}
        key = key_of(made_from)
        kept = self._kept(key)
        if kept is not None and self.store is not None:
            log.info("compile: reuse the program in %s", self.store.path(key))
            return kept, self.store.path(key)
        entry = self._make(root, call, layout, traced_from, fixed_batch, device)
        path = None if self.store is None else self.store.write(key, entry, made_from)
        return entry, path

    def _kept(self, key: str) -> Entry | None:
        """Return the usable entry of the store under a key."""
        if self.store is None or self.reuse in ("override", "graph"):
            return None
        try:
            return self.store.read(key)
        except PlanError as error:
            if self.reuse != "moo":
                raise
            log.warning("%s Compiled again, because of reuse='moo'.", error.message)
            return None

    def _make(
        self,
        root: nn.Module,
        call: ModelCall,
        layout: FixedLayout | None,
        traced_from: Mapping[str, Any],
        fixed_batch: bool,
        device: torch.device | None,
    ) -> Entry:
        """Trace, plan, check and emit; an unforeseen error becomes the reason to fall back to eager."""
        try:
            return self._made(root, call, layout, traced_from, fixed_batch, device)
        except NnxError:
            raise
        except Exception as error:
            log.debug("compiling failed", exc_info=True)
            first = next(iter(str(error).splitlines()), "")
            raise UnsupportedError(
                f"the compiler raised an unforeseen {type(error).__name__}: {first}.",
                remedy="Please report it with the model, and the traceback that logger 'nnx.nnscaler' shows "
                "at level DEBUG.",
            ) from error

    def _made(
        self,
        root: nn.Module,
        call: ModelCall,
        layout: FixedLayout | None,
        traced_from: Mapping[str, Any],
        fixed_batch: bool,
        device: torch.device | None,
    ) -> Entry:
        text = self.store.find_graph(traced_from) if self.store and self.reuse == "graph" else None
        if text is None:
            batch_dims: BatchDims = None if fixed_batch else "auto"
            graph = trace_forward(root, *call, batch_dims=batch_dims, device=device, strict=self.strict)
            text = graph_to_json(graph)
        else:
            graph = graph_from_json(text)
        plan = self.form.plan(graph, layout)
        self._warn_unsupported(graph)
        if self.check is not None and layout is None:
            self.check(root, graph, plan, call)
        source = self.form.source(graph, plan, title=_title(root), recompute=self.recompute)
        return Entry(source=source, plan=self.form.text(plan), graph=text)

    def _warn_unsupported(self, graph: Graph) -> None:
        """Warn once about operators without a rule; evaluation does not repeat the warning of training."""
        message = unsupported_message(graph, self.size) if self.size > 1 else ""
        if message and message not in self._warned and (graph.training or not self._warned):
            log.warning(message)
        self._warned.add(message)


def compile_together(
    compiler: Compiler,
    root: nn.Module,
    call: ModelCall,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    layout: FixedLayout | None = None,
    fixed_batch: bool = False,
) -> Compiled:
    """Compile on the first rank of a group, and load the program on all of them. Collective.

    Args:
        compiler: The compiler; the first rank's counts.
        root: The module.
        call: The arguments; the first rank's count.
        group: A group whose collectives take CPU tensors.
        device: This rank's device for the program.
        layout: The present layout of the parameters.
        fixed_batch: True to trace this batch size only.

    Raises:
        PlanError: The ranks' modules differ, or no plan fits.
        UnsupportedError: The forward cannot be traced.
    """
    if layout is None:  # later calls cannot compare: a trace changes modules on the rank that traced
        _check_agreement(root, group)
    made: tuple[Entry, Path | None] | None = None
    with together(group, doing="compiling the forward"):
        if group is None or dist.get_rank(group) == 0:
            made = compiler.compile(root, call, layout=layout, fixed_batch=fixed_batch, device=device)
    found = _from_first(made, group)
    assert found is not None  # `together` has raised the first rank's error
    entry, path = found
    return Compiled.load(entry, path, device, compiler.form)


def _check_agreement(root: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuse modules that differ between ranks, because their collectives would not match."""
    mine = ""
    with together(group, doing="reading the module"):
        mine = f"{fingerprint(root, (), {}, deep=False)} {caller_modes()}"
    prints = all_gather_object(mine, group)
    others = [rank for rank, other in enumerate(prints) if other != prints[0]]
    if others:
        raise PlanError(
            f"{type(root).__name__} differs between ranks: rank 0 has another one than "
            f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))} (code, shapes, "
            "requires_grad, training flags, grad mode or autocast differ).",
            remedy="Build the same module on every rank.",
        )


def _from_first(value: T, group: dist.ProcessGroup | None) -> T:
    if group is None:
        return value
    values = [value]
    dist.broadcast_object_list(values, group_src=0, group=group)
    return values[0]


def code_digest(function: Callable[..., Any]) -> str:
    """Return a key of a policy function and its code."""
    code = getattr(function, "__code__", None)
    parts: Sequence[object] = (type(function).__qualname__,)
    if code is not None:
        constants = [_constant(item) for item in code.co_consts]
        parts = (code.co_code, constants, code.co_names, getattr(function, "__defaults__", None))
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return f"{name}:{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def _constant(item: object) -> object:
    """Return a constant of a function's code in a form whose repr is the same in every process."""
    if hasattr(item, "co_code"):
        return item.co_code
    return sorted(map(repr, item)) if isinstance(item, frozenset) else item


def _hooked(root: nn.Module) -> list[str]:
    """Return the names of submodules with hooks, which a program has to call as they are."""
    return [name for name, module in root.named_modules() if name and hooks_of_the_user(module)]


def _layout_digest(layout: FixedLayout | None) -> str:
    if layout is None:
        return ""
    stored = sorted((name, str(placement)) for name, placement in layout.stored.items())
    homes = [] if layout.homes is None else [sorted(layout.homes.items())]
    text = repr((stored, sorted(layout.synchronized), *homes))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _versions() -> dict[str, str]:
    try:
        own = version("nnx-nnscaler")
    except PackageNotFoundError:
        own = "not installed"
    return {"torch": torch.__version__, "nnx-nnscaler": own}


def _title(root: nn.Module) -> str:
    cls = type(root)
    try:
        place = f"{Path(inspect.getsourcefile(cls) or '').name}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        place = cls.__module__
    return f"{cls.__qualname__} ({place})"
