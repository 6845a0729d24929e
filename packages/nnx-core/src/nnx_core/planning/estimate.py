"""Describe the predicted memory of one rank, by kind and by phase. Plain data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["KINDS", "Estimate", "Memory", "Phase", "World"]

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "communication",
    "temporary",
)
"""The kinds of memory. Gradients of activations count as activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks of a run.

    Attributes:
        size: The number of ranks.
        nodes: The number of nodes.
        memory: The bytes of each device; None if unknown.
        host: The bytes of host memory of each rank; None if unknown.
        accelerator: ``"cuda"`` or ``"cpu"``.
    """

    size: int
    nodes: int = 1
    memory: int | None = None
    host: int | None = None
    accelerator: str = "cuda"


@dataclass(frozen=True, slots=True)
class Phase:
    """The peak of one phase of a step.

    Attributes:
        name: ``"forward"``, ``"backward"``, ``"step"``, ``"save"`` or ``"load"``.
        peak: The most bytes on the device at one time.
        end: The bytes on the device at its end.
        kinds: The bytes at the peak, by kind.
        host: The most bytes in host memory.
    """

    name: str
    peak: int
    end: int
    kinds: Mapping[str, int]
    host: int = 0

    @property
    def largest(self) -> str:
        """The kind with the most bytes at the peak."""
        return max(self.kinds, key=lambda kind: self.kinds[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The predicted memory of one rank.

    Attributes:
        phases: The phases, in order.
        sources: The source of each kind: ``"traced"``, ``"formula"`` or ``"measured"``.
        notes: Sentences for the user.
        bar: The relative uncertainty: 0.02 for 2 %.
    """

    phases: tuple[Phase, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    bar: float = 0.02

    @property
    def worst(self) -> Phase:
        """The phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def peak(self) -> int:
        """The most bytes on the device at one time."""
        return self.worst.peak

    @property
    def host(self) -> int:
        """The most bytes in host memory."""
        return max(phase.host for phase in self.phases)

    def as_dict(self) -> dict[str, object]:
        """Return this estimate as plain data for JSON."""
        return {
            "peak": self.peak,
            "host": self.host,
            "bar": self.bar,
            "sources": dict(self.sources),
            "notes": list(self.notes),
            "phases": [
                {
                    "name": phase.name,
                    "peak": phase.peak,
                    "end": phase.end,
                    "host": phase.host,
                    "kinds": dict(phase.kinds),
                }
                for phase in self.phases
            ],
        }


class Memory:
    """The bytes of one rank while a step is replayed.

    Attributes:
        device: The bytes on the device, by kind.
        host: The bytes in host memory.
        total: The sum of `device`.
        history: The phase and the bytes by kind after each change, if it is a list.
    """

    def __init__(self) -> None:
        self.device = dict.fromkeys(KINDS, 0)
        self.host = 0
        self.total = 0
        self.history: list[tuple[str, tuple[int, ...]]] | None = None
        self._phases: list[Phase] = []
        self._name = ""
        self._peak = self._host_peak = 0
        self._kinds: dict[str, int] = {}

    def add(self, kind: str, nbytes: int) -> None:
        """Allocate bytes on the device; free them if `nbytes` is negative."""
        self.device[kind] += nbytes
        self.total += nbytes
        if self.total > self._peak:
            self._peak = self.total
            self._kinds = dict(self.device)
        if self.history is not None:
            self.history.append((self._name, tuple(self.device.values())))

    def add_briefly(self, kind: str, nbytes: int) -> None:
        """Allocate bytes on the device and free them at once, so that only a peak has them."""
        self.add(kind, nbytes)
        self.add(kind, -nbytes)

    def add_host(self, nbytes: int) -> None:
        """Allocate bytes in host memory; free them if `nbytes` is negative."""
        self.host += nbytes
        self._host_peak = max(self._host_peak, self.host)

    def begin(self, name: str) -> None:
        """Begin a phase, and end the one before it."""
        self.end()
        self._name = name
        self._peak, self._kinds, self._host_peak = self.total, dict(self.device), self.host

    def end(self) -> tuple[Phase, ...]:
        """End the current phase, and return all phases so far."""
        if self._name:
            self._phases.append(Phase(self._name, self._peak, self.total, self._kinds, self._host_peak))
            self._name = ""
        return tuple(self._phases)
