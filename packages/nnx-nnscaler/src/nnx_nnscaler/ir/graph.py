"""The graph between the parts: what `trace` produces, `rules` and `plan` annotate, `codegen` prints.

It is data: operators in order of execution, with fully qualified module names, source lines and shapes.
Sizes that depend on the batch are expressions in named symbols, so there are no operators on integers.
Tensors do not live here, except small constants that the traced code made itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


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
