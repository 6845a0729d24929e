"""Translate an exported program to a `Graph`: operators on tensors only, with the user's names.

This module defines the meaning of each step. It folds sizes into arguments, and turns writes into values
(`views`). It detaches operands where autograd is off, gives tied parameters one name, and drops unused steps.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from nnx_core._torch_compat import pytree
from nnx_nnscaler._torch_compat import OpOverload, PythonPrinter
from nnx_nnscaler.ir.graph import Argument, Code, Dim, Graph, Input, Make, Op, Ref, Size, TensorMeta, refs_in
from nnx_nnscaler.trace.export import PREFIX, Exported
from nnx_nnscaler.trace.guard import is_collective
from nnx_nnscaler.trace.steps import (
    Step,
    UnknownCallError,
    UnsupportedViewError,
    Views,
    flatten,
    functional,
    is_check,
    is_float,
    makes_gradients,
    module_of,
    nodes_in,
    notes_of,
    prune,
    same_as,
    simplified,
    tensor_of,
    writes_buffers,
    written_argument,
)
from nnx_nnscaler.trace.structure import Blame, Inputs, Names, Slot, map_slots, source_of

__all__ = [
    "BATCH",
    "Sizes",
    "UnboundSizeError",
    "UntraceableError",
    "add_module_call",
    "build_graph",
    "evaluate",
]


_WHOLE = "nnx_nnscaler.whole.default"
_UNWRITTEN = {
    InputKind.PARAMETER: "a parameter",
    InputKind.USER_INPUT: "an input",
    InputKind.CONSTANT_TENSOR: "a tensor that is no buffer",
}
"""The tensors that a program does not write to."""


class UntraceableError(Exception):
    """The trace has operators that a graph cannot have.

    Attributes:
        blames: The place of each operator in the user's code.
    """

    def __init__(self, blames: Sequence[Blame]) -> None:
        super().__init__(str(blames[0]))
        self.blames = tuple(blames)


def build_graph(module: nn.Module, exported: Exported) -> Graph:
    """Return the graph of an exported forward.

    Raises:
        UntraceableError: It has operators that a graph cannot have; their submodules have to run in eager
            mode.
    """
    return Builder(module, exported).build()


class Builder:
    """The state of one translation."""

    def __init__(self, module: nn.Module, exported: Exported) -> None:
        self.module = module
        self.exported = exported
        self.inputs = exported.inputs
        program = exported.program
        self.placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        self.gradients = exported.gradients
        self.steps, self.returned = _flat(program.graph_module, frozen=not self.gradients)
        self.names = Names(self.inputs.names)
        leaves = [
            node.meta["val"]
            for node, spec in zip(self.placeholders, program.graph_signature.input_specs, strict=True)
            if spec.kind == InputKind.USER_INPUT
        ]
        self.sizes = Sizes(program, self.inputs, leaves)
        self.views = Views(self.steps, self.placeholders)
        self.graph = Graph([], {}, {}, {}, {}, [], None, training=module.training)
        self.kinds: dict[fx.Node, InputKind] = {}
        self.several: dict[fx.Node, list[Argument]] = {}
        self.lasting: set[str] = set()
        self.detached: dict[str, Ref] = {}
        self.differentiable: set[str] = set()
        self.device = next((t.device for t in (*module.parameters(), *leaves)), torch.device("cpu"))

    def build(self) -> Graph:
        """Translate all steps."""
        graph = self.graph
        graph.guards = self.sizes.guards
        graph.symbols = {BATCH: self.sizes.origin} if self.sizes.origin else {}
        self._name_inputs()
        self._refuse_unbound()
        for step in self.steps:
            try:
                self._step(step)
            except UnsupportedViewError as error:
                raise UntraceableError([_blame(error.step, str(error))]) from error
        tensors = [self.argument(node) for node in self.returned]
        graph.outputs = map_slots(self.exported.structure, lambda part: self.output(part, tensors))
        graph.notes += tuple(
            f"the forward returns a {name}, which training does not read: omitted (pass use_cache=False)"
            for name in dict.fromkeys(self.exported.dropped)
        )
        prune(graph, self.lasting)
        return graph

    def output(self, part: Any, tensors: list[Argument]) -> Argument:
        return tensors[part.index] if isinstance(part, Slot) else self.argument(self.sizes.value(part))

    def _name_inputs(self) -> None:
        graph, program = self.graph, self.exported.program
        parameters = {id(tensor): name for name, tensor in self.module.named_parameters()}
        buffers = {id(tensor): name for name, tensor in self.module.named_buffers()}
        known: dict[tuple[InputKind, str], Ref] = {}
        leaves = iter(self.inputs.tensors)
        for node, spec in zip(self.placeholders, program.graph_signature.input_specs, strict=True):
            self.kinds[node] = spec.kind
            if spec.kind == InputKind.USER_INPUT:
                index = next(leaves)
                value = Ref(self.inputs.names[index])
                self._declare(value, node, differentiable=self.inputs.leaves[index].requires_grad)
            else:
                fqn = str(spec.target).removeprefix(f"{PREFIX}.")
                if spec.kind == InputKind.PARAMETER:
                    fqn = parameters[id(self.module.get_parameter(fqn))]
                elif spec.kind == InputKind.BUFFER:
                    fqn = buffers[id(self.module.get_buffer(fqn))]
                if (spec.kind, fqn) not in known:
                    known[spec.kind, fqn] = self._declare_own(node, spec.kind, fqn, str(spec.target))
                value = known[spec.kind, fqn]
            self.views.values[node] = value
        for name, leaf in zip(self.inputs.names, self.inputs.leaves, strict=True):
            tensor = isinstance(leaf, Tensor)
            graph.inputs.append(Input(name, graph.metas[name] if tensor else None, None if tensor else leaf))

    def _declare_own(self, node: fx.Node, kind: InputKind, fqn: str, target: str) -> Ref:
        value = Ref(self.names.new(fqn))
        tensor = tensor_of(node)
        self._declare(value, node, differentiable=kind == InputKind.PARAMETER)
        if kind == InputKind.PARAMETER:
            self.graph.parameters[value.name] = fqn
        elif kind == InputKind.BUFFER:
            self.graph.buffers[value.name] = fqn
        elif tensor is not None:
            self.graph.constants[value.name] = self.exported.program.constants[target].detach().clone()
            if "lifted_tensor" not in target:
                self.graph.notes += (f"{fqn} is a tensor but no buffer: programs keep its present value",)
        return value

    def _declare(self, value: Ref, node: fx.Node, *, differentiable: bool) -> None:
        tensor = tensor_of(node)
        if tensor is not None:
            follows = differentiable and self.gradients and is_float(tensor)
            self.graph.metas[value.name] = self.sizes.meta(tensor, differentiable=follows)
            self.differentiable |= {value.name} if follows else set()

    def _refuse_unbound(self) -> None:
        """Refuse sizes that depend on data, with the name of every submodule that has one."""
        unbound: set[fx.Node] = set()
        blames: list[Blame] = []
        for step in self.steps:
            try:
                if is_check(step):
                    continue
                for leaf in pytree.tree_leaves(step.value):
                    for size in leaf.shape if isinstance(leaf, Tensor) else [leaf]:
                        self.sizes.value(size)
                if any(node in unbound for node in nodes_in(step.args, step.kwargs)):
                    blames.append(_blame(step, "a size depends on the values of a tensor"))
            except UnboundSizeError:
                unbound.add(step.node)
                blames.append(_blame(step, "a size depends on the values of a tensor"))
        if blames:
            raise UntraceableError(blames)

    def _step(self, step: Step) -> None:
        if is_check(step):
            return
        if not (step.frozen or self.gradients):
            raise UntraceableError([_blame(step, "it records gradients where its caller does not")])
        if is_collective(step.target):
            raise UntraceableError([_blame(step, "it communicates with other ranks")])
        if step.target is operator.getitem:
            self._getitem(step)
        elif not isinstance(step.target, OpOverload) or not _has_tensor(step.value):
            if not isinstance(step.value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise UntraceableError([_blame(step, str(UnknownCallError(step.node)))])
            self.views.values[step.node] = self.sizes.value(step.value)
        elif str(step.target) == _WHOLE:
            add_module_call(self, step)
        elif written_argument(step) is not None:
            self._write(step)
        else:
            self._call(step)

    def _call(self, step: Step) -> None:
        operands = [self.argument(node) for node in nodes_in(step.args, step.kwargs)]
        follows = not step.frozen and any(name in self.differentiable for name in refs_in(operands))
        same = same_as(step, differentiable=follows)
        if same is not None:
            self.views.values[step.node] = self._operand(same, step)
            return
        target, args, kwargs = simplified(step)
        made = self._add(step, target, self._arguments(args, step), self._arguments(kwargs, step), step.value)
        self.lasting |= {made.name} if writes_buffers(step) else set()
        self.views.values[step.node] = made

    def _getitem(self, step: Step) -> None:
        base, index = step.args
        if base in self.several:
            self.views.values[step.node] = self.several[base][index]
            return
        self.views.values[step.node] = self._add(
            step, "getitem", (self.argument(base), index), {}, step.value
        )

    def _write(self, step: Step) -> None:
        node = step.args[0]
        kind = self.kinds.get(self.views.root(node))
        if kind == InputKind.BUFFER:
            args, kwargs = self._arguments(step.args, step), self._arguments(step.kwargs, step)
            made = self._add(step, str(step.target), args, kwargs, step.value)
            self.lasting.add(made.name)
            self.views.values[step.node] = made
            return
        if kind in _UNWRITTEN:
            what = _UNWRITTEN[kind]
            raise UntraceableError([_blame(step, f"it writes in place into {what}")])
        current = self.argument(node)
        if step.frozen and isinstance(current, Ref) and current.name in self.differentiable:
            raise UntraceableError([_blame(step, "it writes in place past autograd")])
        new = self._written_value(step)
        self.views.values[step.node] = new
        self.views.written(step, node, new, self)

    def _written_value(self, step: Step) -> Argument:
        like = tensor_of(step.args[0])
        assert like is not None  # only tensors are written into
        name = str(step.target).split(".")[1]
        if name in ("fill_", "zero_", "copy_"):
            return self._filled(step, like, step.args[1] if name != "zero_" else 0)
        call = functional(step)
        made: Argument = self._add(
            step, call.target, self._arguments(call.args, step), self._arguments(call.kwargs, step), like
        )
        return (
            made if call.dtype is None else self.emit(step, "aten.to.dtype", [made, _code(call.dtype)], like)
        )

    def _filled(self, step: Step, like: Tensor, value: Any) -> Argument:
        """Return the value after a write of one value, or of another tensor."""
        source = tensor_of(value)
        number = self._constant_number(value) if isinstance(value, fx.Node) else value
        if number is not None:
            kwargs = {"dtype": _code(like.dtype), "device": self._code(like.device)}
            args = (self.shape(like), self.argument(number))
            return self._add(step, "aten.full.default", args, kwargs, like)
        assert source is not None  # neither a number nor a tensor cannot be written
        made = self._operand(value, step)
        if source.dtype != like.dtype:
            made = self.emit(step, "aten.to.dtype", [made, _code(like.dtype)], source.to(like.dtype))
        if [str(dim) for dim in source.shape] != [str(dim) for dim in like.shape]:
            made = self.emit(step, "aten.expand.default", [made, self.shape(like)], like)
        return made

    def _constant_number(self, node: fx.Node) -> Any:
        value = self.argument(node)
        tensor = self.graph.constants.get(value.name) if isinstance(value, Ref) else None
        return tensor.item() if tensor is not None and tensor.numel() == 1 else None

    def _add(
        self, step: Step, target: str, args: tuple[Argument, ...], kwargs: dict[str, Argument], made: Any
    ) -> Ref:
        follows = not step.frozen and makes_gradients(target) if target != "getitem" else True
        follows = follows and any(name in self.differentiable for name in refs_in((args, kwargs)))

        def meta(value: Any) -> TensorMeta | None:
            if not isinstance(value, Tensor):
                return None
            return self.sizes.meta(value, differentiable=follows and is_float(value))

        output = meta(made) if isinstance(made, Tensor) else tuple(meta(value) for value in made)
        name = self.names.new(step.node.name if target != "aten.detach.default" else "detached")
        self.differentiable |= {name} if follows and any(map(is_float, pytree.tree_leaves(made))) else set()
        self.graph.ops.append(
            Op(
                name,
                target,
                args,
                kwargs,
                output,
                module_of(step.node),
                source_of(notes_of(step)),
                step.context,
            )
        )
        return Ref(name)

    def emit(self, step: Step, target: str, args: Sequence[Argument], like: Tensor) -> Argument:
        """Add an operator that the trace does not have."""
        return self._add(step, target, tuple(args), {}, like)

    def _operand(self, node: fx.Node, step: Step) -> Argument:
        """Return a value as an operand of a step, detached if autograd must not follow it."""
        value = self.views.value(node, self)
        if not step.frozen or not isinstance(value, Ref) or value.name not in self.differentiable:
            return value
        if value.name not in self.detached:
            tensor = tensor_of(node)
            self.detached[value.name] = self._add(step, "aten.detach.default", (value,), {}, tensor)
        return self.detached[value.name]

    def _arguments(self, arguments: Any, step: Step) -> Any:
        if isinstance(arguments, fx.Node):
            return self._operand(arguments, step)
        if isinstance(arguments, (list, tuple)):
            return type(arguments)(self._arguments(item, step) for item in arguments)
        if isinstance(arguments, dict):
            return {key: self._arguments(item, step) for key, item in arguments.items()}
        return self._code(arguments)

    def argument(self, value: Any) -> Argument:
        """Convert an argument of the trace to one of the graph."""
        if isinstance(value, fx.Node):
            return self.views.value(value, self)
        if isinstance(value, (list, tuple)):
            return type(value)(self.argument(item) for item in value)
        return self._code(self.sizes.value(value))

    def shape(self, tensor: Tensor) -> list[Argument]:
        """Return a shape as an argument."""
        return [self.sizes.value(dim) for dim in tensor.shape]

    def _code(self, value: Any) -> Argument:
        if isinstance(value, torch.device):
            same = value.type == self.device.type
            return Code("rt.device" if same else f'torch.device("{value}")')
        return _code(value)


def _code(value: Any) -> Argument:
    return Code(str(value)) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else value


def _flat(graph_module: fx.GraphModule, *, frozen: bool) -> tuple[list[Step], list[Any]]:
    try:
        return flatten(graph_module, frozen=frozen)
    except UnknownCallError as error:
        blame = Blame(module_of(error.node), source_of(error.node.meta.get("stack_trace")), str(error))
        raise UntraceableError([blame]) from error


def _blame(step: Step, reason: str) -> Blame:
    return Blame(module_of(step.node), source_of(notes_of(step)), reason)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def add_module_call(builder: Builder, step: Step) -> None:
    """Add the submodule call behind a step."""
    tensors, _, key = step.args
    call = builder.exported.calls[key]
    operands = [builder.argument(node) for node in tensors]
    args = map_slots(call.args, lambda part: builder.output(part, operands))
    kwargs = map_slots(call.kwargs, lambda part: builder.output(part, operands))
    values = list(step.value[:-1])
    found: list[Argument] = [None] * len(step.value)
    builder.several[step.node] = found
    structure = call.result.structure
    context = ", ".join(
        filter(None, ("torch.no_grad()" if step.frozen and builder.gradients else "", step.context))
    )
    name = builder.names.new(call.fqn.rpartition(".")[2])
    output = _meta_of(builder, structure, values, step)
    source = source_of(notes_of(step))
    builder.graph.ops.append(Op(name, "module", tuple(args), dict(kwargs), output, call.fqn, source, context))
    _take(builder, structure, Ref(name), values, found, step)


def _meta_of(builder: Builder, structure: Any, values: list[Tensor], step: Step) -> Any:
    """Return the meta of a tensor, a tuple of metas of a container's items, or None."""
    if isinstance(structure, Slot):
        tensor = values[structure.index]
        return builder.sizes.meta(tensor, differentiable=is_float(tensor) and not step.frozen)
    metas = [_meta_of(builder, part, values, step) for _, part in _parts(structure)]
    return tuple(meta if isinstance(meta, TensorMeta) else None for meta in metas) if metas else None


def _take(
    builder: Builder, structure: Any, value: Ref, values: list[Tensor], found: list[Argument], step: Step
) -> None:
    """Add getitems down to every tensor of a result."""
    if isinstance(structure, Slot):
        found[structure.index] = value
        builder.differentiable |= {value.name} if builder.graph.meta(value.name).differentiable else set()
        return
    for key, part in _parts(structure):
        if not isinstance(part, Slot) and not _parts(part):
            continue
        name = builder.names.new(f"{value.name}_{key}")
        output = _meta_of(builder, part, values, step)
        builder.graph.ops.append(Op(name, "getitem", (value, key), {}, output, module_of(step.node)))
        _take(builder, part, Ref(name), values, found, step)


def _parts(structure: Any) -> list[tuple[Any, Any]]:
    """Return the keys and items of a container."""
    if isinstance(structure, (list, tuple)):
        return list(enumerate(structure))
    fields = structure.fields if isinstance(structure, Make) else structure
    return list(fields.items()) if isinstance(fields, dict) else []


# The symbolic sizes of a trace become expressions in ``B``, the size of the batch. torch gives every input
# its own symbol; here all batch dims share one. This section names symbols, prints expressions and collects
# conditions.


BATCH = "B"
_INPUT_SIZE = re.compile(r"L\['leaves'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_EXPRESSION = re.compile(r"[\w\s+\-*/%().,<>=!]*")


# An expression with equal values for all of these counts as equal for any batch: torch's expressions combine
# sums, products, quotients, remainders and comparisons with small numbers.
_SAMPLES = (*range(2, 67), 1_000, 1_023, 1_024, 1_000_003, 2**40 + 15)


class UnboundSizeError(Exception):
    """A size depends on the values of tensors."""


def evaluate(expr: str, batch: int) -> Any:
    """Return the value of an expression of a trace, for a batch size.

    Example:
        >>> evaluate("16*B", 3)
        48
    """
    if not _EXPRESSION.fullmatch(expr):
        raise ValueError(f"{expr!r} is not an expression over sizes")
    allowed = {BATCH: batch, "max": max, "min": min, "math": __import__("math"), "True": True, "False": False}
    return eval(expr, {"__builtins__": {}}, allowed)


class Sizes:
    """The sizes of one exported program.

    Args:
        program: The program.
        inputs: The program's sample.
        leaves: The exporter's leaves for the tensors among the inputs.
    """

    def __init__(self, program: ExportedProgram, inputs: Inputs, leaves: Sequence[Tensor]) -> None:
        self._batch = sympy.Symbol(BATCH, integer=True, positive=True)
        self._symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self._known: dict[Any, str] = {}
        self.hint = inputs.batch
        self.origin: tuple[str, int] | None = None
        for index in inputs.batched:
            dim: Any = leaves[inputs.tensors.index(index)].shape[0]
            if _is_free(dim):
                self._symbols.update(dict.fromkeys(dim.node.expr.free_symbols, self._batch))
                self.origin = self.origin or (inputs.names[index], 0)
        self._free = [leaf.ndim > 0 and _is_free(leaf.shape[0]) for leaf in leaves]
        self.guards = self._guards(program) if self.origin else ()

    def value(self, value: Any) -> Any:
        """Convert a size or another number of the trace to an int, float, bool or Size.

        Raises:
            UnboundSizeError: The number depends on the values of tensors.
        """
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        text = self._text(value.node.expr)
        found = evaluate(text, self.hint)
        return Size(text, found) if text != repr(found) else found

    def meta(self, tensor: Tensor, *, differentiable: bool) -> TensorMeta:
        """Return the graph's description of a tensor of the trace."""
        shape: tuple[Dim, ...] = tuple(self.value(dim) for dim in tensor.shape)
        return TensorMeta(shape, str(tensor.dtype).removeprefix("torch."), differentiable)

    def _text(self, expr: Any) -> str:
        if expr not in self._known:
            unknown = expr.free_symbols - self._symbols.keys()
            if unknown:
                raise UnboundSizeError(str(expr))
            self._known[expr] = _plainest(PythonPrinter().doprint(expr.xreplace(self._symbols)))
        return self._known[expr]

    def _guards(self, program: ExportedProgram) -> tuple[str, ...]:
        found = {self._guard(code) for code in getattr(program, "_guards_code", None) or ()}
        for symbol, bounds in program.range_constraints.items():
            if symbol in self._symbols:
                found |= {f"{BATCH} >= {bounds.lower}"} if bounds.lower > 2 else set()
                found |= {f"{BATCH} <= {bounds.upper}"} if bounds.upper.is_Integer else set()
        return tuple(sorted(found - {""}))

    def _guard(self, code: str) -> str:
        if not all(self._free[int(leaf)] for leaf, _ in _INPUT_SIZE.findall(code)):
            return ""  # that input's meta already has the number
        text = _INPUT_SIZE.sub(BATCH, code)
        if "L[" in text:
            raise UnboundSizeError(code)
        return "" if all(evaluate(text, batch) for batch in _SAMPLES) else text


def _plainest(text: str) -> str:
    """Return an expression as ``a*B + b`` if it is one: ``(8*B) // B`` is ``8``."""
    if BATCH not in text:
        return text
    values = [evaluate(text, batch) for batch in _SAMPLES]
    slope = values[1] - values[0]
    rest = values[0] - _SAMPLES[0] * slope
    exact = all(isinstance(value, int) for value in values)
    if not exact or any(value != slope * batch + rest for batch, value in zip(_SAMPLES, values, strict=True)):
        return text
    if slope == 0:
        return str(rest)
    product = BATCH if slope == 1 else f"{slope}*{BATCH}"
    return product if rest == 0 else f"{product} {'+' if rest > 0 else '-'} {abs(rest)}"


def _is_free(dim: Any) -> bool:
    return isinstance(dim, torch.SymInt) and bool(dim.node.expr.free_symbols)
