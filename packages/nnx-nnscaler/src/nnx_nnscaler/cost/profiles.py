"""Figures of machines that are not here, as their makers publish them. Nothing in this file was measured.

They serve to plan for a mesh without having it; on the machine itself `calibration` measures.
Matrix products are counted at 60 % of the dense peak, memory at 85 %, links at 80 % of one direction.
"""

from __future__ import annotations

from nnx.errors import OptionError
from nnx_nnscaler.cost.hardware import Hardware, Link

__all__ = ["PROFILES", "profile"]

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
