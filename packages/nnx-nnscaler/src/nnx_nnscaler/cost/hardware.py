"""What the cost model knows of the machines: rates of computation, and links between the ranks.

It owns the figures and how they become seconds; it neither measures them (`calibration`) nor knows operators.
The *whole* bytes of a collective are those of the tensor that all ranks hold together: of what `all_reduce`
sums, what `all_gather` makes, what `reduce_scatter` takes, and what `all_to_all` moves of all ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Collective", "Hardware", "Link", "MeasuredLink", "link_of_json"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def _volume(kind: Collective, ranks: int) -> float:
    """Share of the whole bytes that each rank sends, in the best algorithm."""
    share = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share / ranks,
    }[kind]


@dataclass(frozen=True, slots=True)
class Link:
    """A link that is described by two figures.

    Attributes:
        latency: Seconds of one hop.
        bandwidth: Bytes that a rank sends in a second.

    Example:
        >>> Link(latency=1e-5, bandwidth=1e9).seconds("all_gather", 2_000_000, 2)
        0.00101
    """

    latency: float
    bandwidth: float

    def seconds(self, kind: Collective, whole: float, ranks: int) -> float:
        """Time of one collective over some ranks."""
        if ranks == 1:
            return 0.0
        hops = math.log2(ranks) * (2 if kind == "all_reduce" else 1)
        return hops * self.latency + _volume(kind, ranks) * whole / self.bandwidth

    def throughput(self, kind: Collective, ranks: int) -> float:
        """Seconds for one more byte of a long stream, in which latencies do not count."""
        return _volume(kind, ranks) / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        """Itself as JSON."""
        return {"latency": self.latency, "bandwidth": self.bandwidth}


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link whose collectives were measured, each at several sizes.

    Attributes:
        ranks: Ranks that took part in the measurement.
        points: For each kind, whole bytes and seconds, in ascending order. Between them it is a straight
            line, beyond the last one the last slope goes on. Other numbers of ranks are scaled by what a
            rank sends.
    """

    ranks: int
    points: Mapping[str, tuple[tuple[float, float], ...]]

    def seconds(self, kind: Collective, whole: float, ranks: int) -> float:
        """Time of one collective over some ranks."""
        if ranks == 1:
            return 0.0
        return _interpolated(self.points[kind], whole * _volume(kind, ranks) / _volume(kind, self.ranks))

    def throughput(self, kind: Collective, ranks: int) -> float:
        """Seconds for one more byte of a long stream, in which latencies do not count."""
        if ranks == 1:
            return 0.0
        (less, earlier), (more, later) = self.points[kind][-2:]
        return max(later - earlier, 0.0) / (more - less) * _volume(kind, ranks) / _volume(kind, self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Itself as JSON."""
        return {"ranks": self.ranks, "points": {k: [list(p) for p in v] for k, v in self.points.items()}}


def _interpolated(points: tuple[tuple[float, float], ...], at: float) -> float:
    if at <= points[0][0]:
        return points[0][1]
    right = min(bisect_left(points, (at, -math.inf)), len(points) - 1)
    (less, earlier), (more, later) = points[right - 1], points[right]
    return max(earlier + (later - earlier) * (at - less) / (more - less), 0.0)


def link_of_json(data: Mapping[str, Any]) -> Link | MeasuredLink:
    """The link that `to_json` wrote."""
    if "latency" in data:
        return Link(float(data["latency"]), float(data["bandwidth"]))
    points = {kind: tuple((float(b), float(s)) for b, s in rows) for kind, rows in data["points"].items()}
    return MeasuredLink(int(data["ranks"]), points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Figures of one kind of machine.

    Attributes:
        name: What it is called in plans.
        origin: Whether the figures were measured here or are published ones.
        matmul: Floating-point operations in a second of a large matrix product, by dtype.
        bandwidth: Bytes that an elementwise operator reads and writes in a second.
        special: Elements in a second of an elementwise operator that is not memory-bound (gelu, exp, tanh).
        random: Random numbers drawn in a second.
        overhead: Seconds of any operator in one direction, however small.
        update: Seconds in which an optimizer with two states for each parameter updates one element.
        update_overhead: Seconds in which it updates a parameter, however small.
        inside: Link between the ranks of one node.
        across: Link between ranks of several nodes.
        ranks_per_node: How many ranks share the inner link.
        overlap: Share of the gradient reduction that hides behind the backward pass.
        memory: Bytes of memory for each rank; 0 if unknown.
    """

    name: str
    origin: Literal["measured", "published"]
    matmul: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float
    special: float
    random: float
    overhead: float
    update: float
    update_overhead: float
    inside: Link | MeasuredLink
    across: Link | MeasuredLink
    ranks_per_node: int
    overlap: float = 0.0
    memory: int = 0

    def flops(self, dtype: str) -> float:
        """Rate of matrix products in a dtype; of float32 where that dtype is not known."""
        return self.matmul.get(dtype, self.matmul["float32"])

    def link(self, ranks: int, *, stride: int = 1) -> Link | MeasuredLink:
        """The link that a group uses whose ranks are that far apart."""
        return self.inside if ranks * stride <= self.ranks_per_node else self.across

    def to_json(self) -> dict[str, Any]:
        """Itself as JSON."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "matmul": dict(self.matmul),
            "inside": self.inside.to_json(),
            "across": self.across.to_json(),
        }

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Hardware:
        """The hardware that `to_json` wrote."""
        return cls(
            **{name: data[name] for name in _PLAIN},
            matmul={str(dtype): float(rate) for dtype, rate in data["matmul"].items()},
            inside=link_of_json(data["inside"]),
            across=link_of_json(data["across"]),
        )


_PLAIN = (
    "name", "origin", "bandwidth", "special", "random", "overhead", "update", "update_overhead",
    "ranks_per_node", "overlap", "memory",
)  # fmt: skip
