"""The graph between the parts: what `trace` produces, `rules` and `plan` annotate, `codegen` prints.

It is data: operators in order of execution, with fully qualified module names, source lines and shapes.
Sizes that depend on the batch are expressions in named symbols, so there are no operators on integers.
Tensors do not live here, except small constants that the traced code made itself.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nnx_core.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Size:
    """A size that is known only at run time.

    Attributes:
        expr: Python expression in the graph's symbols, such as ``"B"`` or ``"16*B"``.
        hint: Its value for the sample that was traced.
    """

    expr: str
    hint: int


Dim = int | Size


def hint_of(dim: Dim) -> int:
    """A dim's value for the traced sample."""
    return dim if isinstance(dim, int) else dim.hint


def text_of(dim: Dim) -> str:
    """A dim as Python code over the graph's symbols."""
    return str(dim) if isinstance(dim, int) else dim.expr


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an input, a parameter, a buffer, a constant or an operator, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Code:
    """An argument printed as it is: ``torch.float32``, ``torch.contiguous_format``, ``rt.device``."""

    text: str


@dataclass(frozen=True, slots=True)
class Make:
    """An object that is no list, tuple or dict: a dataclass, a named tuple, a `ModelOutput`.

    Attributes:
        type: Where its class is, ``"package.module:Class"``.
        fields: Keyword arguments that make it; nested Arguments.
    """

    type: str
    fields: dict[str, Any]


Argument = Any
"""Ref, Code, Size, int, float (inf and nan too), complex, bool, str or None, or a (nested) list, tuple or
dict of them; among outputs and arguments of whole submodules also Make."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and dtype of a value as one process would see it: the global shape.

    Attributes:
        shape: Its dims.
        dtype: Name of the torch dtype, such as ``"float32"``.
        differentiable: True if autograd follows it: it is floating point and depends on something
            that may require gradients.
    """

    shape: tuple[Dim, ...]
    dtype: str
    differentiable: bool = False

    @property
    def hints(self) -> tuple[int, ...]:
        """The shape for the traced sample."""
        return tuple(hint_of(dim) for dim in self.shape)


@dataclass(slots=True)
class Op:
    """One operator.

    Attributes:
        name: Python identifier of its (first) result. An operator with several results is followed by
            operators with target ``"getitem"``, whose args are ``(Ref, index)``.
        target: ``"aten.linear.default"``-like name of a torch operator, ``"getitem"``, or ``"module"``: a
            submodule that runs whole, as its author wrote it, with args of its forward; `module` names it.
        args: Positional arguments.
        kwargs: Keyword arguments.
        output: The result: one meta, or a tuple of metas for several results (None for a non-tensor).
        module: Fully qualified name of the innermost submodule whose forward called it; ``""`` is the root.
        source: Where the user's code calls it: ``"file.py:12: x = self.proj(y)"``.
        context: A context manager, as Python code, that the operator has to run in, because the user's code
            says so: ``'torch.autocast("cpu", enabled=False)'``. Almost always empty.
    """

    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]
    output: TensorMeta | tuple[TensorMeta | None, ...] | None
    module: str = ""
    source: str = ""
    context: str = ""

    def operands(self) -> list[str]:
        """Names of its tensor arguments in order, those within lists included; one entry for each use."""
        return list(refs_in((self.args, self.kwargs)))


@dataclass(slots=True)
class Input:
    """One leaf among the forward's arguments.

    Attributes:
        name: Python identifier.
        meta: Shape and dtype; None for a leaf that is no tensor.
        constant: The value that was traced and that every call must repeat, for a leaf that is no tensor.
    """

    name: str
    meta: TensorMeta | None
    constant: Any = None


@dataclass(slots=True)
class Graph:
    """A traced forward.

    Attributes:
        inputs: Leaves of ``(args, kwargs)`` in pytree order.
        parameters: Value name to fully qualified name; tied names appear once, under the first.
        buffers: Value name to fully qualified name.
        constants: Value name to tensor.
        metas: Meta of every parameter, buffer, constant and tensor input, by value name.
        ops: In order of execution. In-place operators on buffers keep their place and meaning.
        outputs: The forward's result as a nested structure of Refs, Sizes, Makes and constants.
        symbols: Name of each symbol to (input name, dim) that it is the size of.
        training: True if the root was in training mode.
        in_spec: Structure of ``(args, kwargs)``, as `torch.utils._pytree.treespec_dumps` writes it.
        derived: The results computed from the graph that are worth keeping with it; never saved.
        guards: The conditions on the symbols for the trace to be right, as Python expressions over them
            (``"B <= 64"``), because the code asked; empty for nearly every model. The trace always supposes
            that every symbol is at least 2 and that all inputs that show a symbol agree on it.
        kept: Fully qualified name of every submodule that is kept whole (`Op.target` ``"module"``) to the
            reason, with the source line.
        notes: Other things that the user should hear once.
    """

    inputs: list[Input]
    parameters: dict[str, str]
    buffers: dict[str, str]
    constants: dict[str, Tensor]
    metas: dict[str, TensorMeta]
    ops: list[Op]
    outputs: Argument
    symbols: dict[str, tuple[str, int]] = field(default_factory=dict)
    training: bool = True
    in_spec: str = ""
    guards: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_name: dict[str, Op] = field(default_factory=dict, init=False, repr=False, compare=False)

    def meta(self, name: str) -> TensorMeta:
        """Meta of any tensor value of the graph."""
        if name in self.metas:
            return self.metas[name]
        output = self._op(name).output
        if not isinstance(output, TensorMeta):
            raise KeyError(f"{name} is not one tensor")
        return output

    def _op(self, name: str) -> Op:
        if len(self._by_name) != len(self.ops):
            self._by_name = {op.name: op for op in self.ops}
        return self._by_name[name]

    def users(self) -> Mapping[str, list[Op]]:
        """The operators that use each value, in order."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(op.operands()):
                found.setdefault(name, []).append(op)
        return found


def refs_in(argument: Argument) -> Iterator[str]:
    """Names of the values that a nested argument refers to, in order."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from refs_in(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from refs_in(item)
    elif isinstance(argument, Make):
        yield from refs_in(argument.fields)


# --- graphs as JSON --------------------------------------------------------------------------------------
#
# What the cache keeps between runs, and what one rank sends to the others. Nothing here is executed and
# nothing is unpickled: code that a program would print is checked on reading.


_VERSION = 1
_REMEDY = "Remove the file, or set reuse='override', to trace again."
_CODE = re.compile(r'rt\.device|torch\.[a-z]\w*|torch\.device\("[a-z]+(:\d+)?"\)')
_CONTEXT = re.compile(
    r"(torch\.no_grad\(\))?(, )?"
    r'(torch\.autocast\("[a-z]+"(, dtype=torch\.\w+)?, enabled=(True|False)\))?'
)
_EXPRESSION = re.compile(r"[\w\s+\-*/%().,<>=!]*")
_LOCATION = re.compile(r"[\w.]+:[\w.]+")
_TARGET = re.compile(r"module|getitem|\w+\.\w+\.\w+")


class GraphFormatError(UnsupportedError):
    """A stored graph cannot be read: damaged, of another version, or not a graph at all."""


def graph_to_json(graph: Graph) -> str:
    """A graph as text; equal graphs give equal texts.

    Example:
        >>> from nnx_nnscaler.trace import trace_forward
        >>> graph = trace_forward(torch.nn.Linear(2, 2), (torch.zeros(3, 2),))
        >>> graph_from_json(graph_to_json(graph)) == graph
        True
    """
    return json.dumps(
        {
            "version": _VERSION,
            "inputs": [
                [leaf.name, _meta_out(leaf.meta), _out(_plain(leaf.constant))] for leaf in graph.inputs
            ],
            "parameters": graph.parameters,
            "buffers": graph.buffers,
            "constants": {name: _tensor_out(tensor) for name, tensor in graph.constants.items()},
            "metas": {name: _meta_out(meta) for name, meta in graph.metas.items()},
            "ops": [_op_out(op) for op in graph.ops],
            "outputs": _out(graph.outputs),
            "symbols": {name: list(origin) for name, origin in graph.symbols.items()},
            "training": graph.training,
            "in_spec": graph.in_spec,
            "guards": list(graph.guards),
            "kept": graph.kept,
            "notes": list(graph.notes),
        },
        indent=None,
        separators=(",", ":"),
    )


def graph_from_json(text: str) -> Graph:
    """The graph that `graph_to_json` wrote.

    Raises:
        GraphFormatError: The text is no graph, of another version, or holds what no trace makes.
    """
    try:
        found = json.loads(text)
        version = found["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise GraphFormatError(f"the stored graph cannot be read: {error!r}.", remedy=_REMEDY) from error
    if version != _VERSION:
        raise GraphFormatError(
            f"the stored graph has version {version}, expected {_VERSION}.", remedy=_REMEDY
        )
    try:
        return _graph_in(found)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise GraphFormatError(f"the stored graph is damaged: {error!r}.", remedy=_REMEDY) from error


def _graph_in(found: dict[str, Any]) -> Graph:
    return Graph(
        inputs=[
            Input(_name(name), _meta_in(meta), _unplain(_in(value))) for name, meta, value in found["inputs"]
        ],
        parameters={_name(name): str(fqn) for name, fqn in found["parameters"].items()},
        buffers={_name(name): str(fqn) for name, fqn in found["buffers"].items()},
        constants={_name(name): _tensor_in(tensor) for name, tensor in found["constants"].items()},
        metas={_name(name): _known(_meta_in(meta)) for name, meta in found["metas"].items()},
        ops=[_op_in(op) for op in found["ops"]],
        outputs=_in(found["outputs"]),
        symbols={_name(name): (_name(source), int(dim)) for name, (source, dim) in found["symbols"].items()},
        training=bool(found["training"]),
        in_spec=str(found["in_spec"]),
        guards=tuple(_checked(_EXPRESSION, guard) for guard in found["guards"]),
        kept={str(fqn): str(reason) for fqn, reason in found["kept"].items()},
        notes=tuple(str(note) for note in found["notes"]),
    )


# Operators.


def _op_out(op: Op) -> list[Any]:
    output = [_meta_out(meta) for meta in op.output] if isinstance(op.output, tuple) else _meta_out(op.output)
    return [op.name, op.target, _out(op.args), _out(op.kwargs), output, op.module, op.source, op.context]


def _op_in(found: list[Any]) -> Op:
    name, target, args, kwargs, output, module, source, context = found
    several = isinstance(output, list)
    return Op(
        name=_name(name),
        target=_checked(_TARGET, target),
        args=_in(args),
        kwargs=_in(kwargs),
        output=tuple(_meta_in(meta) for meta in output) if several else _meta_in(output),
        module=str(module),
        source=str(source),
        context=_checked(_CONTEXT, context),
    )


def _meta_out(meta: TensorMeta | None) -> Any:
    return None if meta is None else {"meta": [_out(list(meta.shape)), meta.dtype, meta.differentiable]}


def _meta_in(found: Any) -> TensorMeta | None:
    if found is None:
        return None
    shape, dtype, differentiable = found["meta"]
    return TensorMeta(tuple(_in(shape)), _checked(re.compile(r"\w+"), dtype), bool(differentiable))


def _known(meta: TensorMeta | None) -> TensorMeta:
    if meta is None:
        raise ValueError("a value without shape")
    return meta


def _tensor_out(tensor: Tensor) -> list[Any]:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch."), base64.b64encode(content).decode()]


def _tensor_in(found: list[Any]) -> Tensor:
    shape, dtype, content = found
    kind = getattr(torch, dtype)
    data = bytearray(base64.b64decode(content, validate=True))
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(shape)


# Arguments.


def _plain(value: Any) -> Any:
    """A constant among the inputs as an argument."""
    if isinstance(value, (torch.dtype, torch.device)):
        return Code(f'torch.device("{value}")' if isinstance(value, torch.device) else str(value))
    if isinstance(value, slice):
        return Make("builtins:slice", {"all": [value.start, value.stop, value.step]})
    return Make("builtins:Ellipsis", {}) if value is Ellipsis else value


def _unplain(value: Any) -> Any:
    if isinstance(value, Code):
        name = value.text.removeprefix("torch.")
        device = re.fullmatch(r'device\("(.+)"\)', name)
        return torch.device(device[1]) if device else getattr(torch, name)
    if isinstance(value, Make):
        return slice(*value.fields["all"]) if value.fields else Ellipsis
    return value


def _out(value: Argument) -> Any:
    if isinstance(value, (tuple, dict, Ref, Size, Code, Make, complex)):
        return _tagged(value)
    if isinstance(value, list):
        return [_out(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise GraphFormatError(f"a graph with a {type(value).__name__} among its arguments cannot be stored.")


def _tagged(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {"tuple": [_out(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_out(key), _out(item)] for key, item in value.items()]}
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, Size):
        return {"size": [value.expr, value.hint]}
    if isinstance(value, Code):
        return {"code": value.text}
    return (
        {"make": [value.type, _out(value.fields)]}
        if isinstance(value, Make)
        else {"complex": [value.real, value.imag]}
    )


def _in(found: Any) -> Argument:
    if isinstance(found, list):
        return [_in(item) for item in found]
    if not isinstance(found, dict):
        return found
    ((tag, content),) = found.items()
    if tag == "tuple":
        return tuple(_in(item) for item in content)
    if tag == "dict":
        return {_in(key): _in(item) for key, item in content}
    return _scalar_in(tag, content)


def _scalar_in(tag: str, content: Any) -> Argument:
    made: dict[str, Callable[[], Argument]] = {
        "ref": lambda: Ref(_name(content)),
        "size": lambda: Size(_checked(_EXPRESSION, content[0]), content[1]),
        "code": lambda: Code(_checked(_CODE, content)),
        "make": lambda: Make(_checked(_LOCATION, content[0]), _in(content[1])),
        "float": lambda: float(content),
        "complex": lambda: complex(*content),
    }
    return made[tag]()


def _name(found: Any) -> str:
    if not isinstance(found, str) or not found.isidentifier():
        raise ValueError(f"{found!r} is no name")
    return found


def _checked(pattern: re.Pattern[str], found: Any) -> str:
    if not isinstance(found, str) or not pattern.fullmatch(found):
        raise ValueError(f"{found!r} is not what a trace writes")
    return found
