"""Write graphs as JSON, for the store and for the other ranks, and read them.

Reading executes and unpickles nothing: code that a program would print is checked.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nnx_base.dtypes import as_bytes
from nnx_core.errors import UnsupportedError
from nnx_nnscaler.ir.graph import Argument, Code, Graph, Input, Make, Op, Ref, Size, TensorMeta

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
    """A stored graph cannot be read: it is damaged, of another version, or no graph."""


def graph_to_json(graph: Graph) -> str:
    """Return a graph as text; equal graphs give equal texts.

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
    """Return the graph of a text by `graph_to_json`.

    Raises:
        GraphFormatError: The text is no graph, of another version, or has content that no trace makes.
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
    content = as_bytes(tensor.cpu()).numpy().tobytes()
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
    """Return a constant among the inputs as an argument."""
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
        raise ValueError(f"{found!r} is no content of a trace")
    return found
