"""Trace four of many equal layers, and repeat the events of the third one for the others.

`equal_layers` finds layers of one class and equal shapes, side by side in a container. `shortened` leaves
four of each run in the model while it is traced. `repeated` then writes the events of the complete model:
the first two layers and the last one as they were traced, and copies of the third one between them. Its
neighbours are inner layers too, so a tensor that one layer makes and the next one frees is repeated as well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from nnx_core.planning.trace import Event, Kind

__all__ = ["NotRepeatableError", "Run", "equal_layers", "repeated", "shortened"]

_TRACED, _TEMPLATE = 4, 2
_LEAST = _TRACED + 2
_NUMBER_OF_LAYER = re.compile(r"(^|_)(idx|index|id|number|num|name|prefix)$")


class NotRepeatableError(Exception):
    """The layers of a run do not make and free the same tensors."""


@dataclass(frozen=True, slots=True)
class Run:
    """Equal layers side by side in one container.

    Attributes:
        container: The name of the container in the model.
        first: The place of the first layer in the container.
        count: The number of layers.
    """

    container: str
    first: int
    count: int

    def name(self, place: int) -> str:
        """Return the name of the layer at a place of the container."""
        return f"{self.container}.{place}" if self.container else str(place)


def equal_layers(root: nn.Module) -> list[Run]:
    """Return the outermost runs of six or more equal layers.

    Example:
        >>> equal_layers(nn.Sequential(*(nn.Linear(2, 2) for _ in range(7)), nn.Linear(2, 1)))
        [Run(container='', first=0, count=7)]
    """
    runs: list[Run] = []
    for name, container in root.named_modules():
        inside = any(
            name.startswith(f"{run.container}.".lstrip(".")) and name != run.container for run in runs
        )
        if inside or not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        place = 0
        for _, group in groupby(container.children(), key=_signature):
            count = len(list(group))
            if count >= _LEAST:
                runs.append(Run(name, place, count))
            place += count
    return runs


def _signature(layer: nn.Module) -> Hashable:
    """Return the class, the shapes and the plain settings of a layer and its submodules."""
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, (bool, int, float, str)) and not _NUMBER_OF_LAYER.search(key)
        )
        parts.append((name, type(module), settings))
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        parts.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad))
    return tuple(parts)


@contextmanager
def shortened(root: nn.Module, runs: Sequence[Run]) -> Iterator[Callable[[str], list[str]]]:
    """Leave four layers of each run in the model.

    Yields:
        A function from a name in the shortened model to its names in the complete one: one, or those of all
        layers that the third one stands for.
    """
    names: dict[str, list[str]] = {}
    kept: dict[nn.Module, dict[str, nn.Module | None]] = {}
    for container_name, several in groupby(runs, key=lambda run: run.container):
        container = root.get_submodule(container_name)
        kept[container] = dict(container._modules)
        names |= _shorten(container, container_name, list(several))
    try:
        yield lambda name: _complete_names(name, names)
    finally:
        for container, modules in kept.items():
            container._modules = modules


def _shorten(container: nn.Module, name: str, runs: Sequence[Run]) -> dict[str, list[str]]:
    """Shorten one container, and return the complete names of its layers."""
    left: dict[str, nn.Module | None] = {}
    names: dict[str, list[str]] = {}
    prefix = f"{name}." if name else ""
    for place, layer in enumerate(container._modules.values()):
        run = next((run for run in runs if run.first <= place < run.first + run.count), None)
        within = 0 if run is None else place - run.first
        if run is not None and _TEMPLATE < within < run.count - 1:
            names[f"{prefix}{len(left) - 1}"].append(f"{prefix}{place}")
            continue
        names[f"{prefix}{len(left)}"] = [f"{prefix}{place}"]
        left[str(len(left))] = layer
    container._modules = left
    return names


def _complete_names(name: str, names: Mapping[str, list[str]]) -> list[str]:
    found = [""]
    for part in name.split("."):
        grown = [f"{one}.{part}" if one else part for one in found]
        found = names.get(grown[0], grown) if len(grown) == 1 else grown
    return found


def repeated(
    events: Sequence[Event], runs: Sequence[Run], names_of: Callable[[str], list[str]]
) -> tuple[Event, ...]:
    """Return the events of the complete model.

    Raises:
        NotRepeatableError: The layers of a run do not make and free the same tensors.
    """
    found = _in_order(events)
    removed = 0
    for index, run in enumerate(runs):
        if index and runs[index - 1].container != run.container:
            removed = 0
        found = _Repetition(found, run, run.first - removed).result()
        removed += run.count - _TRACED
    return tuple(
        event
        if not event.name or event.kind is Kind.PHASE
        else event._replace(name=_complete_name(event, names_of))
        for event in found
    )


def _complete_name(event: Event, names_of: Callable[[str], list[str]]) -> str:
    """Return the complete name of an event; copies carry the number of their layer after a ``#``."""
    name, _, copy = event.name.partition("#")
    return names_of(name)[int(copy) if copy else 0]


def _in_order(events: Sequence[Event]) -> list[Event]:
    """Let a module's backward end before that of the module that feeds it begins."""
    found = list(events)
    for place in range(len(found) - 1):
        pair = found[place].kind, found[place + 1].kind
        if pair == (Kind.ENTER_BACKWARD, Kind.LEAVE_BACKWARD):
            found[place], found[place + 1] = found[place + 1], found[place]
    return found


class _Repetition:
    """The events of one run, with copies of its third layer.

    Args:
        events: The events of the shortened model.
        run: The run.
        first: The place of its first layer in the shortened container.
    """

    def __init__(self, events: Sequence[Event], run: Run, first: int) -> None:
        self._events = events
        self._copies = run.count - _TRACED + 1
        self._layers = [run.name(first + place) for place in range(_TRACED)]
        self._segment_of = self._segments()
        self._born: dict[int, tuple[str, int, int]] = {}
        self._makes: dict[tuple[str, int], list[int]] = defaultdict(list)
        for event, segment in zip(events, self._segment_of, strict=True):
            if event.kind is Kind.MAKE:
                self._born[event.storage] = (*segment, len(self._makes[segment]))
                self._makes[segment].append(event.nbytes)
        self._storage = {born: number for number, born in self._born.items()}
        self._next = max(self._born, default=0) + 1
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._check()

    def _segments(self) -> list[tuple[str, int]]:
        """Return direction and layer of each event; layer -1 is outside of the run."""
        segments: list[tuple[str, int]] = []
        direction, layer, seen = "F", -1, set()
        for event in self._events:
            if event.kind is Kind.PHASE:
                direction, layer = ("B" if event.name == "backward" else "F"), -1
            starts = Kind.ENTER if direction == "F" else Kind.ENTER_BACKWARD
            if event.kind is starts and event.name in self._layers:
                layer = self._layers.index(event.name)
                if (direction, layer) in seen:
                    raise NotRepeatableError(f"{event.name} runs more than once in a step")
                seen.add((direction, layer))
            segments.append((direction, layer))
            last = Kind.LEAVE if direction == "F" else Kind.LEAVE_BACKWARD
            end = _TRACED - 1 if direction == "F" else 0
            if event.kind is last and layer == end and event.name == self._layers[end]:
                layer = -1
        if len(seen) < 2 * _TRACED:
            raise NotRepeatableError(f"a layer of {self._layers[0]} to {self._layers[-1]} has no backward")
        return segments

    def _check(self) -> None:
        if self._makes["F", 1] != self._makes["F", 2] or self._makes["B", 1] != self._makes["B", 2]:
            raise NotRepeatableError("inner layers make different tensors")
        for event, (direction, layer) in zip(self._events, self._segment_of, strict=True):
            if (
                event.kind is Kind.USE
                and layer == -1
                and event.name.startswith(f"{self._layers[_TEMPLATE]}.")
            ):
                raise NotRepeatableError(f"{event.name} is used outside of its layer")
            if event.kind not in (Kind.FREE, Kind.GRADIENT) or event.storage not in self._born:
                continue
            _, of, _ = self._born[event.storage]
            if layer == _TEMPLATE and of == -1 and event.kind is Kind.FREE:
                raise NotRepeatableError(f"layer {layer} frees a tensor of the model outside ({direction})")
            if layer != -1 and of != -1 and abs(layer - of) > 1:
                raise NotRepeatableError("a layer frees a tensor of a layer that is no neighbour")

    def result(self) -> list[Event]:
        """Return the events with all layers."""
        found: list[Event] = []
        block: list[Event] = []
        before = ("F", -1)
        for event, segment in zip(self._events, self._segment_of, strict=True):
            if before[1] == _TEMPLATE and segment != before:
                found += self._copied(block, before[0])
                block = []
            if segment[1] == _TEMPLATE:
                block.append(event)
            else:
                found += self._outside(event, segment[1])
            before = segment
        return found

    def _copied(self, block: Sequence[Event], direction: str) -> Iterator[Event]:
        copies = range(self._copies) if direction == "F" else reversed(range(self._copies))
        for copy in copies:
            for event in block:
                storage = self._moved(event.storage, copy)
                name = event.name
                if name == self._layers[_TEMPLATE] or name.startswith(f"{self._layers[_TEMPLATE]}."):
                    name = f"{name}#{copy}"
                yield event._replace(storage=storage, name=name)

    def _moved(self, storage: int, copy: int) -> int:
        """Return the storage that a copy of the third layer means."""
        born = self._born.get(storage)
        if born is None or born[1] == -1:
            return storage
        direction, layer, place = born
        target = copy + layer - _TEMPLATE
        if 0 <= target < self._copies:
            return self._number(direction, target, place, layer)
        return storage

    def _number(self, direction: str, copy: int, place: int, layer: int) -> int:
        makes, template = self._makes[direction, layer], self._makes[direction, _TEMPLATE]
        if place >= len(template) or makes[place] != template[place]:
            raise NotRepeatableError("neighbours of a layer make different tensors")
        if copy == 0:
            return self._storage[direction, _TEMPLATE, place]
        key = direction, copy, place
        if key not in self._numbers:
            self._numbers[key], self._next = self._next, self._next + 1
        return self._numbers[key]

    def _outside(self, event: Event, layer: int) -> Iterator[Event]:
        """Yield an event of another layer or of the model outside, for each copy that it is about."""
        born = self._born.get(event.storage)
        template = self._layers[_TEMPLATE]
        if born is not None and born[1] == _TEMPLATE:
            direction, _, place = born
            # The layer before is a neighbour of the first copy, the layer behind of the last one.
            copies = {-1: range(self._copies), 1: [0], 3: [self._copies - 1]}.get(layer)
            if copies is None:
                raise NotRepeatableError(f"layer {layer} frees a tensor of layer {_TEMPLATE}")
            several = list(copies)
            for copy in several:
                name = f"{event.name}#{copy}" if event.name.startswith(f"{template}.") else event.name
                yield event._replace(storage=self._number(direction, copy, place, _TEMPLATE), name=name)
        elif event.name == template or event.name.startswith(f"{template}."):
            for copy in range(self._copies):
                yield event._replace(name=f"{event.name}#{copy}")
        else:
            yield event
