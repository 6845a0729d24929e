"""The text with which users say how an operator can be split: its grammar, and what it means for shapes.

Knows nothing of torch. `register_op` in `nnx_nnscaler.rules.annotation` describes the grammar to users.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Optional, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from nnx_core._torch_compat import FakeTensor, pytree
from nnx_core.errors import NnxError
from nnx_nnscaler._torch_compat import OpOverload, OpOverloadPacket
from nnx_nnscaler.ir import Graph, Op, TensorMeta, hint_of, refs_in
from nnx_nnscaler.plan.program_plan import P, Placement, R, S, Strategy
from nnx_nnscaler.rules.probe import DRAWS, Trial, draw, runner
from nnx_nnscaler.rules.registry import register_rule
from nnx_nnscaler.rules.rule import Rule, Writer, argument_of, bound, operator_of, outputs_of, with_code

_TOKEN = re.compile(r"\s*(?:(->)|(\.\.\.|\*)|([A-Za-z_]\w*|\d+)|([(),?^+])|(\S))")
_ANY = "*"
_REMEDY = "Write operands and results like 'b k+, n k+ -> b n'; the docstring of register_op has the grammar."


class AnnotationError(NnxError, ValueError):
    """An annotation of an operator cannot be read, does not fit the operator, or is wrong."""


@dataclass(frozen=True, slots=True)
class _Dim:
    """One tensor dim: the names it is composed of, the first one varying slowest; none for a number."""

    names: tuple[str, ...]
    number: int | None = None


_Tensor = tuple[_Dim, ...]


@dataclass(frozen=True, slots=True)
class Annotation:
    """A parsed annotation.

    Attributes:
        text: The text as it was written.
        operands: Dims of every argument; None for one that is no tensor.
        results: Dims of every result.
        fixed: Names that must not be split.
        summed: Names over which the operator sums, so that parts of them give partial sums.
    """

    text: str
    operands: tuple[_Tensor | None, ...]
    results: tuple[_Tensor, ...]
    fixed: frozenset[str]
    summed: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Read an annotation.

        Raises:
            AnnotationError: It does not follow the grammar, or contradicts itself; the message has the place.

        Example:
            >>> annotation = Annotation.parse("(h d^) k+, k+ n -> (h d) n")
            >>> sorted(annotation.fixed), sorted(annotation.summed)
            (['d'], ['k'])
        """
        return _Parser(text).annotation()

    def names(self) -> list[str]:
        """Every name that may be split, in order of appearance."""
        tensors = [dims for dims in (*self.operands, *self.results) if dims is not None]
        found = dict.fromkeys(name for dims in tensors for dim in dims for name in dim.names)
        return [name for name in found if name not in self.fixed]

    def expanded(self, leading: int) -> Annotation:
        """The same with ``*`` replaced by that many dims."""
        names = [f"{_ANY}{index}" for index in range(leading)]
        fixed = self.fixed | set(names) if _ANY in self.fixed else self.fixed

        def dims_of(dims: _Tensor) -> _Tensor:
            parts = [[_Dim((n,)) for n in names] if dim.names == (_ANY,) else [dim] for dim in dims]
            return tuple(dim for part in parts for dim in part)

        operands = tuple(None if dims is None else dims_of(dims) for dims in self.operands)
        return Annotation(self.text, operands, tuple(map(dims_of, self.results)), fixed, self.summed)

    def leading(self, index: int, ndim: int) -> int | None:
        """How many dims the ``*`` of an operand stands for; None if it has none."""
        dims = self.operands[index]
        if dims is None or all(dim.names != (_ANY,) for dim in dims):
            return None
        return ndim - len(dims) + 1

    def placements(
        self, name: str, sizes: Mapping[str, int]
    ) -> tuple[list[Placement], list[Placement]] | None:
        """Of operands and results where a name is split; None where no placement says that.

        Args:
            name: The name.
            sizes: The sizes of names that are known.
        """
        operands = [self._cut(dims, name, sizes) for dims in self.operands]
        results = [self._cut(dims, name, sizes) for dims in self.results]
        if any(len(cuts) > 1 for cuts in (*operands, *results)):
            return None
        whole = P if name in self.summed else R
        return [(cuts or [R])[0] for cuts in operands], [(cuts or [whole])[0] for cuts in results]

    def _cut(self, dims: _Tensor | None, name: str, sizes: Mapping[str, int]) -> list[Placement]:
        """The shard of one tensor; none if it has no such dim, several if it cannot be cut there."""
        found: list[Placement] = []
        for index, dim in enumerate(dims or ()):
            if name not in dim.names:
                continue
            before = dim.names[: dim.names.index(name)]
            shard = S(index, groups=prod(sizes.get(n, 1) for n in before))
            is_one = dim.names.count(name) == 1 and all(n in sizes for n in before)
            found += [shard] if is_one else [shard, shard]
        return found


class _Parser:
    """Reads one annotation from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.at = 0
        self.marks: dict[str, tuple[str, int]] = {}
        self.places: dict[str, int] = {}

    def annotation(self) -> Annotation:
        """All of it."""
        operands = self.tensors(until="->")
        if self.token != "->":
            raise self.error("expected '->'")
        self.at += 1
        results = self.tensors(until="")
        if self.token:
            raise self.error(f"did not expect {self.token!r}")
        made = [dims for dims in results if dims is not None]
        marked = {mark: frozenset(n for n, (m, _) in self.marks.items() if m == mark) for mark in "^+"}
        found = Annotation(self.text, tuple(operands), tuple(made), marked["^"], marked["+"])
        self.check(found)
        return found

    def tensors(self, until: str) -> list[_Tensor | None]:
        """Operands or results, up to a token."""
        found: list[_Tensor | None] = []
        while True:
            if self.token == "?" and not until:
                raise self.error("a result cannot be '?'")
            found.append(self.tensor())
            if self.token != ",":
                break
            self.at += 1
        return [] if found == [()] and until == "->" else found

    def tensor(self) -> _Tensor | None:
        """One operand or result."""
        if self.token == "?":
            self.at += 1
            return None
        dims: list[_Dim] = []
        while self.token and self.token not in (",", "->"):
            dims.append(self.dim())
        if sum(dim.names == (_ANY,) for dim in dims) > 1:
            raise self.error("'*' stands twice in one tensor")
        return () if dims == [_Dim((), 1)] and len(dims) == 1 else tuple(dims)

    def dim(self) -> _Dim:
        """One dim with its mark."""
        if self.token != "(":
            return self.single()
        self.at += 1
        names: list[str] = []
        while self.token not in (")", ""):
            inner = self.single()
            if inner.number is not None or inner.names == (_ANY,):
                raise self.error("parentheses hold names only", back=1)
            names.extend(inner.names)
        if not names or not self.token:
            raise self.error("expected a name and ')'")
        self.at += 1
        self.mark(names)
        return _Dim(tuple(names))

    def single(self) -> _Dim:
        """A name, a number or ``*``, with its mark."""
        token = "*" if self.token == "..." else self.token
        if not token or not re.fullmatch(r"\w+|\*", token):
            raise self.error(f"expected the name of a dim, found {token or 'the end'!r}")
        self.places.setdefault(token, self.at)
        self.at += 1
        if token.isdigit():
            if self.token == "^":
                self.at += 1
            return _Dim((), int(token))
        self.mark([token])
        return _Dim((token,))

    def mark(self, names: Sequence[str]) -> None:
        """A mark that follows these names."""
        if self.token not in ("^", "+"):
            return
        for name in names:
            known, _ = self.marks.setdefault(name, (self.token, self.at))
            if known != self.token:
                raise self.error(f"{name!r} is marked {known!r} before")
        self.at += 1

    def check(self, found: Annotation) -> None:
        """Whether marks and names agree."""
        used = {n for dims in found.operands for dim in dims or () for n in dim.names}
        made = [{n for dim in dims for n in dim.names} for dims in found.results]
        for name in dict.fromkeys([*self.places]):
            if name.isdigit() or name in found.fixed:
                continue
            in_results = [name in names for names in made]
            problem = ""
            if name in found.summed and any(in_results):
                problem = "is marked '+', as summed over, and still is in a result"
            elif name not in used:
                problem = "is in a result but in no operand; a new dim is marked '^'"
            elif name not in found.summed and not all(in_results):
                problem = "is not in every result; mark it '+' if the operator sums over it, else '^'"
            if problem:
                raise self.error(f"{name!r} {problem}", at=self.places[name])

    @property
    def token(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def error(self, problem: str, *, at: int | None = None, back: int = 0) -> AnnotationError:
        """The problem with its place."""
        index = self.at - back if at is None else at
        place = self.tokens[index][1] if index < len(self.tokens) else len(self.text)
        return AnnotationError(f"annotation {self.text!r}, character {place + 1}: {problem}.", remedy=_REMEDY)


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    for match in _TOKEN.finditer(text):
        token = match[match.lastindex or 0]
        place = match.start(match.lastindex or 0)
        if match[5]:
            raise AnnotationError(
                f"annotation {text!r}, character {place + 1}: {token!r} has no meaning.", remedy=_REMEDY
            )
        yield token, place


# --- annotated rule --------------------------------------------------------------------------------------
#
# The strategies that an annotation says, and the trial that each of them passes before it is used.


_MOST_ELEMENTS = 2**20
_RULE_REMEDY = (
    "Correct the annotation: mark dims that the operator mixes with '^', dims that it sums over with '+'."
)
_logger = logging.getLogger("nnx.nnscaler")


def arguments_of(target: str) -> list[str]:
    """Names of the arguments of a torch operator, in order."""
    return [argument.name for argument in operator_of(target)._schema.arguments]


class AnnotatedRule(Rule):
    """How one annotated operator can be split.

    Args:
        annotation: The annotation by its author.
    """

    def __init__(self, annotation: Annotation) -> None:
        self.annotation = annotation
        self._tried: dict[str, list[Strategy]] = {}

    def strategies(self, op: Op, graph: Graph, size: int) -> list[Strategy]:  # noqa: D102
        metas = [graph.meta(name) for name in op.operands()]
        key = repr((list(bound(op).items()), metas, outputs_of(op), size))
        if key not in self._tried:
            found = self._proposed(op, graph, size)
            self._try(op, metas, found, size)
            self._tried[key] = found
        return self._tried[key]

    def write(self, op: Op, strategy: Strategy, writer: Writer) -> str:  # noqa: D102
        return writer.call(self._local(op, strategy, writer.size))

    def _local(self, op: Op, strategy: Strategy, size: int) -> Op:
        """The call as each rank makes it: an argument that is the size of the split dim is that of a part."""
        given = bound(op).get(strategy.name)
        return with_code(op, **{strategy.name: str(given // size)}) if type(given) is int else op

    def _proposed(self, op: Op, graph: Graph, size: int) -> list[Strategy]:
        """A strategy for every name that can be split evenly and as one placement."""
        tensors = _tensors(op, graph, len(self.annotation.operands))
        annotation = _without_leading(self.annotation, tensors)
        sizes = _sizes(annotation, op, tensors)
        names = arguments_of(op.target)
        found = []
        for name in annotation.names():
            placements = annotation.placements(name, sizes)
            if placements is None or name not in sizes or sizes[name] % size:
                continue
            of_arguments = dict(zip(names, placements[0], strict=False))
            inputs = [of_arguments.get(n, R) for n, value in bound(op).items() for _ in refs_in(value)]
            found.append(Strategy(name, tuple(inputs), tuple(placements[1])))
        return found

    def _try(self, op: Op, metas: Sequence[TensorMeta], strategies: Sequence[Strategy], size: int) -> None:
        """Run what is proposed on made-up data.

        Raises:
            AnnotationError: A strategy gives something else than the whole operator.
        """
        run = runner(op)
        if run is None or not strategies:
            return
        if sum(math.prod(meta.hints) for meta in metas) > _MOST_ELEMENTS:
            _logger.warning("%s is too large here to be tried; its annotation is taken on trust.", op.target)
            return
        for seed, kind in enumerate(DRAWS):
            trial = _trial(op, metas, kind, seed)
            if trial is None:
                return
            for strategy in strategies:
                local = runner(self._local(op, strategy, size)) or run
                if problem := trial.disagreement(local, strategy, size):
                    raise AnnotationError(
                        f"annotation {self.annotation.text!r} of {op.target} is wrong: with "
                        f"{strategy.name!r} split, {problem}{_at(op)}.",
                        remedy=_RULE_REMEDY,
                    )


def _trial(op: Op, metas: Sequence[TensorMeta], kind: str, seed: int) -> Trial | None:
    """The whole operator on made-up data, in float64 if its kernel takes that; None if it runs on none."""
    run = runner(op)
    bound_of_indices = min((extent for meta in metas for extent in meta.hints if extent > 1), default=1)
    for wide in (True, False):
        generator = torch.Generator().manual_seed(seed)
        operands = [draw(m.hints, getattr(torch, m.dtype), kind, bound_of_indices, generator) for m in metas]
        if not wide:
            operands = [t.to(getattr(torch, m.dtype)) for t, m in zip(operands, metas, strict=True)]
        try:
            return None if run is None else Trial.of(run, operands, generator)
        except Exception as error:  # a kernel of somebody's own may raise anything
            problem = error
    _logger.warning(
        "%s cannot be tried on made-up data here (%s); its annotation is taken on trust.", op.target, problem
    )
    return None


_Tensors = list[tuple[str, list[TensorMeta]]]


def _tensors(op: Op, graph: Graph, count: int) -> _Tensors:
    """Name and tensors of each argument that the annotation lists."""
    given = bound(op)
    names = arguments_of(op.target)[:count]
    return [(name, [graph.meta(ref) for ref in refs_in(given.get(name))]) for name in names]


def _without_leading(annotation: Annotation, tensors: _Tensors) -> Annotation:
    """The annotation with ``*`` replaced by the dims that it stands for in the operands."""
    for index, (_, metas) in enumerate(tensors):
        for meta in metas:
            count = annotation.leading(index, len(meta.shape))
            if count is not None:
                return annotation.expanded(max(count, 0))
    return annotation.expanded(0)


def _sizes(annotation: Annotation, op: Op, tensors: _Tensors) -> dict[str, int]:
    """The size of every name for the traced sample.

    Raises:
        AnnotationError: The operands or results have other dims than the annotation says.
    """
    found = {
        name: value
        for name in annotation.names() + sorted(annotation.fixed)
        if name in arguments_of(op.target) and type(value := argument_of(op, name)) is int
    }
    listed = list(zip(annotation.operands, tensors, strict=False))
    pairs = [(dims, meta, f"argument {name!r}") for dims, (name, metas) in listed for meta in metas]
    results = outputs_of(op)
    if len(results) != len(annotation.results):
        raise _mismatch(annotation, op, f"it makes {len(results)} results")
    pairs += [(d, m, f"result {i}") for i, (d, m) in enumerate(zip(annotation.results, results, strict=True))]
    for _ in range(2):  # the second time with what other tensors told
        for dims, meta, where in pairs:
            _note_sizes(found, annotation, op, dims, meta, where)
    return found


def _note_sizes(
    found: dict[str, int], annotation: Annotation, op: Op, dims: Any, meta: TensorMeta, where: str
) -> None:
    if dims is None:
        raise _mismatch(annotation, op, f"{where} is a tensor where the annotation has '?'")
    if len(dims) != len(meta.shape) and not (dims == () and meta.hints == (1,)):
        raise _mismatch(annotation, op, f"{where} has shape {list(meta.hints)}")
    for dim, extent in zip(dims, meta.shape, strict=False):
        size = hint_of(extent)
        unknown = [name for name in dim.names if name not in found]
        known = math.prod(found[name] for name in dim.names if name in found)
        expected = size if unknown else (known if dim.number is None else dim.number)
        if size != expected or size % known:
            raise _mismatch(annotation, op, f"{where} has shape {list(meta.hints)}")
        # A composed dim whose first part depends on the batch has no fixed number of groups.
        if len(unknown) == 1 and (len(dim.names) == 1 or isinstance(extent, int)):
            found[unknown[0]] = size // known


def _at(op: Op) -> str:
    return f" ({op.source})" if op.source else ""


def _mismatch(annotation: Annotation, op: Op, problem: str) -> AnnotationError:
    return AnnotationError(
        f"annotation {annotation.text!r} does not fit {op.target}: {problem}{_at(op)}.",
        remedy="Correct the annotation, or the call.",
    )


# --- annotations -----------------------------------------------------------------------------------------
#
# `register_op`: users' own operators, and the placements in which they can run.
#
# Owns how an annotated function becomes one operator of the graph, and that an annotation is tried before it
# is believed. The grammar itself is in `nnx_nnscaler.rules.annotation`.


_NAMESPACE = "nnx_user"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_defined_names: set[str] = set()
_OPTIONAL_TENSOR = Optional[Tensor]  # noqa: UP045 # what torch's schemas are inferred from
_Registered = TypeVar("_Registered")


def register_op(
    annotation: str, *, fake: Callable[..., Any] | None = None
) -> Callable[[_Registered], _Registered]:
    """Tell how a function of yours, or an operator that exists, can be split over ranks.

    A decorated function becomes one operator of traced models, so its body may hold what cannot be traced;
    its gradient is its body's, its attribute `operator` the torch operator. Arguments that are no tensors
    need a type annotation or a default. It must return new tensors and leave its operands alone. ::

        @register_op("n c h^ w^, c, c -> n c h^ w^")
        def scaled(x, scale, shift, eps: float = 1e-5): ...

    An existing operator is given by its name or as what `torch.ops` and `torch.library.custom_op` return::

        register_op("b n, n -> b n")("mylib::gate")

    An annotation lists the operands, ``->``, and the results. Each is a list of dims, separated by blanks:

    ===========  ==========================================================================================
    ``name``     a dim. The same name has the same size everywhere. Each name that has no mark can be split:
                 ranks compute parts of the result from parts of the operands that have the name. Names of
                 operands are in every result, then.
    ``name^``    a dim that must not be split.
    ``name+``    a dim that is summed over, in no result: parts of it give summands of the results.
    ``(a b)``    one dim composed of several, of which the last one varies fastest. Their sizes follow from
                 other operands, or from the argument of the same name, which is given as its part where
                 the name is split.
    ``*``        any number of dims, the same number everywhere; also written ``...``. ``*^`` cannot be split.
    ``8``        a dim of that size, which is not split. ``1`` alone is also a tensor without dims.
    ``?``        an argument that is no tensor. What follows the last one listed need not be listed.
    ===========  ==========================================================================================

    A mark holds for its name everywhere. The annotation is tried on made-up data when the operator is first
    planned; one that gives other results, or other gradients, than the whole operator is refused.

    Args:
        annotation: Says how it can be split.
        fake: Makes results of the right shape from tensors without data, for a body that reads values.

    Raises:
        AnnotationError: The annotation cannot be read, or does not fit the function's arguments.

    Example:
        >>> @register_op("b k+, n k+ -> b n")
        ... def project(x, weight):
        ...     return x @ weight.T
        >>> project(torch.ones(2, 3), torch.ones(4, 3)).shape
        torch.Size([2, 4])
    """
    parsed = Annotation.parse(annotation)

    def register(function: _Registered) -> _Registered:
        if inspect.isfunction(function):
            return cast(_Registered, _operator_from(function, parsed, fake))
        for target in _targets(function):
            _check_arguments(parsed, target)
            register_rule(target, AnnotatedRule(parsed))
        return function

    return register


def _operator_from(function: Any, annotation: Annotation, fake: Callable[..., Any] | None) -> Any:
    """The function as a new operator, which runs the function and is differentiated through it."""
    schema = _schema(function, annotation)
    name = _new_name(function)

    @functools.wraps(function)
    def body(*args: Any, **kwargs: Any) -> Any:
        if fake is not None and any(
            isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))
        ):
            return fake(*args, **kwargs)
        return function(*args, **kwargs)

    _library.define(f"{name}{schema}")  # type: ignore[no-untyped-call]
    # A composite: tracing keeps it as one operator, and autograd looks through it.
    _library.impl(name, body, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    target = f"{_NAMESPACE}.{name}.default"
    register_rule(target, AnnotatedRule(annotation))
    operator = operator_of(target)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    call.operator = operator  # type: ignore[attr-defined]
    return call


def _new_name(function: Any) -> str:
    """A name that is the same on every rank; a second function of one name gets a number."""
    wish = re.sub(r"\W+", "_", f"{function.__module__}_{function.__qualname__}".replace("<locals>", ""))
    name, count = wish, 1
    while name in _defined_names:
        count += 1
        name = f"{wish}_{count}"
    _defined_names.add(name)
    return name


def _schema(function: Any, annotation: Annotation) -> str:
    """The operator's schema, from the function's signature and which arguments are tensors."""
    signature = inspect.signature(function)
    hints = get_type_hints(function)
    parameters = []
    if len(annotation.operands) > len(signature.parameters):
        raise _arity(annotation, function.__qualname__, list(signature.parameters))
    listed = [*annotation.operands, *(None,) * (len(signature.parameters) - len(annotation.operands))]
    for dims, parameter in zip(listed, signature.parameters.values(), strict=True):
        kind = _kind(parameter, hints, annotation, function, is_tensor=dims is not None)
        parameters.append(parameter.replace(annotation=kind))
    results = len(annotation.results)
    made = Tensor if results == 1 else tuple[(Tensor,) * results]  # type: ignore[misc]

    def prototype() -> None:
        """Carries the signature."""

    prototype.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=made
    )
    try:
        return str(torch.library.infer_schema(prototype, mutates_args=()))
    except ValueError as error:
        raise AnnotationError(
            f"{function.__qualname__} cannot become an operator: {error}.",
            remedy="Give every argument a plain type: a tensor, int, float, bool, str, or a list of numbers.",
        ) from error


def _kind(
    parameter: inspect.Parameter,
    hints: dict[str, Any],
    annotation: Annotation,
    function: Any,
    *,
    is_tensor: bool,
) -> Any:
    """The type of one argument in the operator's schema."""
    if is_tensor:
        return _OPTIONAL_TENSOR if parameter.default is None else Tensor
    has_default = parameter.default not in (None, inspect.Parameter.empty)
    kind = hints.get(parameter.name, type(parameter.default) if has_default else None)
    if kind in (Tensor, _OPTIONAL_TENSOR):
        raise AnnotationError(
            f"annotation {annotation.text!r} has no dims for argument {parameter.name!r} of "
            f"{function.__qualname__}, a tensor.",
            remedy="List its dims.",
        )
    if kind is None:
        raise AnnotationError(
            f"the type of argument {parameter.name!r} of {function.__qualname__} is not known.",
            remedy=f"Annotate it in the function's signature, as in '{parameter.name}: int', or give it one.",
        )
    return kind


def _targets(given: Any) -> list[str]:
    """Names of the operators that were meant, one for each overload."""
    operator = given
    if isinstance(given, str):
        operator = torch.ops
        for part in given.replace("::", ".").split("."):
            operator = getattr(operator, part, None)
    operator = getattr(operator, "_opoverload", operator)  # of what torch.library.custom_op returns
    if isinstance(operator, OpOverload):
        operators = [operator]
    elif isinstance(operator, OpOverloadPacket):
        operators = [getattr(operator, overload) for overload in _overloads(operator)]
    else:
        raise AnnotationError(
            f"{given!r} is neither a function nor a torch operator.",
            remedy="Give a function, a name such as 'mylib::gate', or what torch.ops or torch.library gives.",
        )
    return [f"{o.namespace}.{o._schema.name.partition('::')[2]}.{o._overloadname}" for o in operators]


def _overloads(packet: Any) -> list[str]:
    return list(packet.overloads())


def _check_arguments(annotation: Annotation, target: str) -> None:
    """Whether tensors are where the annotation says, as far as an operator's schema tells."""
    arguments = operator_of(target)._schema.arguments
    if len(annotation.operands) > len(arguments):
        raise _arity(annotation, target, arguments_of(target))
    for dims, argument in zip(annotation.operands, arguments, strict=False):
        if ("Tensor" in str(argument.type)) != (dims is not None):
            found = "a tensor" if dims is None else f"of type {argument.type}, no tensor"
            raise AnnotationError(
                f"annotation {annotation.text!r} does not fit {target}: argument {argument.name!r} "
                f"is {found}.",
                remedy="Write '?' for arguments that are no tensors, and dims for those that are.",
            )


def _arity(annotation: Annotation, what: str, names: list[str]) -> AnnotationError:
    return AnnotationError(
        f"annotation {annotation.text!r} lists {len(annotation.operands)} operands, but {what} takes "
        f"{len(names)}: {', '.join(names)}.",
        remedy="List one operand for each argument, in order; '?' for one that is no tensor.",
    )
