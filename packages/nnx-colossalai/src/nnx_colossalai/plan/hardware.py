"""What a rank may use and how fast it is: budgets from options or the machine, rates measured once and kept.

Measuring takes about a second; what was measured is kept for the machine, in JSON under the user's cache
directory. A broken file is measured anew, a directory that cannot be written is done without. All ranks of
a world use rank 0's rates and the smallest of their budgets, so that they make the same plan.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nnx_checkpoint.collective import all_gather_object, control_group
from nnx_colossalai.device.device import Device, HostDevice, host_memory
from nnx_colossalai.plan.spec import Hardware
from nnx_core.cache import cache_directory, read_json, write_json

_FORMAT = 2
_MIB = 2**20
_LEAST_BYTES, _MOST_BYTES = _MIB // 4, 64 * _MIB
_LONG_ENOUGH = 0.01
"""Seconds from which on a measurement need not be made larger."""
_STEPPED_ON_HOST, _STEPPED_ON_CARD = 2**21, 2**27
_BYTES_OF_ADAMW = 16
"""Of an element: weight, gradient and two moments."""
_GATHERED_ON_HOST, _GATHERED_ON_CARD = 4 * _MIB, 256 * _MIB
_SIDES = (256, 512, 1024, 2048, 4096, 8192)
_HOST_SHARE = 0.9
_CGROUP = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a rank is; per second.

    Attributes:
        to_device: Bytes from host to device.
        to_host: Bytes from device to host.
        host_step: Elements that fused AdamW updates in host memory.
        device_step: The same on the device.
        collective: Bytes that a rank sends in an all-gather.
        flops: Floating point operations of matrix products.
    """

    to_device: float = 20e9
    to_host: float = 20e9
    host_step: float = 1e9
    device_step: float = 50e9
    collective: float = 20e9
    flops: float = 100e12

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Rates:
        """Rates from a file.

        Raises:
            ValueError: One of them is missing or is no rate.
        """
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ValueError(f"fields {sorted(values)}")
        rates = {name: float(value) for name, value in values.items()}
        if not all(0 < rate < math.inf for rate in rates.values()):
            raise ValueError(f"rates {rates}")
        return cls(**rates)


def hardware(
    device: Device[Any],
    *,
    host_bytes: int | None = None,
    local_world_size: int = 1,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    rates: Rates | None = None,
) -> tuple[Hardware, Rates]:
    """Budgets and rates of this world: those of `rates`, else measured once for the machine. Collective.

    A simulated device is not measured: its copies say nothing of a machine, and plans on it must repeat.

    Args:
        device: The device of this rank; its capacity is its budget.
        host_bytes: Budget of this rank in host memory; None: its share of what is free.
        local_world_size: Ranks that share the host.
        dtype: The dtype that forward and backward compute in.
        group: All ranks; None in a single process.
        rates: The rates to use instead of measuring.

    Returns:
        What planning needs, and the rates, of which `Hardware` does not have all.
    """
    if rates is None:
        real = isinstance(device, HostDevice) or device.torch_device.type != "cpu"
        rates = measured(device, dtype=dtype, group=group) if real else Rates()
    host = available_host_bytes(local_world_size) if host_bytes is None else host_bytes
    control = control_group() if group is not None else None
    budgets = all_gather_object((device.capacity, host), control)
    known = {field.name for field in fields(Hardware)}
    return Hardware(
        device_bytes=min(one for one, _ in budgets),
        host_bytes=min(other for _, other in budgets),
        **{name: rate for name, rate in asdict(rates).items() if name in known},
    ), rates


# --- budgets ----------------------------------------------------------------------------------------


def available_host_bytes(local_world_size: int = 1) -> int:
    """A rank's share of the host memory that is free, with some left for everything else.

    Memory that only caches files counts as free, and the limit of a container as the size of the machine.

    Example:
        >>> 0 < available_host_bytes(2) < available_host_bytes()
        True
    """
    free = min(_free_of_machine(), _free_of_container(), host_memory())
    return max(int(free * _HOST_SHARE) // local_world_size, 1)


def _free_of_machine() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return host_memory()


def _free_of_container() -> int:
    for limit, used in _CGROUP:
        with suppress(OSError, ValueError):  # no such file, or "max"
            return max(int(Path(limit).read_text()) - int(Path(used).read_text()), 1)
    return host_memory()


# --- measuring --------------------------------------------------------------------------------------


def measured(
    device: Device[Any],
    *,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    fresh: bool = False,
) -> Rates:
    """The rates of this machine: those that were kept, else `measure` and keep them. Collective.

    Args:
        device: The device of this rank.
        dtype: The dtype that forward and backward compute in.
        group: All ranks; None in a single process.
        fresh: Measure anew, whatever is kept.
    """
    control = control_group() if group is not None else None
    hosts = sorted(set(all_gather_object(platform.node(), control)))
    key = _key(device, dtype, hosts, group)
    kept: dict[str, Any] | None = all_gather_object(None if fresh else _load(key), control)[0]
    if kept is not None:
        return Rates.of_json(kept)
    first: dict[str, Any] = all_gather_object(asdict(measure(device, dtype=dtype, group=group)), control)[0]
    if control is None or dist.get_rank() == 0:
        write_json(_path(key), {"key": key, "rates": first})
    return Rates.of_json(first)


def measure(
    device: Device[Any], *, dtype: torch.dtype = torch.float32, group: dist.ProcessGroup | None = None
) -> Rates:
    """Measure copies, AdamW, matrix products and, with a group, an all-gather. Collective over the group.

    Args:
        device: The device of this rank; its traffic counters are as before.
        dtype: The dtype of the matrix products.
        group: Ranks that gather; None leaves the default for `Rates.collective`.
    """
    wait = _waiting(device.torch_device)
    before = device.traffic.to_device, device.traffic.to_host
    copies = _copies(device)
    device.traffic.to_device, device.traffic.to_host = before
    host_step = _stepping(torch.device("cpu"), _STEPPED_ON_HOST, lambda: None)
    kind, room = device.torch_device.type, device.capacity - device.used
    collective = Rates.collective
    if group is not None:
        ranks = dist.get_world_size(group)
        part = gathered_part(kind, min(all_gather_object(room, control_group())), ranks)
        collective = _gathering(device.torch_device, part, group, wait)
    stepped = stepped_elements(kind, room)
    return Rates(
        **copies,
        host_step=host_step,
        device_step=host_step if kind == "cpu" else _stepping(device.torch_device, stepped, wait),
        flops=_products(device.torch_device, dtype, wait),
        collective=collective,
    )


def stepped_elements(kind: str, room: int) -> int:
    """Elements that AdamW is measured with: on a card so many that launching its kernels does not count.

    Args:
        kind: The type of the device.
        room: Bytes that are free on it, of which at most a quarter is taken.

    Example:
        >>> stepped_elements("cpu", 2**40), stepped_elements("cuda", 2**40), stepped_elements("cuda", 2**30)
        (2097152, 134217728, 16777216)
    """
    if kind == "cpu":
        return _STEPPED_ON_HOST
    return max(min(_STEPPED_ON_CARD, room // 4 // _BYTES_OF_ADAMW), 1)


def gathered_part(kind: str, room: int, ranks: int) -> int:
    """Float32 elements of each rank that gathering is measured with.

    Args:
        kind: The type of the device.
        room: Bytes that are free on the fullest of the ranks' devices; on a card at most a quarter is taken.
        ranks: Number of ranks.

    Example:
        >>> gathered_part("cpu", 2**40, 8), gathered_part("cuda", 2**40, 8), gathered_part("cuda", 2**20, 8)
        (1048576, 8388608, 8192)
    """
    if kind == "cpu":
        return _GATHERED_ON_HOST // 4
    return max(min(_GATHERED_ON_CARD, room // 4) // ranks // 4, 1)


def _waiting(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def _seconds(call: Callable[[], object], wait: Callable[[], None], *, rounds: int = 6) -> float:
    """Seconds of one call: the least of some, which others disturbed least."""
    call()
    wait()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        wait()
        taken.append(time.perf_counter() - start)
    return max(min(taken), 1e-9)


def _copies(device: Device[Any]) -> dict[str, float]:
    """Both directions, at a size that takes long enough and fits into a quarter of what is free."""
    room = max((device.capacity - device.used) // 4, 4)
    size = min(_LEAST_BYTES, room)
    while True:
        there, here = device.empty(size // 4, torch.float32), device.host_empty(size // 4, torch.float32)
        here.zero_()
        seconds = {
            "to_device": _seconds(lambda: device.host_waits(device.copy(there, here)), lambda: None),  # noqa: B023
            "to_host": _seconds(lambda: device.host_waits(device.copy(here, there)), lambda: None),  # noqa: B023
        }
        device.release(there)
        if min(seconds.values()) >= _LONG_ENOUGH or 2 * size > min(_MOST_BYTES, room):
            return {name: (size // 4) * 4 / taken for name, taken in seconds.items()}
        size *= 2


def _stepping(device: torch.device, elements: int, wait: Callable[[], None]) -> float:
    """Elements per second of torch's fused AdamW."""
    weight = torch.nn.Parameter(torch.ones(elements, device=device))
    weight.grad = torch.ones_like(weight)
    return elements / _seconds(torch.optim.AdamW([weight], fused=True).step, wait)


def _products(device: torch.device, dtype: torch.dtype, wait: Callable[[], None]) -> float:
    """Operations per second, at the best of growing sizes: others may disturb one of them."""
    best = 0.0
    for side in _SIDES:
        matrix = torch.ones(side, side, device=device, dtype=dtype)
        seconds = _seconds(lambda: matrix @ matrix, wait)  # noqa: B023
        best = max(best, 2 * side**3 / seconds)
        if seconds >= _LONG_ENOUGH:
            break
    return best


def _gathering(
    device: torch.device, elements: int, group: dist.ProcessGroup, wait: Callable[[], None]
) -> float:
    """Bytes per second that a rank sends."""
    ranks = dist.get_world_size(group)
    part = torch.ones(elements, device=device)
    whole = torch.empty(ranks * elements, device=device)
    seconds = _seconds(lambda: dist.all_gather_into_tensor(whole, part, group=group), wait)
    return max(ranks - 1, 1) * part.nbytes / seconds


# --- keeping ----------------------------------------------------------------------------------------


def _key(
    device: Device[Any], dtype: torch.dtype, hosts: list[str], group: dist.ProcessGroup | None
) -> dict[str, Any]:
    card = device.torch_device
    return {
        "format": _FORMAT,
        "device": torch.cuda.get_device_name(card) if card.type == "cuda" else card.type,
        "engine": type(device).__name__,
        "dtype": str(dtype),
        "hosts": hosts,
        "backend": "" if group is None else dist.get_backend(group),
        "world": 1 if group is None else dist.get_world_size(group),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_directory("colossalai", "measured") / f"{digest[:24]}.json"


def _load(key: dict[str, Any]) -> dict[str, Any] | None:
    """What was measured before; None if nothing was kept that can be read."""
    kept = read_json(_path(key))
    try:
        rates: dict[str, Any] = kept["rates"]
        Rates.of_json(rates)
        return rates if kept["key"] == key else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
