"""Parse the annotations of operators, without torch.

The docstring of `nnx_nnscaler.rules.register_op.register_op` describes the grammar to users.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from nnx_core.errors import NnxError
from nnx_nnscaler.ir.placement import P, Placement, R, S

_TOKEN = re.compile(r"\s*(?:(->)|(\.\.\.|\*)|([A-Za-z_]\w*|\d+)|([(),?^+])|(\S))")
_ANY = "*"
_REMEDY = "Write operands and results like 'b k+, n k+ -> b n'; the docstring of register_op has the grammar."


class AnnotationError(NnxError, ValueError):
    """An annotation of an operator cannot be parsed, does not fit the operator, or is wrong."""


@dataclass(frozen=True, slots=True)
class _Dim:
    """One tensor dim: the names that compose it, the slowest first; none for a number."""

    names: tuple[str, ...]
    number: int | None = None


_Tensor = tuple[_Dim, ...]


@dataclass(frozen=True, slots=True)
class Annotation:
    """A parsed annotation.

    Attributes:
        text: The original text.
        operands: The dims of every argument; None for one that is no tensor.
        results: The dims of every result.
        fixed: The names that must not be split.
        summed: The names that the operator sums over, so that shards of them give partial sums.
    """

    text: str
    operands: tuple[_Tensor | None, ...]
    results: tuple[_Tensor, ...]
    fixed: frozenset[str]
    summed: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Parse an annotation.

        Raises:
            AnnotationError: The text violates the grammar or contradicts itself; the message has the
                position.

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
        """Return the annotation with ``*`` replaced by that many dims."""
        names = [f"{_ANY}{index}" for index in range(leading)]
        fixed = self.fixed | set(names) if _ANY in self.fixed else self.fixed

        def dims_of(dims: _Tensor) -> _Tensor:
            parts = [[_Dim((n,)) for n in names] if dim.names == (_ANY,) else [dim] for dim in dims]
            return tuple(dim for part in parts for dim in part)

        operands = tuple(None if dims is None else dims_of(dims) for dims in self.operands)
        return Annotation(self.text, operands, tuple(map(dims_of, self.results)), fixed, self.summed)

    def leading(self, index: int, ndim: int) -> int | None:
        """Return the number of dims behind the ``*`` of an operand; None if it has none."""
        dims = self.operands[index]
        if dims is None or all(dim.names != (_ANY,) for dim in dims):
            return None
        return ndim - len(dims) + 1

    def placements(
        self, name: str, sizes: Mapping[str, int]
    ) -> tuple[list[Placement], list[Placement]] | None:
        """Return the placements of operands and results if a name is split; None if there are none.

        Args:
            name: The name to split.
            sizes: The known sizes of names.
        """
        operands = [self._cut(dims, name, sizes) for dims in self.operands]
        results = [self._cut(dims, name, sizes) for dims in self.results]
        if any(len(cuts) > 1 for cuts in (*operands, *results)):
            return None
        whole = P if name in self.summed else R
        return [(cuts or [R])[0] for cuts in operands], [(cuts or [whole])[0] for cuts in results]

    def _cut(self, dims: _Tensor | None, name: str, sizes: Mapping[str, int]) -> list[Placement]:
        """Return the shard of one tensor: none without such a dim, several if it cannot be split there."""
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
    """Parses one annotation from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.at = 0
        self.marks: dict[str, tuple[str, int]] = {}
        self.places: dict[str, int] = {}

    def annotation(self) -> Annotation:
        """Parse the complete annotation."""
        operands = self.tensors(until="->")
        if self.token != "->":
            raise self.error("expected '->'")
        self.at += 1
        results = self.tensors(until="")
        if self.token:
            raise self.error(f"unexpected {self.token!r}")
        made = [dims for dims in results if dims is not None]
        marked = {mark: frozenset(n for n, (m, _) in self.marks.items() if m == mark) for mark in "^+"}
        found = Annotation(self.text, tuple(operands), tuple(made), marked["^"], marked["+"])
        self.check(found)
        return found

    def tensors(self, until: str) -> list[_Tensor | None]:
        """Parse operands or results, up to a token."""
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
        """Parse one operand or result."""
        if self.token == "?":
            self.at += 1
            return None
        dims: list[_Dim] = []
        while self.token and self.token not in (",", "->"):
            dims.append(self.dim())
        if sum(dim.names == (_ANY,) for dim in dims) > 1:
            raise self.error("'*' appears twice in one tensor")
        return () if dims == [_Dim((), 1)] and len(dims) == 1 else tuple(dims)

    def dim(self) -> _Dim:
        """Parse one dim with its mark."""
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
        """Parse a name, a number or ``*``, with its mark."""
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
        """Parse the mark after these names."""
        if self.token not in ("^", "+"):
            return
        for name in names:
            known, _ = self.marks.setdefault(name, (self.token, self.at))
            if known != self.token:
                raise self.error(f"{name!r} has the mark {known!r} before")
        self.at += 1

    def check(self, found: Annotation) -> None:
        """Check that marks and names agree."""
        used = {n for dims in found.operands for dim in dims or () for n in dim.names}
        made = [{n for dim in dims for n in dim.names} for dims in found.results]
        for name in dict.fromkeys([*self.places]):
            if name.isdigit() or name in found.fixed:
                continue
            in_results = [name in names for names in made]
            problem = ""
            if name in found.summed and any(in_results):
                problem = "has the mark '+' of a summed dim, but is in a result"
            elif name not in used:
                problem = "is in a result but in no operand; mark a new dim '^'"
            elif name not in found.summed and not all(in_results):
                problem = "is not in every result; mark it '+' if the operator sums over it, else '^'"
            if problem:
                raise self.error(f"{name!r} {problem}", at=self.places[name])

    @property
    def token(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def error(self, problem: str, *, at: int | None = None, back: int = 0) -> AnnotationError:
        """Return the error with its position."""
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
