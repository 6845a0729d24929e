"""Save and load plans as JSON that people read and edit, and show them as tables.

Only the name and the tier of every chunk matter. Sizes and predictions are information for the reader; they
are computed again when the plan is used. Loading checks a plan against its model.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from nnx_colossalai.plan.cost import footprint
from nnx_colossalai.plan.planner import Planned
from nnx_colossalai.plan.schedule import work
from nnx_colossalai.plan.spec import Group, ModelSpec, Placement, RankResources, Tier
from nnx_core.errors import PlanError
from nnx_core.json_files import PlanFormat, save_plan

_FORMAT = PlanFormat("nnx-colossalai", 1, "plan_file")
_NAMES_SHOWN = 5
_TIERS = ", ".join(tier.value for tier in Tier)


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """The content of a plan file.

    Attributes:
        tiers: The tiers by the name of the chunk, in the order of the file.
        numel: The elements by the name of the chunk, if the file has them.
        body: The parsed JSON.
    """

    tiers: Mapping[str, Tier]
    numel: Mapping[str, int]
    body: Mapping[str, Any]

    @classmethod
    def of(cls, spec: ModelSpec, resources: RankResources, planned: Planned) -> PlanDocument:
        """Make the document of a plan.

        Args:
            spec: The planned model.
            resources: The budgets and rates of the plan.
            planned: The plan.
        """
        sizes = {key: value for key, value in asdict(spec).items() if key != "groups"}
        predicted = {
            "seconds": planned.seconds,
            "device_bytes": planned.memory.device,
            "host_bytes": planned.memory.host,
            "busy_seconds": dict(planned.busy),
        }
        chunks = [_chunk(spec, group, planned) for group in spec.groups]
        body = {
            **_FORMAT.head,
            "model": sizes,
            "hardware": asdict(resources),
            "predicted": predicted,
            "chunks": chunks,
        }
        return cls.of_text(json.dumps(body), path="")

    @property
    def text(self) -> str:
        """The JSON text, with one line for each chunk."""
        parts = {key: json.dumps(value) for key, value in self.body.items() if key != "chunks"}
        head = "".join(f" {json.dumps(key)}: {part},\n" for key, part in parts.items())
        chunks = ",\n".join(f"  {json.dumps(chunk)}" for chunk in self.body["chunks"])
        return f'{{\n{head} "chunks": [\n{chunks}\n ]\n}}\n'

    @classmethod
    def of_text(cls, text: str, *, path: str) -> PlanDocument:
        """Parse the text of a document.

        Args:
            text: The JSON text, as `text` returns it or a person has edited it.
            path: The path of its file, used in messages.

        Raises:
            PlanError: The text is no plan, or a chunk has no name or an unknown tier.
        """
        return cls._of_body(_FORMAT.parse(text, path=path), path=path)

    @classmethod
    def _of_body(cls, body: dict[str, Any], *, path: str) -> PlanDocument:
        if not isinstance(body.get("chunks"), list):
            raise PlanError(
                f"the plan {path!r} has no list of chunks.", remedy="Pass a file that plan_file wrote."
            )
        tiers: dict[str, Tier] = {}
        numel: dict[str, int] = {}
        for place, chunk in enumerate(body["chunks"]):
            name, tier = _named(chunk, place, path)
            if name in tiers:
                raise PlanError(
                    f"the plan {path!r} has two chunks named {name!r}.", remedy="Remove one of the lines."
                )
            tiers[name] = tier
            if isinstance(chunk.get("numel"), int):
                numel[name] = chunk["numel"]
        return cls(tiers, numel, body)

    def save(self, path: str | Path) -> None:
        """Write the document atomically: a reader finds the complete old file or the complete new one.

        Raises:
            PlanError: The file cannot be written.
        """
        save_plan(path, self.text)

    @classmethod
    def load(cls, path: str | Path) -> PlanDocument:
        """Read a document.

        Raises:
            PlanError: The file does not exist or is no plan.
        """
        return cls._of_body(_FORMAT.load(path), path=str(path))

    def placement(self, spec: ModelSpec, *, path: str = "") -> Placement:
        """Return the placement of a model's chunks, in the model's order.

        A plan from another world size is valid, because chunks have the same names there.

        Args:
            spec: The model to place.
            path: The path of the plan's file, used in messages.

        Raises:
            PlanError: The plan is for another model; the message names the chunks that differ.
        """
        names = {group.name for group in spec.groups}
        missing = [group.name for group in spec.groups if group.name not in self.tiers]
        unknown = [name for name in self.tiers if name not in names]
        differences = []
        if missing:
            differences.append(f"it lacks {_listed(missing)}")
        if unknown:
            differences.append(f"the model has no {_listed(unknown)}")
        if not differences and self._of_same_world(spec):
            other = [group.name for group in spec.groups if self._other_size(group)]
            if other:
                differences.append(f"other sizes are in {_listed(other)}")
        if differences:
            raise PlanError(
                f"the plan {path!r} is for another model: {'; '.join(differences)}.",
                remedy="Plan again, or give each chunk of the model one line with its name and tier.",
            )
        return Placement({group.name: self.tiers[group.name] for group in spec.groups})

    def _of_same_world(self, spec: ModelSpec) -> bool:
        """Return True if the plan is from the same world size."""
        # Sizes include the padding of shards, so they compare only at the same world size.
        model = self.body.get("model")
        return isinstance(model, dict) and model.get("world_size") == spec.world_size

    def _other_size(self, group: Group) -> bool:
        return self.numel.get(group.name, group.numel) != group.numel


def plan_key(spec: ModelSpec, placement: Placement) -> str:
    """Return a hash of a plan and its model, by which ranks check that they run the same.

    Example:
        >>> spec = ModelSpec(groups=(Group(name="layer", numel=4, trainable=4),))
        >>> tiers = (Tier.SHARDED, Tier.STREAMED)
        >>> one, other = (plan_key(spec, Placement({"layer": tier})) for tier in tiers)
        >>> len(one), one == other
        (32, False)
    """
    sizes = [(group.name, group.numel, group.trainable) for group in spec.groups]
    widths = (spec.world_size, spec.working_bytes, spec.master_bytes, spec.gradient_bytes)
    tiers = [(name, tier.value) for name, tier in placement.tiers.items()]
    return hashlib.sha256(json.dumps([sizes, widths, tiers]).encode()).hexdigest()[:32]


def _chunk(spec: ModelSpec, group: Group, planned: Planned) -> dict[str, Any]:
    tier = planned.placement.tiers[group.name]
    held = footprint(spec, group, tier)
    sizes = {key: value for key, value in asdict(group).items() if key != "name"}
    bytes_held = {"device_bytes": held.device + held.gradients, "host_bytes": held.host}
    why = planned.reasons.get(group.name, "")
    return {"name": group.name, "tier": tier.value, **sizes, **bytes_held, "why": why}


def _named(chunk: Any, place: int, path: str) -> tuple[str, Tier]:
    if not isinstance(chunk, dict) or not isinstance(chunk.get("name"), str):
        raise PlanError(
            f"chunk {place} of the plan {path!r} has no name: {chunk!r}.",
            remedy='Write {"name": ..., "tier": ...}; the root is named "".',
        )
    try:
        return chunk["name"], Tier(chunk.get("tier"))
    except ValueError:
        raise PlanError(
            f"the plan {path!r} puts chunk {chunk['name']!r} into the tier {chunk.get('tier')!r}.",
            remedy=f"Use one of {_TIERS}.",
        ) from None


def _listed(names: Iterable[str]) -> str:
    found = [repr(name) for name in names]
    more = f" and {len(found) - _NAMES_SHOWN} more" if len(found) > _NAMES_SHOWN else ""
    return ", ".join(found[:_NAMES_SHOWN]) + more


_HEAD = ("chunk", "tier", "elements", "device", "host", "moved/step", "why")
_LEFT = (0, 1, 6)
_ROOT = "(root)"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plan_table(spec: ModelSpec, resources: RankResources, planned: Planned) -> str:
    """Return the table of a plan for one rank, with its sums and predictions.

    A line has the tier, memory, traffic and reason of one chunk; successive equal layers share a line.

    Args:
        spec: The planned model.
        resources: The budgets of the plan.
        planned: The plan.
    """
    lines = [_HEAD, *(_row(spec, planned, run) for run in _runs(spec, planned))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    rows = [
        "  ".join(
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([rows[0], "-" * max(map(len, rows)), *rows[1:], "", summary(spec, resources, planned)])


def summary(spec: ModelSpec, resources: RankResources, planned: Planned) -> str:
    """Return three lines: the predicted time of a step, and the peaks of device and host memory."""
    peak = planned.memory.peak
    kinds = ", ".join(f"{kind} {size_text(size)}" for kind, size in peak.by_kind.items() if size)
    moment = {"step": "the step"}.get(peak.phase, f"the {peak.phase} of {peak.group or _ROOT}")
    elements = sum(group.numel for group in spec.groups)
    busy = {lane: seconds for lane, seconds in planned.busy.items() if seconds}
    limit = f", most of it {max(busy, key=lambda lane: busy[lane])}" if busy else ""
    return "\n".join(
        [
            f"{elements:,} elements in {len(spec.groups)} chunk{'s' * (len(spec.groups) > 1)} on "
            f"{spec.world_size} rank{'s' * (spec.world_size > 1)}; "
            f"predicted {_seconds(planned.seconds)} a step{limit}",
            f"device: {size_text(planned.memory.device)} of {size_text(resources.device_bytes)} in {moment} "
            f"({kinds or 'nothing'})",
            f"host: {size_text(planned.memory.host)} of {size_text(resources.host_bytes)}",
        ]
    )


def size_text(count: int) -> str:
    """Return a number of bytes as short readable text.

    Example:
        >>> size_text(0), size_text(1023), size_text(3 * 2**30 // 2)
        ('0 B', '1023 B', '1.50 GiB')
    """
    size = float(count)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _runs(spec: ModelSpec, planned: Planned) -> Iterator[list[Group]]:
    """Yield runs of chunks with one size and tier, and with names that differ only in numbers."""

    def alike(group: Group) -> tuple[object, ...]:
        tier = planned.placement.tiers[group.name]
        return re.sub(r"\d+", "#", group.name), tier, group.numel, group.trainable

    for _, run in groupby(spec.groups, alike):
        yield list(run)


def _why(planned: Planned, group: Group) -> str:
    """Return the reason without exact bytes, which would widen the table."""
    return re.sub(r" \(\d+ bytes\)", "", planned.reasons.get(group.name, ""))


def _row(spec: ModelSpec, planned: Planned, run: Sequence[Group]) -> tuple[str, ...]:
    tier = planned.placement.tiers[run[0].name]
    device, host, moved = (
        sum(column) for column in zip(*(_cost(spec, one, tier) for one in run), strict=True)
    )
    name = run[0].name or _ROOT
    name = name if len(run) == 1 else f"{name} to {run[-1].name} ({len(run)})"
    elements = f"{sum(group.numel for group in run):,}"
    frozen = sum(group.numel - group.trainable for group in run)
    why = _why(planned, run[0]) + (f"; {frozen:,} frozen" if frozen else "")
    return (name, tier.value, elements, *map(size_text, (device, host, moved)), why)


def _cost(spec: ModelSpec, group: Group, tier: Tier) -> tuple[int, int, int]:
    held, moving = footprint(spec, group, tier), work(spec, group, tier)
    return held.device + held.gradients, held.host, moving.to_device + moving.to_host
