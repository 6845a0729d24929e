"""Measuring the machine: rates of computation, and every collective at several sizes on the actual group.

What is measured is what programs call: operators through autograd, collectives through the unit's
communicator, copies included. On CPUs that share one host the clock is CPU time, since there waiting costs
nothing that another rank could not use; everywhere else it is wall time. Small things are called in turns
with computation, as programs call them: a collective that finds caches and threads cold takes several times
what it takes in a loop of its own. Results are kept on disk, and all ranks use rank 0's.
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

from nnx.cache import cache_directory, read_json, write_json
from nnx.collective import all_gather_object
from nnx_nnscaler.cost.hardware import COLLECTIVES, Collective, Hardware, MeasuredLink
from nnx_nnscaler.runtime.communicator import Communicator

__all__ = ["calibrated", "measure_compute", "measure_link"]

_FORMAT = 3
_LAPS = 12
_SIZES = (4 * 1024, 64 * 1024, 1024 * 1024, 4 * 1024 * 1024)
"""Whole bytes at which collectives are measured."""


def calibrated(
    communicator: Communicator, device: torch.device, *, group: dist.ProcessGroup | None, fresh: bool = False
) -> Hardware:
    """Figures of this machine and of this rank's unit, the same on all ranks. Collective over both.

    Args:
        communicator: The unit's collectives.
        device: What the ranks compute on.
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
    link = measure_link(communicator, device, clock)
    compute = measure_compute(device, clock)
    ranks = communicator.size if group is None else dist.get_world_size(group)
    own = Hardware(
        name=f"{key['device']} on {len(hosts)} host{'s' * (len(hosts) > 1)}",
        origin="measured",
        inside=link,
        across=link,
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


def measure_link(communicator: Communicator, device: torch.device, clock: Clock) -> MeasuredLink:
    """Every kind of collective at every size. Collective over the unit."""
    points = {
        kind: tuple(
            (float(whole), _collective_seconds(communicator, device, clock, kind, whole)) for whole in _SIZES
        )
        for kind in COLLECTIVES
    }
    return MeasuredLink(communicator.size, {kind: _rising(found) for kind, found in points.items()})


def _rising(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """No collective is dearer for being smaller: where it seems so, something disturbed the measurement."""
    seconds = [min(later for _, later in points[index:]) for index in range(len(points))]
    return tuple((whole, time) for (whole, _), time in zip(points, seconds, strict=True))


def _collective_seconds(
    communicator: Communicator, device: torch.device, clock: Clock, kind: Collective, whole: int
) -> float:
    """One collective on activations: whole bytes of three dims, split or gathered along the middle one."""
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
    return _seconds_amid(calls[kind], _some_work(device), clock)


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
