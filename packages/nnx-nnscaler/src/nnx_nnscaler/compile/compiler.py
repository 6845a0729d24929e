"""From a module and a call of it to a program that runs: trace, plan, emit, keep, load.

`Store` keeps programs between runs. `Compiler` works in one process, `compile_together` lets one rank compile
for all ranks of a group and brings its error to every one of them. Which plan is made, and what a program
looks like, is the business of a `ProgramForm`, when to compile that of `nnx_nnscaler.compile.programs`.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import logging
import os
import shutil
import tempfile
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


# --- the store -------------------------------------------------------------------------------------------
#
# The folder of emitted programs: where they lie, when one may be used again, and that it is whole.
#
#     <savedir>/<class>/<instance or _>/<key>/{forward.py, plan.json, graph.json, meta.json}
#
# The key is a digest of all that a program was made from, so another model, shape, policy or version has a
# folder of its own and nothing can be stale. ``meta.json`` says what that was and holds a checksum of every
# other file. Weights are never stored.


_FORMAT = 1
_FILES = {"source": "forward.py", "plan": "plan.json", "graph": "graph.json"}


@dataclass(frozen=True, slots=True)
class Entry:
    """The texts of one program.

    Attributes:
        source: Python source.
        plan: The plan as JSON.
        graph: The graph as JSON.
    """

    source: str
    plan: str
    graph: str


def key_of(made_from: Mapping[str, Any]) -> str:
    """Name of the folder of what was made from this.

    Example:
        >>> key_of({"policy": "tp"}) == key_of({"policy": "tp"}) != key_of({"policy": "dp"})
        True
    """
    text = json.dumps(made_from, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Store:
    """The programs of one instance of a class.

    Args:
        savedir: The folder that holds everything.
        owner: Qualified name of the class whose forward it is.
        instance: Tells instances of one class apart.
    """

    def __init__(self, savedir: str | Path, *, owner: str, instance: str | None = None) -> None:
        folder = Path(savedir).expanduser().absolute()
        self.folder = folder / _as_name(owner) / _as_name(instance or "_")

    def path(self, key: str) -> Path:
        """Where the source of a program lies."""
        return self.folder / key / _FILES["source"]

    def read(self, key: str) -> Entry | None:
        """The program of that key; None where there is none.

        Raises:
            PlanError: The file there is broken, edited or from elsewhere.
        """
        folder = self.folder / key
        while folder.exists():
            seen = _stamp(folder)
            try:
                return self._read(folder, key)
            except PlanError:
                # Otherwise another process took it away meanwhile, to put a new one in its place.
                if folder.exists() and _stamp(folder) == seen:
                    raise
        return None

    def _read(self, folder: Path, key: str) -> Entry:
        meta = _read_meta(folder)
        if key_of(meta["made_from"]) != key:
            raise _refused(folder / "meta.json", "it describes a program of another key")
        return Entry(**{name: _read_checked(folder, file, meta) for name, file in _FILES.items()})

    def find_graph(self, traced_from: Mapping[str, Any]) -> str | None:
        """A graph that was traced from just this, from a program of any policy.

        Raises:
            PlanError: There is one, and it is broken.
        """
        for path in sorted(self.folder.glob("*/meta.json")):
            if path.parent.name.startswith("."):  # being written
                continue
            meta = _read_meta(path.parent)
            if all(meta["made_from"].get(name) == value for name, value in traced_from.items()):
                return _read_checked(path.parent, _FILES["graph"], meta)
        return None

    def write(self, key: str, entry: Entry, made_from: Mapping[str, Any]) -> Path:
        """Keep a program, in place of one of the same key, and return the path of its source.

        Several processes may write at once: each file that can be seen is whole.
        """
        texts = {file: getattr(entry, name) for name, file in _FILES.items()}
        sums = {file: _sum(text) for file, text in texts.items()}
        texts["meta.json"] = json.dumps(
            {"format": _FORMAT, "made_from": made_from, "sha256": sums}, indent=2, sort_keys=True
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            made.chmod(0o777 & ~_umask())
            for name, text in texts.items():
                (made / name).write_text(text, encoding="utf-8")
            self._move_into_place(made, self.folder / key)
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return self.path(key)

    def _move_into_place(self, made: Path, place: Path) -> None:
        while True:
            try:
                made.rename(place)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                return
            old = Path(tempfile.mkdtemp(prefix=".old-", dir=self.folder))
            try:
                place.rename(old / "entry")
            except FileNotFoundError:  # another process took it away just now
                pass
            finally:
                shutil.rmtree(old, ignore_errors=True)


def _stamp(folder: Path) -> tuple[int, int] | None:
    """What changes when a folder is replaced by another."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_ino, found.st_ctime_ns


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _refused(path, f"it cannot be read ({type(error).__name__}: {error})") from None
    if version != _FORMAT:
        raise _refused(path, f"its format is {version!r} instead of {_FORMAT}")
    if not isinstance(meta.get("made_from"), dict) or not isinstance(meta.get("sha256"), dict):
        raise _refused(path, "it lacks 'made_from' or 'sha256'")
    return meta


def _read_checked(folder: Path, file: str, meta: Mapping[str, Any]) -> str:
    path = folder / file
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(path, f"it cannot be read ({type(error).__name__}: {error})") from None
    if meta["sha256"].get(file) != _sum(text):
        raise _refused(path, "it was changed after it was written")
    return text


def _refused(path: Path, reason: str) -> PlanError:
    return PlanError(
        f"{path} is not used: {reason}.",
        remedy=f"Delete the folder {path.parent}, or set reuse='override' or 'moo' to have it made anew.",
    )


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _as_name(text: str) -> str:
    """A file name that keeps what can be kept of a text, and tells other texts apart."""
    name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in text).lstrip(".")
    return name if name == text else f"{name}-{_sum(text)[:8]}"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# --- compiling --------------------------------------------------------------------------------------------


class ModelCall(NamedTuple):
    """Arguments of a forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class FixedLayout(NamedTuple):
    """How the parameters lie already, so that every later program has to take them.

    Attributes:
        stored: Placement of every parameter by fully qualified name.
        synchronized: Parameters whose partial gradients the reducer sums.
        homes: The rank along the pipe that stores each parameter; None without a pipeline.
    """

    stored: Mapping[str, Placement]
    synchronized: frozenset[str]
    homes: Mapping[str, int] | None = None

    @classmethod
    def of(cls, plan: AnyPlan) -> FixedLayout:
        """The layout that a plan asks for."""
        return cls(dict(plan.stored), plan.synchronized, plan.homes)


Planner = Callable[[Graph, FixedLayout | None], AnyPlan]
"""Makes the plan of a graph; with a layout, one that takes parameters as they lie."""


@dataclass(frozen=True)
class ProgramForm:
    """What plans and programs look like: one function for all ranks of a unit.

    Attributes:
        planner: Makes plans.
    """

    planner: Planner

    def plan(self, graph: Graph, layout: FixedLayout | None) -> Any:
        """The plan of a graph."""
        return self.planner(graph, layout)

    def source(self, graph: Graph, plan: Any, *, title: str, recompute: Sequence[str]) -> str:
        """The source of the program, as `emit` writes it."""
        return emit(graph, plan, title=title, recompute=recompute)

    def text(self, plan: Any) -> str:
        """The plan as text."""
        return any_plan_to_text(plan)

    def load(self, entry: Entry, graph: Graph, path: Path | None) -> tuple[Any, Program]:
        """The plan and the program of what `source` and `text` wrote."""
        return any_plan_from_text(entry.plan), load_program(entry.source, path=path)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program, ready to be called.

    Attributes:
        graph: The graph that was traced.
        plan: Its plan.
        program: The emitted function.
        constants: The graph's constants, on the device that runs it.
        source: The emitted source.
        path: The path that it is kept at; None for a program that is in memory only.
    """

    graph: Graph
    plan: AnyPlan
    program: Program
    constants: dict[str, Tensor]
    source: str
    path: Path | None

    @classmethod
    def load(cls, entry: Entry, path: Path | None, device: torch.device, form: ProgramForm) -> Compiled:
        """Make the texts of a program run."""
        graph = graph_from_json(entry.graph)
        constants = {name: tensor.to(device) for name, tensor in graph.constants.items()}
        plan, program = form.load(entry, graph, path)
        return cls(graph, plan, program, constants, entry.source, path)


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """Compiles calls of one module.

    Attributes:
        form: Makes plans and programs.
        size: Ranks of a unit.
        identity: What programs depend on besides the module, its inputs and the size: policy, options. JSON
            values; see `code_digest` for functions.
        store: The store of programs; None keeps them in memory.
        reuse: ``"match"``, ``"override"``, ``"moo"`` or ``"graph"``.
        fixed_batch: True if a program is for one batch size only.
        recompute: Patterns of names of submodules whose activations are recomputed in the backward pass.
        needs_first: True if no later call can have a program where the first one has none.
        strict: True if no submodule may stay whole, as for `trace_forward`.
        check: Called with the module, the graph, the plan and the call before a program is used; raises where
            it is wrong. None checks nothing.
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
    _told: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    def compile(
        self,
        root: nn.Module,
        call: ModelCall,
        *,
        layout: FixedLayout | None = None,
        fixed_batch: bool = False,
        device: torch.device | None = None,
    ) -> tuple[Entry, Path | None]:
        """The texts of the program of one call, from the store where it may be used, else made now.

        Args:
            root: The module; its parameters may lie in parts, only their logical shapes are read.
            call: The arguments that it is called with.
            layout: The layout that its parameters have already.
            fixed_batch: Trace this batch size only.
            device: The device that the program runs on; by default the one that the module is on.

        Raises:
            UnsupportedError: The forward cannot be traced.
            PlanError: No plan fits, or what the store holds is broken.
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
            log.info("the program in %s is used again", self.store.path(key))
            return kept, self.store.path(key)
        entry = self._make(root, call, layout, traced_from, fixed_batch, device)
        path = None if self.store is None else self.store.write(key, entry, made_from)
        return entry, path

    def _kept(self, key: str) -> Entry | None:
        """What the store holds under a key, as far as it may be used."""
        if self.store is None or self.reuse in ("override", "graph"):
            return None
        try:
            return self.store.read(key)
        except PlanError as error:
            if self.reuse != "moo":
                raise
            log.warning("%s Made anew, because of reuse='moo'.", error.message)
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
        """Trace, plan, check and emit; what fails unforeseen means that the forward runs whole."""
        try:
            return self._made(root, call, layout, traced_from, fixed_batch, device)
        except NnxError:
            raise
        except Exception as error:
            log.debug("compiling failed", exc_info=True)
            first = next(iter(str(error).splitlines()), "")
            raise UnsupportedError(
                f"compiling it failed unforeseen, with {type(error).__name__}: {first}.",
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
        self._tell_unsupported(graph)
        if self.check is not None and layout is None:
            self.check(root, graph, plan, call)
        source = self.form.source(graph, plan, title=_title(root), recompute=self.recompute)
        return Entry(source=source, plan=self.form.text(plan), graph=text)

    def _tell_unsupported(self, graph: Graph) -> None:
        """Say once which operators nobody knows how to split, and not again of the evaluation."""
        message = unsupported_message(graph, self.size) if self.size > 1 else ""
        if message and message not in self._told and (graph.training or not self._told):
            log.warning(message)
        self._told.add(message)


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
        compiler: The compiler; only the first rank's is used.
        root: The module.
        call: Arguments; the other ranks' are not looked at.
        group: A group whose collectives take CPU tensors.
        device: The device that the program runs on, on this rank.
        layout: The layout that the parameters have already.
        fixed_batch: Trace this batch size only.

    Raises:
        PlanError: The ranks' modules differ, or no plan fits.
        UnsupportedError: The forward cannot be traced.
    """
    if layout is None:  # later, a trace may have left its marks on the rank that traced
        _check_agreement(root, group)
    made: tuple[Entry, Path | None] | None = None
    with together(group, doing="compiling the forward"):
        if group is None or dist.get_rank(group) == 0:
            made = compiler.compile(root, call, layout=layout, fixed_batch=fixed_batch, device=device)
    found = _from_first(made, group)
    assert found is not None  # or its error had been raised
    entry, path = found
    return Compiled.load(entry, path, device, compiler.form)


def _check_agreement(root: nn.Module, group: dist.ProcessGroup | None) -> None:
    """All ranks must have the same module, or their collectives would not match."""
    mine = ""
    with together(group, doing="reading the module"):
        mine = f"{fingerprint(root, (), {}, deep=False)} {caller_modes()}"
    prints = all_gather_object(mine, group)
    others = [rank for rank, other in enumerate(prints) if other != prints[0]]
    if others:
        raise PlanError(
            f"{type(root).__name__} is not the same on all ranks: rank 0 has another one than "
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
    """What tells one policy function from another, or from its former self."""
    code = getattr(function, "__code__", None)
    parts: Sequence[object] = (type(function).__qualname__,)
    if code is not None:
        constants = [_constant(item) for item in code.co_consts]
        parts = (code.co_code, constants, code.co_names, getattr(function, "__defaults__", None))
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    return f"{name}:{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def _constant(item: object) -> object:
    """A constant of a function's code in a form whose repr is the same in every process."""
    if hasattr(item, "co_code"):
        return item.co_code
    return sorted(map(repr, item)) if isinstance(item, frozenset) else item


def _hooked(root: nn.Module) -> list[str]:
    """Submodules with hooks, which a program has to call as they are."""
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
