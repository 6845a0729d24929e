"""What the cost model knows of the machines: rates of computation, and links between the ranks.

It owns the figures and how they become seconds; it neither measures them (`calibration`) nor knows operators.
The *whole* bytes of a collective are those of the tensor that all ranks hold together: of what `all_reduce`
sums, what `all_gather` makes, what `reduce_scatter` takes, and what `all_to_all` moves of all ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from nnx_checkpoint.collective import all_gather_object
from nnx_core.cache import cache_directory, read_json, write_json
from nnx_core.errors import OptionError
from nnx_nnscaler.runtime.collectives import Communicator, GroupCommunicator

__all__ = [
    "Collective",
    "Hardware",
    "Link",
    "MeasuredLink",
    "PROFILES",
    "calibrated",
    "link_of_json",
    "measure_compute",
    "measure_link",
    "profile",
]


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
            line, beyond the last one it goes on as `throughput` says. Other numbers of ranks are scaled by
            what a rank sends.
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
        return _slope(self.points[kind]) * _volume(kind, ranks) / _volume(kind, self.ranks)

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
    """Seconds for one more byte beyond the last point: the steepest line that leads there from another.

    A measurement that was disturbed can make neighbours equal, which would be a link of infinite bandwidth.
    """
    *others, (more, later) = points
    return max((later - earlier) / (more - less) for less, earlier in others) or later / more


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
        name: The name of it in plans.
        origin: Says whether the figures were measured here or are published ones.
        matmul: Floating-point operations in a second of a large matrix product, by dtype.
        bandwidth: Bytes that an elementwise operator reads and writes in a second.
        special: Elements in a second of an elementwise operator that is not memory-bound (gelu, exp, tanh).
        random: Random numbers drawn in a second.
        overhead: Seconds of any operator in one direction, however small.
        update: Seconds in which an optimizer with two states for each parameter updates one element.
        update_overhead: Seconds in which it updates a parameter, however small.
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

    @property
    def digest(self) -> str:
        """A short text that is another one for other figures."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

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


# --- calibration -----------------------------------------------------------------------------------------
#
# Measuring the machine: rates of computation, and every collective at several sizes on the actual group.
#
# What is measured is what programs call: operators through autograd, collectives through the unit's
# communicator, copies included. On CPUs that share one host the clock is CPU time, since there waiting costs
# nothing that another rank could not use; everywhere else it is wall time. Small things are called in turns
# with computation, as programs call them: a collective that finds caches and threads cold takes several
# times what it takes in a loop of its own. Results are kept on disk, and all ranks use rank 0's.


_FORMAT = 4
_LONG = 0.02
"""Seconds of a collective after which none that is larger is measured."""
_LAPS = 12
_SIZES = (4 * 1024, 64 * 1024, 1024 * 1024, 4 * 1024 * 1024)
"""Whole bytes at which collectives are measured on CPUs."""
_LARGER_SIZES = (32 * 1024**2, 256 * 1024**2)
"""Further ones for devices with fast links, where the others take hardly more than a latency."""


def calibrated(
    communicator: Communicator, device: torch.device, *, group: dist.ProcessGroup | None, fresh: bool = False
) -> Hardware:
    """Figures of this machine and of this rank's unit, the same on all ranks. Collective over both.

    Args:
        communicator: The unit's collectives.
        device: The device that the ranks compute on.
        group: All ranks, for control messages; None where there is only one.
        fresh: Measure anew, whatever is kept on disk.
    """
    hosts = sorted(set(all_gather_object(platform.node(), group)))
    cpu_time = device.type == "cpu" and len(hosts) == 1
    key = _key(communicator, device, hosts, group)
    kept = all_gather_object(None if fresh else _load(key), group)[0]
    if kept is not None:
        return Hardware.of_json(kept)
    clock = _cpu_clock if cpu_time else _wall_clock(device)
    inside, across = _measure_links(communicator, device, clock, group)
    compute = measure_compute(device, clock)
    ranks = communicator.size if group is None else dist.get_world_size(group)
    own = Hardware(
        name=f"{key['device']} on {len(hosts)} host{'s' * (len(hosts) > 1)}",
        origin="measured",
        inside=inside,
        across=across,
        ranks_per_node=max(ranks // len(hosts), 1),
        overlap=0.0 if device.type == "cpu" else 0.8,
        memory=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
        **compute,
    )
    shared: dict[str, Any] = all_gather_object(own.to_json(), group)[0]
    if group is None or dist.get_rank(group) == 0:
        write_json(_path(key), {"key": key, "hardware": shared})
    return Hardware.of_json(shared)


# --- measuring --------------------------------------------------------------------------------------

Clock = Callable[[], float]


def _cpu_clock() -> float:
    return time.process_time()


def _wall_clock(device: torch.device) -> Clock:
    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def _seconds(call: Callable[[], object], clock: Clock, *, times: int, rounds: int = 3) -> float:
    """Seconds of one call: the least mean of some rounds, which other processes disturbed least."""
    call()
    means = []
    for _ in range(rounds):
        start = clock()
        for _ in range(times):
            call()
        means.append((clock() - start) / times)
    return max(min(means), 1e-9)


def _measure_links(
    communicator: Communicator, device: torch.device, clock: Clock, group: dist.ProcessGroup | None
) -> tuple[MeasuredLink, MeasuredLink]:
    """The links within a node and across nodes; where there is one kind only, it stands for both.

    The unit's ranks measure the one that they have. For the other, groups are made for the time being: of the
    ranks with the same place on each node, which then send all at once, or of the ranks of each node.
    """
    own = measure_link(communicator, device, clock)
    hosts = all_gather_object(platform.node(), group)
    if len(set(hosts)) == 1:
        return own, own
    rank = dist.get_rank(group)
    unit = (
        [rank]
        if communicator.size == 1
        else dist.get_process_group_ranks(getattr(communicator, "group", None))
    )
    lies_inside = all(all_gather_object(len({hosts[member] for member in unit}) == 1, group))
    nodes = [[rank for rank, host in enumerate(hosts) if host == one] for one in sorted(set(hosts))]
    others = [list(ranks) for ranks in zip(*nodes, strict=False)] if lies_inside else nodes
    groups = [(ranks, dist.new_group(ranks)) for ranks in others]
    found: MeasuredLink | None = None
    for ranks, made in groups:
        if rank in ranks:
            if len(ranks) > 1:
                found = measure_link(GroupCommunicator(made), device, clock)
            dist.destroy_process_group(made)
    told = [data for data in all_gather_object(found.to_json() if found else None, group) if data is not None]
    other = link_of_json(told[0]) if told else own
    assert isinstance(other, MeasuredLink)
    return (own, other) if lies_inside else (other, own)


def measure_link(communicator: Communicator, device: torch.device, clock: Clock) -> MeasuredLink:
    """Every kind of collective at every size that does not take too long. Collective over the unit."""
    points = {kind: _points(communicator, device, clock, kind) for kind in COLLECTIVES}
    return MeasuredLink(communicator.size, {kind: _rising(found) for kind, found in points.items()})


def _points(
    communicator: Communicator, device: torch.device, clock: Clock, kind: Collective
) -> tuple[tuple[float, float], ...]:
    """Bytes and seconds; what is larger than a slow link carries in time follows from the slope."""
    points: list[tuple[float, float]] = []
    for whole in _SIZES if device.type == "cpu" else (*_SIZES, *_LARGER_SIZES):
        seconds = _collective_seconds(communicator, device, clock, kind, whole)
        points.append((float(whole), seconds))
        if seconds > _LONG and len(points) > 1:
            break
    return tuple(points)


def _rising(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """No collective is dearer for being smaller: where it seems so, something disturbed the measurement."""
    seconds = [min(later for _, later in points[index:]) for index in range(len(points))]
    return tuple((whole, time) for (whole, _), time in zip(points, seconds, strict=True))


def _collective_seconds(
    communicator: Communicator, device: torch.device, clock: Clock, kind: Collective, whole: int
) -> float:
    """One collective on activations: whole bytes of three dims, split or gathered along the middle one.

    Returns:
        The mean over the ranks, which is the same on each.
    """
    size = communicator.size
    width = -(-64 // size) * size  # which every number of ranks divides
    rows = max(whole // 4 // width // (2 * size), 1) * size
    full = torch.ones(2, rows, width, device=device)
    part = torch.ones(2, rows // size, width, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: communicator.all_reduce(full),
        "all_gather": lambda: communicator.all_gather(part, 1),
        "reduce_scatter": lambda: communicator.reduce_scatter(full, 1),
        "all_to_all": lambda: communicator.all_to_all(part, 2, 1),
    }
    seconds = torch.tensor([_seconds_amid(calls[kind], _some_work(device), clock)], device=device)
    return communicator.all_reduce(seconds).item() / size


def _some_work(device: torch.device) -> Callable[[], object]:
    """Computation that takes a CPU about a millisecond."""
    matrix = torch.ones(256, 256, device=device)
    return lambda: torch.tanh(matrix @ matrix)


def _seconds_amid(call: Callable[[], object], work: Callable[[], object], clock: Clock) -> float:
    """Seconds that a call adds to work that it stands between; lower quartiles of both."""

    def laps(*calls: Callable[[], object]) -> float:
        taken = []
        for _ in range(_LAPS):
            start = clock()
            for one in calls:
                one()
            taken.append(clock() - start)
        return sorted(taken)[_LAPS // 4]

    call()
    work()
    return max(laps(call, work) - laps(work), 1e-9)


def measure_compute(device: torch.device, clock: Clock) -> dict[str, Any]:
    """Rates of computation, as fields of `Hardware`."""
    generator = torch.Generator(device).manual_seed(0)
    million = torch.ones(1024, 1024, device=device)
    small = million[:256].contiguous()
    rates = {
        "bandwidth": 3 * million.nbytes / _seconds(lambda: million + million, clock, times=4),
        "special": small.numel() / _seconds(lambda: torch.nn.functional.gelu(small), clock, times=4),
        "random": small.numel()
        / _seconds(lambda: torch.empty_like(small).bernoulli_(0.5, generator=generator), clock, times=4),
    }
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    matmul = {str(dtype).removeprefix("torch."): _matmul_rate(device, dtype, clock) for dtype in dtypes}
    return {**rates, "matmul": matmul, "overhead": _overhead(device, clock), **_update(device, clock)}


def _matmul_rate(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    side = 4096 if device.type != "cpu" else 384 if dtype.itemsize > 2 else 128
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    return 2 * side**3 / _seconds(lambda: matrix @ matrix, clock, times=2)


def _overhead(device: torch.device, clock: Clock) -> float:
    """Seconds of an operator on next to nothing, in one direction: a mixture of what layers consist of."""
    functional, layers = torch.nn.functional, 8
    start = torch.ones(2, 8, device=device, requires_grad=True)
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    bias = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        value = start
        for _ in range(layers):
            hidden = functional.linear(functional.layer_norm(value, (8,), bias, bias), weight, bias)
            value = value + functional.gelu(hidden)
        torch.autograd.backward(value.sum())

    with torch.enable_grad():
        return _seconds_amid(chain, _some_work(device), clock) / (8 * layers + 2)


def _update(device: torch.device, clock: Clock) -> dict[str, float]:
    """What AdamW takes for a parameter, and for each element of it."""

    def step_of(count: int, *shape: int) -> Callable[[], object]:
        parameters = [torch.nn.Parameter(torch.ones(shape, device=device)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return torch.optim.AdamW(parameters).step

    small = _seconds_amid(step_of(32, 8), _some_work(device), clock) / 32
    large = _seconds(step_of(1, 1024, 1024), clock, times=2, rounds=6)
    return {"update_overhead": small, "update": max(large - small, 1e-9) / 1024**2}


# --- keeping ----------------------------------------------------------------------------------------


def _key(
    communicator: Communicator, device: torch.device, hosts: list[str], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    unit = getattr(communicator, "group", None)
    return {
        "format": _FORMAT,
        "backend": "threads" if unit is None else dist.get_backend(unit),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "hosts": hosts,
        "world": 1 if group is None else dist.get_world_size(group),
        "unit": communicator.size,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory("nnscaler", "measured") / f"{digest[:24]}.json"


def _load(key: dict[str, Any]) -> dict[str, Any] | None:
    """What was measured before; None if nothing was kept that can be read."""
    kept = read_json(_path(key))
    try:
        hardware: dict[str, Any] = kept["hardware"]
        Hardware.of_json(hardware)
        return hardware if kept["key"] == key else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


# --- profiles --------------------------------------------------------------------------------------------
#
# Figures of machines that are not here, as their makers publish them. Nothing in this file was measured.
#
# They serve to plan for a mesh without having it; on the machine itself `calibration` measures.
# Matrix products are counted at 60 % of the dense peak, memory at 85 %, links at 80 % of one direction.


_GIB = 1024**3
_NVLINK_LATENCY = 4e-6
_NETWORK_LATENCY = 1.2e-5
_UPDATE = 80
"""Bytes that AdamW reads and writes for each element, a pass of all parameters for each of its steps."""


def _gpu(
    name: str, *, half: float, tf32: float, memory: float, capacity: int, inside: float, across: float
) -> Hardware:
    """A node of eight GPUs; rates in T(FL)OP/s and TB/s, links in GB/s each way and GPU."""
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
        # way; one 400 Gb/s InfiniBand adapter for each GPU.
        _gpu("h100-nvlink", half=989, tf32=494, memory=3.35, capacity=80, inside=450, across=50),
        # The same GPUs where only the network connects them (one GPU in a node, or no NVLink).
        _gpu("h100-ib", half=989, tf32=494, memory=3.35, capacity=80, inside=50, across=50),
        # NVIDIA H200 SXM data sheet: as H100 with 4.8 TB/s and 141 GB.
        _gpu("h200-nvlink", half=989, tf32=494, memory=4.8, capacity=141, inside=450, across=50),
        # NVIDIA A100 SXM data sheet: 312 TFLOP/s bf16, 156 tf32, 2.0 TB/s, 80 GB; NVLink 3: 300 GB/s each
        # way; one 200 Gb/s adapter for each GPU.
        _gpu("a100-nvlink", half=312, tf32=156, memory=2.0, capacity=80, inside=300, across=25),
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
