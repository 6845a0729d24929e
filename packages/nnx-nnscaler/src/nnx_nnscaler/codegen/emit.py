"""Emit the Python source of a graph and its plan: one function that every rank of a unit runs.

This module orders the statements and inserts the placement changes between operators. Comments tell a reader
the origin and the placement of a line's result. It also loads the function from its source. Rules and
`writer` write single operators; nothing here computes.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from nnx_nnscaler.codegen.fold import fold, layer_of
from nnx_nnscaler.codegen.layout import fold_recomputed, header, lay_out
from nnx_nnscaler.codegen.lines import Function, Line
from nnx_nnscaler.codegen.writer import Names, OpWriter, bound
from nnx_nnscaler.ir.graph import Argument, Graph, Make, Op, TensorMeta, refs_in, text_of
from nnx_nnscaler.ir.placement import Conversion, Placement, R, Strategy, Use, conversion, uses_of
from nnx_nnscaler.ir.program_plan import ProgramPlan

_LARGE = 1024
"""Maximum elements of a constant that is compared with others."""


def emit(graph: Graph, plan: ProgramPlan, *, title: str = "", recompute: Sequence[str] = ()) -> str:
    """Return the source of a program: a module with a function ``forward(rt, m, w, c, ...)``.

    ``rt`` is the `Runtime` of this rank, and ``m`` the user's module, for submodules that run in eager mode.
    ``w`` maps the fully qualified name of a parameter or buffer to this rank's shard of it. ``c`` holds the
    graph's constants by name. One argument follows for every tensor among the inputs.

    Args:
        graph: The graph to compute.
        plan: The plan, with a strategy for every operator.
        title: The name of the module, for the reader.
        recompute: Patterns of names of submodules whose activations backward recomputes. A star stands for
            one component of a name, as in ``"blocks.*"``.
    """
    return _Emitter(graph, plan).source(title, recompute)


def inputs_of(graph: Graph) -> list[str]:
    """Return the names of the tensors among the inputs, in order; these are a program's arguments."""
    return [leaf.name for leaf in graph.inputs if leaf.meta is not None]


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor of the program.

    Attributes:
        code: The expression of the tensor.
        placement: The placement of the tensor.
        flows: True if a gradient may flow back into it.
        synchronized: True if the reducer sums its partial gradients: it is such a parameter, or every rank
            computes it from such parameters alone.
        place: The submodule and source line of its origin.
    """

    code: str
    placement: Placement
    flows: bool
    synchronized: bool = False
    place: tuple[str, str] = ("", "")


class _Emitter:
    """Writes one program."""

    def __init__(self, graph: Graph, plan: ProgramPlan) -> None:
        self.graph = graph
        self.plan = plan
        self.names = Names()
        self.lines: list[Line] = []
        self.values: dict[str, _Value] = {}
        self.converted: dict[tuple[str, Use], str] = {}
        self.wanted = {*graph.users(), *refs_in(graph.outputs)}
        self.place: tuple[str, str] = ("", "")
        self.layer: tuple[str, int] | None = None
        self.layer_start = 0
        self.context = ""
        self.classes: dict[str, str] = {}

    def source(self, title: str, recompute: Sequence[str]) -> str:
        """Return the text of the module."""
        for symbol in self.graph.symbols:
            self.names.new(symbol)
        arguments = self._bind_inputs()
        for symbol, (name, dim) in self.graph.symbols.items():
            self._line(f"{symbol} = {self.values[name].code}.shape[{dim}]")
        imports = self._import_classes()
        results = _results(self.graph)
        for op in self.graph.ops:
            if op.target == "getitem":
                self._item(op)
            else:
                self._operator(op, results.get(op.name, {}))
        self.place = ("", "")
        self._line(f"return {self._outputs()}")
        again, lines = fold_recomputed(self.lines, self.graph, recompute, self.names.new)
        functions, lines = fold(lines, self.names.new, {function.name for function in again})
        functions = [*again, *functions]
        head = header(self.plan, title, imports, training=self.graph.training)
        return head + "\n\n".join(
            map(
                lay_out,
                [*functions, Function("forward", ("rt", "m", "w", "c", *arguments), "", tuple(lines))],
            )
        )

    def _bind_inputs(self) -> list[str]:
        arguments = []
        for name in inputs_of(self.graph):
            arguments.append(self.names.new(name))
            self.values[name] = _Value(arguments[-1], R, self._floats(name))
        for name, qualified in self.graph.parameters.items():
            placement = self.plan.stored.get(qualified, R)
            synchronized = qualified in self.plan.synchronized
            place = (qualified.rpartition(".")[0], "")
            self.values[name] = _Value(
                f'w["{qualified}"]', placement, self._floats(name), synchronized, place
            )
        for name, qualified in self.graph.buffers.items():
            place = (qualified.rpartition(".")[0], "")
            self.values[name] = _Value(f'w["{qualified}"]', R, flows=False, place=place)
        first: dict[object, str] = {}  # many layers have equal constants: store one
        for name, tensor in self.graph.constants.items():
            same = first.setdefault(_content(name, tensor), name)
            self.values[name] = _Value(f'c["{same}"]', R, flows=False)
        return arguments

    def _import_classes(self) -> list[str]:
        """Name the classes of outputs, and return the lines that import them."""
        lines = []
        used = [self.graph.outputs, *((op.args, op.kwargs) for op in self.graph.ops if op.target == "module")]
        for made in dict.fromkeys(made for argument in used for made in _made_in(argument)):
            home, _, path = made.partition(":")
            first, _, rest = path.partition(".")
            name = self.names.new(first)
            lines.append(f"from {home} import {first}" + (f" as {name}" if name != first else ""))
            self.classes[made] = f"{name}.{rest}" if rest else name
        return lines

    def _floats(self, name: str) -> bool:
        return _is_floating(self.graph.metas[name])

    def _operator(self, op: Op, results: dict[int, Op]) -> None:
        self._go_to(op)
        strategy = self.plan.choices[op.name]
        operands = op.operands()
        passes = self._passes(op, strategy)
        codes = [
            self.values[name].code if passes else self._read(name, use)
            for name, use in zip(operands, uses_of(strategy), strict=True)
        ]
        writer = OpWriter(self.plan.size, _first(operands, codes), self.classes)
        args, kwargs = _bound(op, codes)
        here = replace(op, args=args, kwargs=kwargs)
        flows = any(self.values[name].flows for name in operands)
        if op.target == "module":
            flows = True
        text = _written(here, strategy, writer)
        self.context = op.context
        if isinstance(op.output, TensorMeta):
            self._one_result(op, strategy, text, flows, passes)
        elif op.target == "module" and op.output is not None:
            name = self.names.new(op.name)
            self.values[op.name] = _Value(name, R, flows=True, place=self.place)
            self._line(f"{name} = {text}")
        elif isinstance(op.output, tuple):
            self._many_results(op, op.output, strategy, text, flows, results)
        else:
            self._line(text)
        self.context = ""

    def _passes(self, op: Op, strategy: Strategy) -> bool:
        """Return True if the gradient may stay partial here, because it reaches synchronized parameters only.

        The reducer sums partial gradients of those, so a collective here would sum them twice.
        """
        values = [self.values[name] for name in op.operands()]
        flowing = [value for value in values if value.flows]
        one = isinstance(op.output, TensorMeta) and op.target != "module" and not strategy.call
        same = strategy.is_replicated and all(value.placement == R for value in values)
        return one and same and bool(flowing) and all(value.synchronized for value in flowing)

    def _one_result(self, op: Op, strategy: Strategy, text: str, flows: bool, passes: bool) -> None:
        assert isinstance(op.output, TensorMeta)
        placement = strategy.outputs[0]
        name = self.names.new(op.name) if op.name in self.wanted else ""
        flows = flows and _is_floating(op.output)
        self.values[op.name] = _Value(name, placement, flows, passes and flows, place=self.place)
        self._line(f"{name} = {text}" if name else text, _describe(op.output, placement))

    def _many_results(
        self,
        op: Op,
        metas: Sequence[TensorMeta | None],
        strategy: Strategy,
        text: str,
        flows: bool,
        results: dict[int, Op],
    ) -> None:
        """Unpack the results of an operator, each under the name of its getitem."""
        placements = iter(strategy.outputs)
        targets, notes = [], []
        for index, meta in enumerate(metas):
            placement = R if meta is None else next(placements)
            item = results.get(index)
            if meta is None or item is None or item.name not in self.wanted:
                targets.append("_")
                continue
            targets.append(self.names.new(item.name))
            notes.append(_describe(meta, placement))
            self.values[item.name] = _Value(
                targets[-1], placement, flows and _is_floating(meta), place=self.place
            )
        comma = "," if len(targets) == 1 else ""
        self._line(f"{', '.join(targets)}{comma} = {text}", ", ".join(dict.fromkeys(notes)))

    def _item(self, op: Op) -> None:
        """Name one of several results; an operator's have names already, a submodule's are read here."""
        source, key = op.args
        if op.name not in self.wanted:
            return
        self._go_to(op)
        if source.name in self.values:
            name = self.names.new(op.name)
            whole = self.values[source.name].code
            text = f"{whole}[{key}]" if isinstance(key, int) else f"rt.item({whole}, {key!r})"
            self.values[op.name] = _Value(name, R, flows=True, place=self.place)
            self._line(
                f"{name} = {text}", _describe(op.output, R) if isinstance(op.output, TensorMeta) else ""
            )
            return
        (use,) = uses_of(self.plan.choices[op.name])
        value = self.values[op.name]
        if value.placement != use.placement:
            self.values[op.name] = replace(value, code=self._read(op.name, use), placement=use.placement)

    def _read(self, name: str, use: Use) -> str:
        """Return the code of a value in the placement of a use. Equal uses share one conversion."""
        value = self.values[name]
        step, call = self._step(value, use)
        if step is None:
            return value.code
        if (name, use) not in self.converted:
            short = self.graph.parameters.get(name) or self.graph.buffers.get(name) or value.code
            mark = str(use.placement).lower().translate(str.maketrans(",", "_", "()"))
            variable = self.names.new(f"{short}_{mark}")
            self._change(value, Line(f"{variable} = rt.{call}", f"{value.placement} -> {use.placement}"))
            self.converted[name, use] = variable
        return self.converted[name, use]

    def _change(self, value: _Value, line: Line) -> None:
        """Write a change of placement where it is needed.

        For a value from outside of a layer, write it before the layer: `fold` then finds equal layers.
        """
        if self.layer is None or layer_of(value.place[0]) == self.layer:
            self._line(line.code, line.comment)
            return
        module, source = value.place
        self.lines.insert(self.layer_start, line._replace(module=module, source=source))
        self.layer_start += 1

    def _go_to(self, op: Op) -> None:
        """Write the next lines under the module and source line of an operator."""
        self.place = (op.module, op.source)
        layer = layer_of(op.module)
        if layer != self.layer:
            self.layer, self.layer_start = layer, len(self.lines)

    def _step(self, value: _Value, use: Use) -> tuple[Conversion | None, str]:
        """Return the conversion for a use, and the code that calls it."""
        if value.synchronized and value.placement == R:
            return self._step_synchronized(value, use)
        step = conversion(value.placement, use)
        if step is None or (step.forward == "keep" and not value.flows):
            return None, ""
        return step, f"{step.method}({_arguments(value, step, use.placement)})"

    def _step_synchronized(self, value: _Value, use: Use) -> tuple[Conversion | None, str]:
        """Return the conversion for a use of a synchronized parameter.

        It needs no collective, because the reducer sums the parameter's gradient over the unit.
        """
        if use.placement == R:
            step = None if use.partial_gradient else Conversion("keep", "divide")
            return step, f"keep__divide({value.code})"
        dims = _dims(use.placement)
        return Conversion("split", "pad"), f"part({value.code}, {dims})"

    def _outputs(self) -> str:
        whole = Use(R)
        codes = [self._read(name, whole) for name in refs_in(self.graph.outputs)]
        return OpWriter(self.plan.size, {}, self.classes).value(bound(self.graph.outputs, codes))

    def _line(self, code: str, comment: str = "") -> None:
        self.lines.append(Line(code, comment, *self.place, self.context))


def _written(op: Op, strategy: Strategy, writer: OpWriter) -> str:
    """Return the right-hand side. A replicated operator keeps its own code, so no rule is asked."""
    if strategy.is_replicated and not strategy.call:
        return writer.call(op)
    from nnx_nnscaler.rules.registry import rule_for

    return rule_for(op).write(op, strategy, writer)


def _first(operands: list[str], codes: list[str]) -> dict[str, str]:
    """Return the code of every operand; of one with several uses, the code of the first."""
    return dict(zip(reversed(operands), reversed(codes), strict=True))


def _made_in(argument: Argument) -> Iterator[str]:
    if isinstance(argument, Make):
        yield argument.type
        yield from _made_in(argument.fields)
    elif isinstance(argument, dict):
        yield from _made_in(list(argument.values()))
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _made_in(item)


def _bound(op: Op, codes: list[str]) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
    left = list(codes)
    return tuple(bound(argument, left) for argument in op.args), {
        name: bound(argument, left) for name, argument in op.kwargs.items()
    }


def _results(graph: Graph) -> dict[str, dict[int, Op]]:
    """Return the getitem operators of every operator with several results, by index."""
    found: dict[str, dict[int, Op]] = {}
    for op in graph.ops:
        if op.target == "getitem":
            source, index = op.args
            found.setdefault(source.name, {})[index] = op
    return found


def _arguments(value: _Value, step: Conversion, target: Placement) -> str:
    """Return the arguments of a conversion: the value, and the shards to join or to make."""
    if "all_to_all" in step:
        dims = f"{value.placement.dim}, {target.dim}"
        groups = value.placement.groups, target.groups
        return f"{value.code}, {dims}" + (f", {groups[0]}, {groups[1]}" if groups != (1, 1) else "")
    shard = target if target.is_shard else value.placement
    return f"{value.code}, {_dims(shard)}" if shard.is_shard else value.code


def _dims(shard: Placement) -> str:
    return f"dim={shard.dim}" + (f", groups={shard.groups}" if shard.groups > 1 else "")


def _describe(meta: TensorMeta, placement: Placement) -> str:
    """Return the global shape and placement, for the comment at the end of a line."""
    return f"[{', '.join(map(text_of, meta.shape))}] {placement}"


def _content(name: str, tensor: Tensor) -> object:
    """Return a key of a constant. A large one is its own key, because reading its values takes long."""
    if tensor.numel() > _LARGE or tensor.device.type == "meta":
        return name
    return str(tensor.dtype), tuple(tensor.shape), str(tensor.tolist())


def _is_floating(meta: TensorMeta) -> bool:
    return meta.dtype.startswith(("float", "bfloat", "complex"))


# Load a function from its source, so that tracebacks and debuggers show its lines.


Program = Callable[..., Any]
"""``forward(rt, m, w, c, *tensors)``."""


def load_program(source: str, *, path: Path | None = None) -> Program:
    """Return the function ``forward`` of a program's source.

    Args:
        source: The source by `emit`.
        path: The file of the source, for tracebacks; None shows lines from memory.
    """
    name = f"nnx_nnscaler_program_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    filename = str(path) if path is not None else f"<{name}>"
    if path is None:
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = ModuleType(name)
    module.__file__ = filename
    exec(compile(source, filename, "exec"), module.__dict__)
    program: Program = module.forward
    return program
