"""Gather the content of a checkpoint of any format for display.

Our own format needs only its small files, without torch. `nnx_checkpoint.open_checkpoint` opens others.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from nnx_base.errors import CheckpointError
from nnx_checkpoint.cli.output import human_bytes
from nnx_checkpoint.format.manifest import load_json
from nnx_checkpoint.format.source import Source, is_checkpoint
from nnx_checkpoint.reading.survey import files_below
from nnx_checkpoint.storage import Place
from nnx_checkpoint.storage.locations import place_of

if TYPE_CHECKING:
    from nnx_checkpoint.format.index import TensorEntry
    from nnx_checkpoint.reading.reader import Checkpoint

__all__ = [
    "Content",
    "groups_of",
    "kind_of",
    "natural_order",
    "optimizers_of",
    "owner_of",
    "progress_of",
    "read_content",
    "read_objects",
    "shown",
    "tree_lines",
]


# Split the names of logical tensors into a tree, and find the owner of each.


_STATE = re.compile(r"optim\.(?P<optimizer>[^.]+)\.state\.(?P<parameter>.+)\.(?P<kind>[^.]+)")


@dataclass(frozen=True, slots=True)
class Owner:
    """The kind of state that a tensor belongs to.

    Attributes:
        kind: ``weights``, ``optimizer``, ``objects``, ``ranks`` or ``other``.
        name: Name of the parameter or buffer, without ``model.``; the full name of other tensors.
        optimizer: The number of the optimizer, for optimizer state.
        state: The name of the state, such as ``exp_avg``, for optimizer state.
    """

    kind: str
    name: str
    optimizer: str = ""
    state: str = ""


def owner_of(name: str) -> Owner:
    """Return the owner of a logical name.

    Example:
        >>> owner_of("optim.0.state.head.weight.exp_avg")
        Owner(kind='optimizer', name='head.weight', optimizer='0', state='exp_avg')
    """
    if name.startswith("model."):
        return Owner("weights", name.removeprefix("model."))
    match = _STATE.fullmatch(name)
    if match:
        return Owner("optimizer", match["parameter"], match["optimizer"], match["kind"])
    kinds = {"objects": "objects", "rank": "ranks"}
    return Owner(kinds.get(name.partition(".")[0], "other"), name)


def kind_of(name: str) -> str:
    """Return the kind of a tensor as text.

    Example:
        >>> kind_of("optim.0.state.head.weight.exp_avg")
        'optimizer 0 exp_avg'
    """
    owner = owner_of(name)
    return f"optimizer {owner.optimizer} {owner.state}" if owner.kind == "optimizer" else owner.kind


class _Branch:
    """Tensors whose names share a prefix."""

    def __init__(self) -> None:
        self.children: dict[str, _Branch] = {}
        self.leaf = ""
        self.count = 0
        self.nbytes = 0

    def add(self, parts: list[str], leaf: str, nbytes: int) -> None:
        self.count += 1
        self.nbytes += nbytes
        if parts:
            self.children.setdefault(parts[0], _Branch()).add(parts[1:], leaf, nbytes)
        else:
            self.leaf = leaf

    def lines(self, indent: str, depth: int) -> Iterator[str]:
        for name in sorted(self.children, key=natural_order):
            label, child = name, self.children[name]
            while len(child.children) == 1 and not child.leaf:  # print a chain of single children on one line
                ((step, child),) = child.children.items()
                label += f".{step}"
            if child.leaf:
                yield f"{indent}{label}  {child.leaf}"
            if child.children:
                yield f"{indent}{label}  [{child.count} tensors, {human_bytes(child.nbytes)}]"
                if depth > 1:
                    yield from child.lines(indent + "  ", depth - 1)


def natural_order(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts ``layers.2`` before ``layers.10``."""
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in re.split(r"(\d+)", text) if p]


def tree_lines(tensors: Mapping[str, TensorEntry], aliases: Mapping[str, str], depth: int) -> Iterator[str]:
    """Yield the names as an indented tree, down to a number of levels."""
    root = _Branch()
    for name, entry in tensors.items():
        shape = "x".join(map(str, entry.shape)) or "scalar"
        root.add(name.split("."), f"{entry.dtype_name} {shape}, {human_bytes(entry.nbytes)}", entry.nbytes)
    for alias, target in aliases.items():
        root.add(alias.split("."), f"tied to {target}", 0)
    return root.lines("", depth)


# Convert the objects of a checkpoint to plain JSON for display and ``--json``, without decoding or importing.
#
# `docs/checkpoint-format.md` specifies the typed JSON that is read here.


_TAG = "$"
_MAPPINGS = {"dict", "OrderedDict", "AttributeDict", "Namespace", "defaultdict"}
_SEQUENCES = {"tuple", "set", "frozenset", "deque", "torch.Size"}


def plain(tree: Any) -> Any:
    """Convert typed JSON to plain JSON: containers become lists and dicts, other values strings.

    Example:
        >>> plain({"betas": {"$": "tuple", "items": [0.9, {"$": "float", "value": "inf"}]}})
        {'betas': [0.9, 'inf']}
    """
    if isinstance(tree, list):
        return [plain(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = tree.get(_TAG)
    if tag is None:
        return {key: plain(value) for key, value in tree.items()}
    if tag in _MAPPINGS:
        return {str(plain(key)): plain(value) for key, value in tree["items"]}
    if tag in _SEQUENCES:
        return [plain(item) for item in tree["items"]]
    return _leaf(tag, tree)


def _leaf(tag: str, value: dict[str, Any]) -> Any:  # noqa: PLR0911 - one branch a type
    if tag == "tensor":
        return f"tensor {value['name']}"
    if tag == "enum":
        return f"{value['type'].partition(':')[2]}.{value['name']}"
    if tag == "torch.dtype":
        return f"torch.{value['value']}"
    if tag == "int":
        return int(value["value"], 16)
    if tag in ("bytes", "bytearray"):
        return f"{len(base64.b64decode(value['data']))} bytes"
    if tag == "numpy.scalar":
        return _number(value)
    if tag == "numpy.array":
        return f"array of {'x'.join(map(str, value['shape'])) or 'no'} {value['dtype']}"
    if tag == "opaque":
        return f"pickled object at {value['place']}"
    return str(value.get("value", tag))


def _number(value: dict[str, Any]) -> Any:
    import numpy as np

    scalar = np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))[0].item()
    return scalar if isinstance(scalar, (bool, int, float, str)) else str(scalar)


def shown(value: Any, limit: int = 60) -> str:
    """Format a plain value on one line (dicts without entries that are null or false).

    Example:
        >>> shown({"lr": 0.1, "betas": [0.9, 0.99], "fused": None})
        'lr=0.1, betas=[0.9, 0.99]'
    """
    if isinstance(value, dict):
        told = {key: item for key, item in value.items() if item is not None and item is not False}
        return ", ".join(f"{key}={shown(item, limit)}" for key, item in told.items())
    text = "[" + ", ".join(map(shown, value)) + "]" if isinstance(value, list) else str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


_COMMON = "objects.json"


@dataclass(frozen=True)
class Content:
    """The content of one checkpoint.

    Attributes:
        path: Its path.
        format: Name of its format.
        tensors: Every logical tensor by name.
        aliases: Tied names, each mapped to its stored name.
        objects: The common objects, as plain JSON.
        ranks: The number of ranks with objects of their own.
        rank_state: The plain objects of the first such rank.
        files: Sizes of its files.
        world_size: The number of ranks that wrote it.
        provenance: The record of its origin.
        version: Format version; empty for formats without one.
        save_id: The committed save of our own format.
        created: The time of the commit.
        writer: Versions of the program that wrote it.
        block: Bytes under one checksum; 0 without checksums.
    """

    path: str
    format: str
    tensors: Mapping[str, TensorEntry]
    aliases: Mapping[str, str]
    objects: Any
    ranks: int
    rank_state: Any
    files: Mapping[str, int]
    world_size: int
    provenance: Mapping[str, Any]
    version: tuple[int, ...] = ()
    save_id: str = ""
    created: str = ""
    writer: Mapping[str, Any] = field(default_factory=dict)
    block: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, copies not counted."""
        return sum(entry.nbytes for entry in self.tensors.values())

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(entry.numel for entry in self.tensors.values())

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())

    @property
    def trainer(self) -> dict[str, Any]:
        """Return the entries of a Lightning checkpoint besides weights and optimizers."""
        found = self.objects.get("trainer") if isinstance(self.objects, dict) else None
        return found if isinstance(found, dict) else {}


def read_content(path: str, *, weights_only: bool = True) -> Content:
    """Gather the content of a checkpoint.

    Args:
        path: A checkpoint of any format.
        weights_only: False executes code that the author of the checkpoint may have put there.

    Raises:
        CheckpointError: The checkpoint does not exist or is damaged.
    """
    if is_checkpoint(path):
        return _of_source(Source.open(path))
    from nnx_checkpoint.reading.formats import open_checkpoint

    return _of_opened(open_checkpoint(path, weights_only=weights_only), place_of(path))


def _of_source(source: Source) -> Content:
    manifest = source.manifest
    ranks = sorted(name for name in manifest.files if name.endswith(f".{_COMMON}"))
    return Content(
        path=str(source.path),
        format="nnx",
        tensors=source.index.tensors,
        aliases=source.index.aliases,
        objects=read_objects(source),
        ranks=len(ranks),
        rank_state=read_objects(source, ranks[0]) if ranks else None,
        files={name: entry.size for name, entry in manifest.files.items()},
        world_size=int(manifest.writer.get("world_size", 1)),
        provenance=manifest.provenance,
        version=manifest.version,
        save_id=manifest.save_id,
        created=manifest.created,
        writer=manifest.writer,
        block=manifest.block,
    )


def read_objects(source: Source, name: str = _COMMON) -> Any:
    """Return one of the trees of objects of our own format, as plain JSON.

    Raises:
        CheckpointError: The file is damaged.
    """
    try:
        return plain(load_json(source.read_file(name)))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"'{source.directory / name}' is malformed: {type(error).__name__}: {error}.",
            remedy="It was written by another program or a newer nnx; upgrade.",
        ) from error


def _of_opened(opened: Checkpoint, place: Place) -> Content:
    first = _plain_tree(opened, 0)
    return Content(
        path=str(place),
        format=opened.format,
        tensors=opened.tensors,
        aliases=opened.aliases,
        objects=_plain_tree(opened, None),
        ranks=0 if first is None else opened.world_size,
        rank_state=first,
        files=files_below(place),
        world_size=opened.world_size,
        provenance=opened.provenance,
    )


def _plain_tree(opened: Checkpoint, rank: int | None) -> Any:
    """Return a tree of another format as plain JSON, through the encoding of our own format."""
    from nnx_checkpoint.format.codec import Encoder

    tree = opened.tree(rank, lambda name: f"tensor {name}")
    return None if tree is None else plain(Encoder("objects", "skip").encode(tree))


def progress_of(trainer: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return epoch and optimizer step, or None for those that Lightning's dict lacks."""
    epoch, step = trainer.get("epoch"), trainer.get("global_step")
    return (epoch if type(epoch) is int else None, step if type(step) is int else None)


class OptimizerState(TypedDict):
    """The number of parameters with state in an optimizer, and the bytes of each kind of state."""

    parameters: int
    bytes: dict[str, int]


def optimizers_of(tensors: Mapping[str, TensorEntry]) -> dict[str, OptimizerState]:
    """Return for each optimizer the number of parameters with state, and the bytes of each kind."""
    found: dict[str, OptimizerState] = {}
    parameters: dict[str, set[str]] = {}
    for name, entry in tensors.items():
        owner = owner_of(name)
        if owner.kind == "optimizer":
            optimizer = found.setdefault(owner.optimizer, {"parameters": 0, "bytes": {}})
            optimizer["bytes"][owner.state] = optimizer["bytes"].get(owner.state, 0) + entry.nbytes
            parameters.setdefault(owner.optimizer, set()).add(owner.name)
    for name, optimizer in found.items():
        optimizer["parameters"] = len(parameters[name])
    return found


class ParameterGroup(TypedDict):
    """A parameter group: the number of its parameters, and its options."""

    parameters: int
    options: dict[str, Any]


def groups_of(objects: Any) -> list[list[ParameterGroup]]:
    """Return the parameter groups of each optimizer, if the objects have them under their usual names."""
    optimizers = objects.get("optim") if isinstance(objects, dict) else None
    if not isinstance(optimizers, list):
        return []
    return [
        [
            {
                "parameters": len(group.get("params", ())),
                "options": {key: value for key, value in group.items() if key != "params"},
            }
            for group in optimizer.get("groups", ())
            if isinstance(group, dict) and isinstance(group.get("params", ()), (list, tuple))
        ]
        for optimizer in optimizers
        if isinstance(optimizer, dict) and isinstance(optimizer.get("groups", ()), (list, tuple))
    ]
