"""The graph of a traced forward: `trace` makes it, `rules` and `plan` annotate it, `codegen` prints it.

It is data: operators in order of execution, with fully qualified module names, source lines and shapes. Sizes
that depend on the batch are expressions in named symbols, so there are no operators on integers. It holds no
tensors except small constants that the traced code made itself.
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
        expr: A Python expression in the graph's symbols, such as ``"B"`` or ``"16*B"``.
        hint: The value for the traced sample.
    """

    expr: str
    hint: int


Dim = int | Size


def hint_of(dim: Dim) -> int:
    """Return the value of a dim for the traced sample."""
    return dim if isinstance(dim, int) else dim.hint


def text_of(dim: Dim) -> str:
    """Return a dim as Python code over the graph's symbols."""
    return str(dim) if isinstance(dim, int) else dim.expr


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference by name to an input, a parameter, a buffer, a constant or an operator."""

    name: str


@dataclass(frozen=True, slots=True)
class Code:
    """An argument that is printed verbatim: ``torch.float32``, ``torch.contiguous_format``, ``rt.device``."""

    text: str


@dataclass(frozen=True, slots=True)
class Make:
    """An object that is no list, tuple or dict: a dataclass, a named tuple, a `ModelOutput`.

    Attributes:
        type: The path of its class, ``"package.module:Class"``.
        fields: The keyword arguments of the class; nested Arguments.
    """

    type: str
    fields: dict[str, Any]


Argument = Any
"""Ref, Code, Size, int, float (inf and nan too), complex, bool, str or None, or a (nested) list, tuple or
dict of them. Outputs and arguments of replicated submodules may also contain Make."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The global shape and the dtype of a value.

    Attributes:
        shape: The dims.
        dtype: The name of the torch dtype, such as ``"float32"``.
        differentiable: True if autograd follows it: it is floating point and depends on a tensor that may
            require gradients.
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
        name: A Python identifier of its (first) result. Operators with target ``"getitem"`` and args
            ``(Ref, index)`` follow an operator with several results.
        target: The name of a torch operator such as ``"aten.linear.default"``, or ``"getitem"``, or
            ``"module"``: a submodule in eager mode with args of its forward; `module` names it.
        args: The positional arguments.
        kwargs: The keyword arguments.
        output: The result: one meta, or a tuple of metas for several results (None for a non-tensor).
        module: The fully qualified name of the innermost calling submodule; ``""`` is the root.
        source: The user's line that calls it: ``"file.py:12: x = self.proj(y)"``.
        context: The context manager that the user's code runs it in, as Python code:
            ``'torch.autocast("cpu", enabled=False)'``. Almost always empty.
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
        """The names of its tensor arguments in order, also those within lists; one entry for each use."""
        return list(refs_in((self.args, self.kwargs)))


@dataclass(slots=True)
class Input:
    """One leaf among the forward's arguments.

    Attributes:
        name: A Python identifier.
        meta: The shape and dtype; None for a leaf that is no tensor.
        constant: The traced value of a leaf that is no tensor; every call must repeat it.
    """

    name: str
    meta: TensorMeta | None
    constant: Any = None


@dataclass(slots=True)
class Graph:
    """A traced forward.

    Attributes:
        inputs: The leaves of ``(args, kwargs)`` in pytree order.
        parameters: The fully qualified name by value name; tied names appear once, under the first.
        buffers: The fully qualified name by value name.
        constants: The tensor by value name.
        metas: The meta of every parameter, buffer, constant and tensor input, by value name.
        ops: The operators in order of execution. In-place operators on buffers keep their place and meaning.
        outputs: The forward's result as a nested structure of Refs, Sizes, Makes and constants.
        symbols: The input name and dim behind each symbol.
        training: True if the root was in training mode.
        in_spec: The structure of ``(args, kwargs)``, as written by `torch.utils._pytree.treespec_dumps`.
        derived: Cached results that were computed from the graph; never saved.
        guards: The conditions on the symbols that the code asked for, as Python expressions (``"B <= 64"``);
            empty for nearly every model. The trace always assumes that every symbol is at least 2, and that
            all inputs with a symbol agree on it.
        kept: The reason for each submodule in eager mode (`Op.target` ``"module"``), with the source line, by
            fully qualified name.
        notes: Further notes for the user, each to be logged once.
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
        """Return the meta of a tensor value of the graph."""
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
        """Return the operators that use each value, in order."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(op.operands()):
                found.setdefault(name, []).append(op)
        return found


def refs_in(argument: Argument) -> Iterator[str]:
    """Yield the names of the values that a nested argument refers to, in order."""
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
