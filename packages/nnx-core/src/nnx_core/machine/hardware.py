"""Describe machines: rates of computation, copies and updates, and links between the ranks.

This module owns the figures, their conversion to seconds, and published profiles; the measurements are in
`nnx_core.machine.calibration`. Engines and planners read the same figures, which `Hardware` defines. The
*whole* bytes of a collective are the bytes of the unsharded tensor: the input of `all_reduce` and
`reduce_scatter`, the output of `all_gather`, and the inputs of all ranks for `all_to_all`.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nnx_core.errors import OptionError

__all__ = ["PROFILES", "Collective", "Hardware", "Link", "MeasuredLink", "profile"]


Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def sent_share(kind: Collective, ranks: int) -> float:
    """Return the fraction of the whole bytes that each rank sends, in the best algorithm."""
    share = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share / ranks,
    }[kind]


@dataclass(frozen=True, slots=True)
class Link:
    """A link with two figures.

    Attributes:
        latency: Seconds of one hop.
        bandwidth: Bytes per second of a rank.

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
        return hops * self.latency + sent_share(kind, ranks) * whole / self.bandwidth

    def throughput(self, kind: Collective, ranks: int) -> float:
        """Seconds for one more byte of a long stream, in which latencies do not count."""
        return sent_share(kind, ranks) / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        """Itself as JSON."""
        return {"latency": self.latency, "bandwidth": self.bandwidth}


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link whose collectives were measured, each at several sizes.

    Attributes:
        ranks: The number of ranks in the measurement.
        points: For each kind, whole bytes and seconds, in ascending order. Values between them are
            interpolated; values beyond the last one are extrapolated by `throughput`. Other numbers of ranks
            are scaled by the bytes that a rank sends.
    """

    ranks: int
    points: Mapping[str, tuple[tuple[float, float], ...]]

    def seconds(self, kind: Collective, whole: float, ranks: int) -> float:
        """Time of one collective over some ranks."""
        if ranks == 1:
            return 0.0
        return _interpolated(
            self.points[kind], whole * sent_share(kind, ranks) / sent_share(kind, self.ranks)
        )

    def throughput(self, kind: Collective, ranks: int) -> float:
        """Seconds for one more byte of a long stream, in which latencies do not count."""
        if ranks == 1:
            return 0.0
        return _slope(self.points[kind]) * sent_share(kind, ranks) / sent_share(kind, self.ranks)

    def to_json(self) -> dict[str, Any]:
        """Itself as JSON."""
        return {"ranks": self.ranks, "points": {k: [list(p) for p in v] for k, v in self.points.items()}}


def _interpolated(points: tuple[tuple[float, float], ...], at: float) -> float:
    if at <= points[0][0]:
        return points[0][1]
    if at > points[-1][0]:
        return points[-1][1] + _slope(points) * (at - points[-1][0])
    right = bisect_left(points, (at, -math.inf))
    (less, earlier), (more, later) = points[right - 1], points[right]
    return earlier + (later - earlier) * (at - less) / (more - less)


def _slope(points: tuple[tuple[float, float], ...]) -> float:
    """Return the seconds per byte beyond the last point: the steepest line to it from another point.

    A disturbed measurement can make neighbours equal, which would mean infinite bandwidth.
    """
    *others, (more, later) = points
    return max((later - earlier) / (more - less) for less, earlier in others) or later / more


def link_of_json(data: Mapping[str, Any]) -> Link | MeasuredLink:
    """Make a link from the result of `to_json`."""
    if "latency" in data:
        return Link(float(data["latency"]), float(data["bandwidth"]))
    points = {kind: tuple((float(b), float(s)) for b, s in rows) for kind, rows in data["points"].items()}
    return MeasuredLink(int(data["ranks"]), points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Figures of one kind of machine, for one rank.

    All seconds are of one clock: CPU time if the ranks compute on the CPUs of one host, where other ranks use
    the time of a wait, and wall time otherwise.

    Attributes:
        name: The name in plans.
        origin: ``measured`` on this machine, or ``published``.
        matmul: Floating-point operations in a second of a large matrix product, by dtype.
        bandwidth: Bytes that an elementwise operator reads and writes in a second.
        special: Elements in a second of an elementwise operator that is not memory-bound (gelu, exp, tanh).
        random: Random numbers drawn in a second.
        overhead: Seconds of any operator in one direction, however small.
        update: Seconds in which AdamW, as torch runs it by default, updates one element on the device.
        update_overhead: Seconds in which it updates a parameter, however small.
        fused_update: Seconds for an element of torch's fused AdamW on the device.
        host_update: Seconds for an element of torch's fused AdamW in host memory.
        to_device: Bytes in a second of a copy from host memory, pinned where that helps, to the device.
        to_host: Bytes in a second of a copy from the device to such memory.
        inside: Link between the ranks of one node.
        across: Link between ranks of several nodes.
        ranks_per_node: The number of ranks that share the inner link.
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
    fused_update: float
    host_update: float
    to_device: float
    to_host: float
    inside: Link | MeasuredLink
    across: Link | MeasuredLink
    ranks_per_node: int
    overlap: float = 0.0
    memory: int = 0

    def flops(self, dtype: str) -> float:
        """Return the rate of matrix products in a dtype; of float32 for an unknown dtype."""
        return self.matmul.get(dtype, self.matmul["float32"])

    def link(self, ranks: int, *, stride: int = 1) -> Link | MeasuredLink:
        """Return the link of a group of ranks with a stride."""
        return self.inside if ranks * stride <= self.ranks_per_node else self.across

    def to_json(self) -> dict[str, Any]:
        """Itself as JSON."""
        return {
            **{name: getattr(self, name) for name in (*_RATES, *_OTHERS)},
            "matmul": dict(self.matmul),
            "inside": self.inside.to_json(),
            "across": self.across.to_json(),
        }

    @property
    def digest(self) -> str:
        """A short hash of the figures."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Hardware:
        """Make hardware from the result of `to_json`.

        Raises:
            KeyError: A figure is missing.
            TypeError: A figure is no number.
            ValueError: A rate is not between 0 and infinity.
        """
        matmul = {str(dtype): float(rate) for dtype, rate in data["matmul"].items()}
        rates: dict[str, Any] = {name: float(data[name]) for name in _RATES}
        if not all(0 < rate < math.inf for rate in (*rates.values(), *matmul.values())):
            raise ValueError(f"no rates: {rates}, {matmul}")
        return cls(
            **rates,
            **{name: data[name] for name in _OTHERS},
            matmul=matmul,
            inside=link_of_json(data["inside"]),
            across=link_of_json(data["across"]),
        )


_RATES = (
    "bandwidth", "special", "random", "overhead", "update", "update_overhead", "fused_update", "host_update",
    "to_device", "to_host",
)  # fmt: skip
_OTHERS = ("name", "origin", "ranks_per_node", "overlap", "memory")


# Figures of machines that are not here, as their makers publish them. Nothing in this file was measured.
#
# They serve to plan for a mesh without having it; on the machine itself `nnx_core.machine.calibration`
# measures. Matrix products are counted at 60 % of the dense peak, memory at 85 %, links and the bus at 80 %
# of one direction.


_GIB = 1024**3
_NVLINK_LATENCY = 4e-6
_NETWORK_LATENCY = 1.2e-5
_UPDATE = 80
"""Bytes that AdamW reads and writes per element, with one pass over all parameters per operation."""
_FUSED_UPDATE = 28
"""Bytes that fused AdamW reads and writes per element, in a single pass."""
_HOST_UPDATE = 1e-9
"""A rank's share of a server with eight of them: 28 GB/s."""


def _gpu(
    name: str,
    *,
    half: float,
    tf32: float,
    memory: float,
    capacity: int,
    inside: float,
    across: float,
    bus: float,
) -> Hardware:
    """A node of eight GPUs; rates in T(FL)OP/s and TB/s, links and the bus in GB/s each way and GPU."""
    return Hardware(
        name=name,
        origin="published",
        matmul={"bfloat16": 0.6e12 * half, "float16": 0.6e12 * half, "float32": 0.6e12 * tf32},
        bandwidth=0.85e12 * memory,
        special=0.85e12 * memory / 12,
        random=0.85e12 * memory / 12,
        overhead=6e-6,
        update=_UPDATE / (0.85e12 * memory),
        update_overhead=1e-6,
        fused_update=_FUSED_UPDATE / (0.85e12 * memory),
        host_update=_HOST_UPDATE,
        to_device=0.8e9 * bus,
        to_host=0.8e9 * bus,
        inside=Link(_NVLINK_LATENCY, 0.8e9 * inside),
        across=Link(_NETWORK_LATENCY, 0.8e9 * across),
        ranks_per_node=8,
        overlap=0.8,
        memory=capacity * _GIB,
    )


PROFILES: dict[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        # NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16, 494 tf32, 3.35 TB/s, 80 GB; NVLink 4: 450 GB/s each
        # way; one 400 Gb/s InfiniBand adapter for each GPU; PCIe 5 x16: 64 GB/s each way.
        _gpu("h100-nvlink", half=989, tf32=494, memory=3.35, capacity=80, inside=450, across=50, bus=64),
        # The same GPUs where only the network connects them (one GPU in a node, or no NVLink).
        _gpu("h100-ib", half=989, tf32=494, memory=3.35, capacity=80, inside=50, across=50, bus=64),
        # NVIDIA H200 SXM data sheet: as H100 with 4.8 TB/s and 141 GB.
        _gpu("h200-nvlink", half=989, tf32=494, memory=4.8, capacity=141, inside=450, across=50, bus=64),
        # NVIDIA A100 SXM data sheet: 312 TFLOP/s bf16, 156 tf32, 2.0 TB/s, 80 GB; NVLink 3: 300 GB/s each
        # way; one 200 Gb/s adapter for each GPU; PCIe 4 x16: 32 GB/s each way.
        _gpu("a100-nvlink", half=312, tf32=156, memory=2.0, capacity=80, inside=300, across=25, bus=32),
        # A server's core with its share of memory bandwidth, over loopback: when nothing could be measured.
        Hardware(
            name="cpu",
            origin="published",
            matmul={"float32": 6e10, "float64": 3e10, "bfloat16": 2e10, "float16": 1e10},
            bandwidth=8e9,
            special=3e8,
            random=1.5e8,
            overhead=2e-5,
            update=_UPDATE / 2e10,
            update_overhead=2e-5,
            fused_update=_FUSED_UPDATE / 2e10,
            host_update=_FUSED_UPDATE / 2e10,
            to_device=4e9,
            to_host=4e9,
            inside=Link(1.5e-4, 1.2e9),
            across=Link(3e-4, 1e9),
            ranks_per_node=64,
        ),
    )
}
"""Built-in profiles by name."""


def profile(name: str) -> Hardware:
    """A built-in profile.

    Raises:
        OptionError: There is none of that name.
    """
    if name not in PROFILES:
        raise OptionError(
            f"there is no hardware profile {name!r}.",
            remedy=f"Use one of {', '.join(sorted(PROFILES))}, or a Hardware of your own.",
        )
    return PROFILES[name]
