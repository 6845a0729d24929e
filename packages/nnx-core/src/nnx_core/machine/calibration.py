"""Measure the machine: computation, copies, updates, and collectives on the actual group.

Measurements call the same code as training: operators through autograd, collectives through a `Communicator`,
copies from pinned memory. `nnx_core.machine.hardware` defines each figure and its clock. Small operations
alternate with computation, as in training: a collective on cold caches and threads takes several times longer
than in a loop of its own. Results are cached on disk, one file per machine, and all ranks use rank zero's. A
damaged file is measured again.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nnx_base.ranks import all_gather_object
from nnx_core.communicator import Communicator, GroupCommunicator
from nnx_core.json_files import cache_directory, read_json, write_json
from nnx_core.machine.hardware import COLLECTIVES, Collective, Hardware, MeasuredLink, link_of_json

__all__ = ["calibrated"]

_FORMAT = 5
_LONG = 0.02
"""Seconds of a collective after which no larger one is measured."""
_LONG_ENOUGH = 0.005
"""Seconds of any other measurement after which it is not made larger."""
_LAPS = 12
_LINK_SIZES = (4 * 1024, 64 * 1024, 1024 * 1024, 4 * 1024 * 1024)
"""Total bytes of measured collectives on CPUs."""
_LARGER_LINK_SIZES = (32 * 1024**2, 256 * 1024**2)
"""Further sizes for devices with fast links, where the others take hardly more than a latency."""
_COPIED = tuple(2**power for power in (18, 20, 22, 24, 26))
_SIDES = (128, 256, 512, 1024, 2048, 4096, 8192)
_UPDATED_ON_HOST, _UPDATED_ON_CARD = 2**21, 2**27
_BYTES_OF_ADAMW = 16
"""Bytes per element: weight, gradient and two moments."""


def calibrated(
    communicator: Communicator,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None,
    room: int | None = None,
    fresh: bool = False,
) -> Hardware:
    """Return the figures of this machine and of this rank's unit, equal on all ranks. Collective over both.

    Args:
        communicator: The unit's collectives.
        device: The device that the ranks compute on.
        group: All ranks, for control messages; None where there is only one.
        room: The most bytes of the device that a measurement may take; by default a quarter of the free ones.
        fresh: Measure again, even if a result is on disk.
    """
    hosts = sorted(set(all_gather_object(platform.node(), group)))
    key = _key(communicator, device, hosts, group)
    kept = all_gather_object(None if fresh else _load(key), group)[0]
    if kept is not None:
        return Hardware.of_json(kept)
    cpu_time = device.type == "cpu" and len(hosts) == 1
    clock = time.process_time if cpu_time else _wall_clock(device)
    room = min(all_gather_object(free_room(device) if room is None else room, group))
    inside, across = _measure_links(communicator, device, clock, group, room)
    ranks = communicator.size if group is None else dist.get_world_size(group)
    own = Hardware(
        name=f"{key['device']} on {len(hosts)} host{'s' * (len(hosts) > 1)}",
        origin="measured",
        inside=inside,
        across=across,
        ranks_per_node=max(ranks // len(hosts), 1),
        overlap=0.0 if device.type == "cpu" else 0.8,
        memory=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0,
        **measure_compute(device, clock, room),
        **measure_copies(device, clock, room),
    )
    shared: dict[str, Any] = all_gather_object(own.to_json(), group)[0]
    if group is None or dist.get_rank(group) == 0:
        write_json(_path(key), {"key": key, "hardware": shared})
    return Hardware.of_json(shared)


Clock = Callable[[], float]


def _wall_clock(device: torch.device) -> Clock:
    def read() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return read


def _seconds(call: Callable[[], object], clock: Clock, *, times: int, rounds: int = 3) -> float:
    """Return the seconds of a call: the smallest mean of several rounds, the least disturbed one."""
    call()
    means = []
    for _ in range(rounds):
        start = clock()
        for _ in range(times):
            call()
        means.append((clock() - start) / times)
    return max(min(means), 1e-9)


def _seconds_amid(call: Callable[[], object], work: Callable[[], object], clock: Clock) -> float:
    """Return the seconds that a call adds between two calls of work; from lower quartiles of both."""

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


def _some_work(device: torch.device) -> Callable[[], object]:
    """Return a computation of about a millisecond on a CPU."""
    matrix = torch.ones(256, 256, device=device)
    return lambda: torch.tanh(matrix @ matrix)


def free_room(device: torch.device) -> int:
    """Return the bytes that a measurement may take of a device by default: a quarter of the free memory."""
    if device.type != "cuda":
        return 2**30
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + unused) // 4


def link_sizes(kind: str, room: int) -> tuple[int, ...]:
    """Return the total bytes of measured collectives; on a GPU so many that the latency is negligible.

    Args:
        kind: The type of the device.
        room: See `calibrated`; a collective and its results take four times its bytes.

    Example:
        >>> len(link_sizes("cpu", 2**40)), len(link_sizes("cuda", 2**40)), link_sizes("cuda", 2**20)
        (4, 6, (4096, 65536))
    """
    sizes = _LINK_SIZES if kind == "cpu" else (*_LINK_SIZES, *_LARGER_LINK_SIZES)
    return (*sizes[:2], *(whole for whole in sizes[2:] if 4 * whole <= room))


def updated_elements(kind: str, room: int) -> int:
    """Return the elements of a measured fused AdamW; on a GPU so many that launches are negligible.

    Args:
        kind: The type of the device.
        room: See `calibrated`.

    Example:
        >>> updated_elements("cpu", 2**40), updated_elements("cuda", 2**40), updated_elements("cuda", 2**28)
        (2097152, 134217728, 16777216)
    """
    if kind == "cpu":
        return _UPDATED_ON_HOST
    return max(min(_UPDATED_ON_CARD, room // _BYTES_OF_ADAMW), 1)


def _measure_links(
    communicator: Communicator,
    device: torch.device,
    clock: Clock,
    group: dist.ProcessGroup | None,
    room: int,
) -> tuple[MeasuredLink, MeasuredLink]:
    """Measure the links within a node and across nodes; one kind serves for both if there is no other.

    The unit's ranks measure their own kind. For the other one, temporary groups are made: of the ranks with
    the same local rank on each node, which all send at once, or of the ranks of each node.
    """
    own = measure_link(communicator, device, clock, room)
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
                found = measure_link(GroupCommunicator(made), device, clock, room)
            dist.destroy_process_group(made)
    measured: list[Any] = [link for link in all_gather_object(found and found.to_json(), group) if link]
    other = link_of_json(measured[0]) if measured else own
    assert isinstance(other, MeasuredLink)
    return (own, other) if lies_inside else (other, own)


def measure_link(communicator: Communicator, device: torch.device, clock: Clock, room: int) -> MeasuredLink:
    """Measure every kind of collective, at every size within the time limit. Collective over the unit."""
    points = {kind: _points(communicator, device, clock, kind, room) for kind in COLLECTIVES}
    return MeasuredLink(communicator.size, {kind: _rising(found) for kind, found in points.items()})


def _points(
    communicator: Communicator, device: torch.device, clock: Clock, kind: Collective, room: int
) -> tuple[tuple[float, float], ...]:
    """Return bytes and seconds; sizes above the time limit are extrapolated."""
    points: list[tuple[float, float]] = []
    for whole in link_sizes(device.type, room):
        seconds = _collective_seconds(communicator, device, clock, kind, whole)
        points.append((float(whole), seconds))
        if seconds > _LONG and len(points) > 1:
            break
    return tuple(points)


def _rising(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """Make seconds rise with the size: a smaller collective that took longer was disturbed."""
    seconds = [min(later for _, later in points[index:]) for index in range(len(points))]
    return tuple((whole, time) for (whole, _), time in zip(points, seconds, strict=True))


def _collective_seconds(
    communicator: Communicator, device: torch.device, clock: Clock, kind: Collective, whole: int
) -> float:
    """Measure one collective on activations of three dims, split or gathered along the middle one.

    Returns:
        The mean seconds over the ranks, equal on each.
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


def measure_compute(device: torch.device, clock: Clock, room: int) -> dict[str, Any]:
    """Measure rates of computation, as fields of `Hardware`."""
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
    matmul = {str(dtype).removeprefix("torch."): _matmul_rate(device, dtype, clock, room) for dtype in dtypes}
    return {**rates, "matmul": matmul, "overhead": _overhead(device, clock), **_updates(device, clock, room)}


def _matmul_rate(device: torch.device, dtype: torch.dtype, clock: Clock, room: int) -> float:
    """Return operations per second, the best of growing sizes: other processes may disturb one."""
    best = 0.0
    for side in _SIDES:
        if best and 2 * side**2 * dtype.itemsize > room:
            break
        matrix = torch.ones(side, side, device=device, dtype=dtype)
        seconds = _seconds(lambda: matrix @ matrix, clock, times=1)  # noqa: B023
        best = max(best, 2 * side**3 / seconds)
        if seconds >= _LONG_ENOUGH:
            break
    return best


def _overhead(device: torch.device, clock: Clock) -> float:
    """Return the seconds of an operator on tiny tensors, in one direction: a mixture of common operators."""
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


def _updates(device: torch.device, clock: Clock, room: int) -> dict[str, float]:
    """Measure AdamW's seconds per parameter and per element, by default and fused."""
    host, large = torch.device("cpu"), 1024**2
    small = _seconds_amid(_adamw(device, 32, 8), _some_work(device), clock) / 32
    whole = _seconds(_adamw(device, 1, large), clock, times=2, rounds=6)
    on_host = _seconds(_adamw(host, 1, _UPDATED_ON_HOST, fused=True), clock, times=1)
    host_update = fused_update = on_host / _UPDATED_ON_HOST
    if device.type != "cpu":
        elements = updated_elements(device.type, room)
        fused = _adamw(device, 1, elements, fused=True)
        fused_update = _seconds(fused, clock, times=1) / elements
    return {
        "update_overhead": small,
        "update": max(whole - small, 1e-9) / large,
        "fused_update": fused_update,
        "host_update": host_update,
    }


def _adamw(
    device: torch.device, count: int, numel: int, *, fused: bool | None = None
) -> Callable[[], object]:
    """Return an AdamW step over some parameters."""
    parameters = [torch.nn.Parameter(torch.ones(numel, device=device)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.AdamW(parameters, fused=fused).step


def measure_copies(device: torch.device, clock: Clock, room: int) -> dict[str, Any]:
    """Measure rates of copies between CPU and device, as fields of `Hardware`."""
    rates: dict[str, float] = {}
    for nbytes in _COPIED:
        if rates and nbytes > room:
            break
        there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        seconds = {
            "to_device": _copy_seconds(there, here, clock),
            "to_host": _copy_seconds(here, there, clock),
        }
        rates = {name: nbytes / taken for name, taken in seconds.items()}
        if min(seconds.values()) >= _LONG_ENOUGH:
            break
    return rates


def _copy_seconds(target: torch.Tensor, source: torch.Tensor, clock: Clock) -> float:
    return _seconds(lambda: target.copy_(source, non_blocking=True), clock, times=1)


def _key(
    communicator: Communicator, device: torch.device, hosts: list[str], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    unit = getattr(communicator, "group", None)
    return {
        "format": _FORMAT,
        "backend": "" if unit is None else dist.get_backend(unit),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "hosts": hosts,
        "world": 1 if group is None else dist.get_world_size(group),
        "unit": communicator.size,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory("measured") / f"{digest[:24]}.json"


def _load(key: dict[str, Any]) -> dict[str, Any] | None:
    """Return an earlier measurement; None if none can be read."""
    kept = read_json(_path(key))
    try:
        hardware: dict[str, Any] = kept["hardware"]
        Hardware.of_json(hardware)
        return hardware if kept["key"] == key else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
