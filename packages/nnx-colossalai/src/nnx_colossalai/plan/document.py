"""Plans as documents: JSON that people read and edit, checked against the model that it is used for.

Only the name and the tier of every chunk decide anything. Sizes and predictions are there to be read; who
edits tiers need not touch them, since they are computed anew when the plan is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nnx.errors import PlanError
from nnx_colossalai.plan.cost import footprint
from nnx_colossalai.plan.planner import Planned
from nnx_colossalai.plan.spec import Group, Hardware, ModelSpec, Placement, Tier

__all__ = ["PlanDocument", "plan_key", "write_text"]

_FORMAT = "nnx-colossalai plan"
_VERSION = 1
_NAMES_SHOWN = 5
_TIERS = ", ".join(tier.value for tier in Tier)


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """A plan as it is in a file.

    Attributes:
        tiers: By the name of the chunk, in the order of the file.
        numel: Elements by the name of the chunk, where the file says them.
        body: All that the file says.
    """

    tiers: Mapping[str, Tier]
    numel: Mapping[str, int]
    body: Mapping[str, Any]

    @classmethod
    def of(cls, spec: ModelSpec, hardware: Hardware, planned: Planned) -> PlanDocument:
        """The document of a plan.

        Args:
            spec: What was planned.
            hardware: Budgets and rates that it was planned for.
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
            "format": _FORMAT, "version": _VERSION, "model": sizes, "hardware": asdict(hardware),
            "predicted": predicted, "chunks": chunks,
        }  # fmt: skip
        return cls.of_text(json.dumps(body), path="")

    # --- text and files -------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """The JSON, one line for each chunk."""
        parts = {key: json.dumps(value) for key, value in self.body.items() if key != "chunks"}
        head = "".join(f" {json.dumps(key)}: {part},\n" for key, part in parts.items())
        chunks = ",\n".join(f"  {json.dumps(chunk)}" for chunk in self.body["chunks"])
        return f'{{\n{head} "chunks": [\n{chunks}\n ]\n}}\n'

    @classmethod
    def of_text(cls, text: str, *, path: str) -> PlanDocument:
        """Understand what `text` wrote, or a person did.

        Args:
            text: JSON.
            path: Where it is from, for messages.

        Raises:
            PlanError: It is no plan, or a chunk has no name or an unknown tier.
        """
        body = _parsed(text, path)
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
        """Write the document; a reader finds the old one or the new one, complete.

        Raises:
            PlanError: It cannot be written.
        """
        write_text(path, self.text)

    @classmethod
    def load(cls, path: str | Path) -> PlanDocument:
        """Read a document.

        Raises:
            PlanError: There is none, or it cannot be understood.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PlanError(
                f"the plan {str(path)!r} cannot be read: {reason}.", remedy="Check the path."
            ) from error
        return cls.of_text(text, path=str(path))

    # --- use ------------------------------------------------------------------------------------

    def placement(self, spec: ModelSpec, *, path: str = "") -> Placement:
        """Where the plan puts the chunks of a model, in the model's order.

        A plan made at another world size is accepted, since chunks have the same names there.

        Args:
            spec: The model that it is to be used for.
            path: Where the plan is from, for messages.

        Raises:
            PlanError: It was made for another model; the message says which chunks differ.
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
                remedy="Plan anew, or give each chunk of the model one line with its name and tier.",
            )
        return Placement({group.name: self.tiers[group.name] for group in spec.groups})

    def _of_same_world(self, spec: ModelSpec) -> bool:
        """Only then do sizes compare: what is held includes what sharding adds."""
        model = self.body.get("model")
        return isinstance(model, dict) and model.get("world_size") == spec.world_size

    def _other_size(self, group: Group) -> bool:
        return self.numel.get(group.name, group.numel) != group.numel


def plan_key(spec: ModelSpec, placement: Placement) -> str:
    """What two ranks compare to know that they run the same plan of the same model.

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


def write_text(path: str | Path, text: str) -> None:
    """Replace a file at once.

    Raises:
        PlanError: It cannot be written.
    """
    target = Path(path)
    temporary = ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".tmp")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise PlanError(
            f"{str(path)!r} cannot be written: {error.strerror or error}.", remedy="Choose another path."
        ) from error


def _chunk(spec: ModelSpec, group: Group, planned: Planned) -> dict[str, Any]:
    tier = planned.placement.tiers[group.name]
    held = footprint(spec, group, tier)
    sizes = {key: value for key, value in asdict(group).items() if key != "name"}
    bytes_held = {"device_bytes": held.device + held.gradients, "host_bytes": held.host}
    why = planned.reasons.get(group.name, "")
    return {"name": group.name, "tier": tier.value, **sizes, **bytes_held, "why": why}


def _parsed(text: str, path: str) -> dict[str, Any]:
    remedy = "Pass a file that plan_file wrote."
    try:
        body = json.loads(text)
    except ValueError as error:
        raise PlanError(f"the plan {path!r} is no JSON: {error}.", remedy=remedy) from error
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise PlanError(f"{path!r} is no plan of nnx-colossalai.", remedy=remedy)
    if body.get("version") != _VERSION:
        raise PlanError(
            f"the plan {path!r} is of version {body.get('version')!r}, and {_VERSION} is read.",
            remedy="Plan anew, or use the version that wrote it.",
        )
    if not isinstance(body.get("chunks"), list):
        raise PlanError(f"the plan {path!r} has no list of chunks.", remedy=remedy)
    return body


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
