"""What is said when no placement fits: the bytes needed, what most of them are, and the knob.

Owns these messages; never decides that nothing fits (`planner` does).
"""

from __future__ import annotations

from nnx.errors import PlanError
from nnx_colossalai.plan.cost import Memory, Moment
from nnx_colossalai.plan.spec import Hardware, ModelSpec
from nnx_colossalai.plan.wishes import Wishes

__all__ = ["in_words", "no_room_on_device", "no_room_on_host", "not_lower", "not_these_wishes"]

_KNOBS = {
    "activations": "use activation checkpointing or a smaller batch",
    "gathered": "lower chunk_size, so that the largest group is divided",
    "staging": "lower chunk_size, so that the largest group is divided",
    "gradients": "lower chunk_size, so that the largest group is divided",
    "weights": "let more of it lie in host memory",
    "masters": "let more of it lie in host memory",
    "optimizer": "let more of it lie in host memory",
    "other": "use a smaller batch",
}


def in_words(count: int) -> str:
    """Bytes as a person reads them, and exactly.

    Example:
        >>> in_words(3 * 2**30)
        '3.00 GiB (3221225472 bytes)'
        >>> in_words(100)
        '100 bytes'
    """
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit} ({count} bytes)"
    return f"{count} bytes"


def no_room_on_device(
    spec: ModelSpec, least: Memory, hardware: Hardware, *, after: bool = False
) -> PlanError:
    """The device cannot hold even the placement that needs least of it.

    Args:
        spec: The model.
        least: Of that placement.
        hardware: The budgets.
        after: Whether the device has run out of memory although the plan fitted.
    """
    peak = least.peak
    kind = max(peak.by_kind, key=lambda one: peak.by_kind[one])
    knob = _KNOBS[kind]
    if after:
        return not_lower(
            least,
            f"no group has a lower tier that needs less. {_dominating(spec, peak)}",
            remedy=f"{knob[0].upper()}{knob[1:]}.",
        )
    return PlanError(
        f"the model does not fit: the least device memory that a step needs is {in_words(peak.device)}, "
        f"{in_words(hardware.device_bytes)} are allowed. {_dominating(spec, peak)}",
        remedy=f"Raise device_memory, or {knob}.",
    )


def no_room_on_host(spec: ModelSpec, least: Memory, hardware: Hardware) -> PlanError:
    """The host cannot hold what the device has no room for."""
    device, host = in_words(hardware.device_bytes), in_words(hardware.host_bytes)
    return PlanError(
        f"the model does not fit: with {device} of device memory a step needs at least "
        f"{in_words(least.host)} of host memory on each rank, {host} are allowed. {_largest(spec)}",
        remedy="Raise host_memory or device_memory, or use more ranks.",
    )


def not_these_wishes(least: Memory, hardware: Hardware, wishes: Wishes) -> PlanError:
    """A placement would fit, but none that keeps to what is asked for."""
    device, host = in_words(hardware.device_bytes), in_words(hardware.host_bytes)
    return PlanError(
        f"no placement with {wishes.given} fits: the least that it needs is {in_words(least.device)} of "
        f"device memory ({device} are allowed) and {in_words(least.host)} of host memory ({host} are "
        "allowed). Without it there is one that fits.",
        remedy="Leave it out or relax it, or raise device_memory or host_memory.",
    )


def not_lower(now: Memory, why: str, *, remedy: str) -> PlanError:
    """The device ran out of memory, and no lower plan can be taken."""
    return PlanError(
        f"the device ran out of memory under a plan with a peak of {in_words(now.device)}, and there "
        f"is no lower plan to go on with: {why}",
        remedy=remedy,
    )


def _dominating(spec: ModelSpec, peak: Moment) -> str:
    where = f"the {peak.phase}" + (f" of group {peak.group!r}" if peak.phase != "step" else "")
    parts = sorted(peak.by_kind.items(), key=lambda item: -item[1])
    most = ", ".join(f"{kind} {in_words(size)}" for kind, size in parts[:3] if size)
    return f"Its peak is in {where}: {most}. {_largest(spec)}"


def _largest(spec: ModelSpec) -> str:
    largest = max(spec.groups, key=lambda group: group.numel, default=None)
    if largest is None:
        return "The model has no groups."
    size = in_words(largest.numel * spec.working_bytes)
    return f"The largest group is {largest.name!r} with {largest.numel} elements, {size} of complete weights."
