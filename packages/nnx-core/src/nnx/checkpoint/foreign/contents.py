"""Gathering what a foreign checkpoint holds under the logical names, and reading it from there.

A format's reader hands state dicts and optimizer states to `Contents`, as its program nests them;
`Contents.opened` gives the `Checkpoint`. Optimizer states that number their parameters keep the numbers:
whoever resumes knows the parameters' order, and a guess could be wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from nnx.box import Box, find_fault
from nnx.checkpoint.dtypes import DTYPES
from nnx.checkpoint.foreign.torch_file import FileTensor, map_paths, map_tree
from nnx.checkpoint.index import Piece, TensorEntry
from nnx.checkpoint.reader import Checkpoint, Fetcher, PlainFiles, Wanted
from nnx.errors import CheckpointError

__all__ = ["Contents", "ForeignCheckpoint", "Lifted"]


class ForeignCheckpoint(Checkpoint):
    """An opened checkpoint of another program; made by `Contents.opened`."""

    def __init__(self, contents: Contents, *, world_size: int, provenance: Mapping[str, Any]) -> None:
        self.path = contents.path
        self.format = contents.format
        self._contents = contents
        self._world_size = world_size
        self._provenance = provenance

    @property
    @override
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._contents.entries

    @property
    @override
    def aliases(self) -> Mapping[str, str]:
        return self._contents.aliases

    @property
    @override
    def world_size(self) -> int:
        return self._world_size

    @property
    @override
    def provenance(self) -> Mapping[str, Any]:
        return self._provenance

    @override
    def tree(self, rank: int | None, tensor: Callable[[str], Any]) -> Any:
        held = self._contents.objects if rank is None else self._contents.rank_objects.get(rank)
        return map_tree(held, lambda value: tensor(value.name) if isinstance(value, Lifted) else value)

    @override
    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        resident = self._contents.resident
        for want in wanted:
            value = resident.get(want.entry.name)
            if value is not None:
                tensor = value.read() if isinstance(value, FileTensor) else value
                want.view.copy_(tensor[want.box.slices])
        direct = [self._contents.located(want) for want in wanted if want.entry.name not in resident]
        Fetcher(PlainFiles()).fetch(direct)


@dataclass(frozen=True, slots=True)
class Lifted:
    """Stands in a tree of objects for a tensor that has a logical name."""

    name: str


class Contents:
    """The logical contents of a foreign checkpoint, filled part by part.

    Args:
        path: The checkpoint.
        format: Name of its format.
    """

    def __init__(self, path: str | os.PathLike[str], format: str) -> None:
        self.path = Path(path)
        self.format = format
        self.entries: dict[str, TensorEntry] = {}
        self.resident: dict[str, FileTensor | Tensor] = {}
        """Tensors in memory, and those whose elements have gaps in the file and are read as a whole."""
        self.aliases: dict[str, str] = {}
        self.objects: dict[str, Any] = {"trainer": {}}
        """The common objects; tensors in them, of either kind, are given names by `opened`."""
        self.rank_objects: dict[int, Any] = {}
        """The objects of single ranks, likewise."""
        self._places: dict[tuple[Any, ...], str] = {}
        self._permuted: dict[str, tuple[tuple[int, ...], TensorEntry]] = {}

    def add(self, name: str, value: FileTensor | Tensor) -> None:
        """Add a complete tensor under a logical name."""
        if isinstance(value, FileTensor) and value.is_contiguous:
            self.entries[name] = value.entry(name)
            return
        dtype = str(value.dtype).removeprefix("torch.")
        self.entries[name] = TensorEntry(name, tuple(value.shape), dtype, ())
        order = value.order if isinstance(value, FileTensor) else None
        if isinstance(value, FileTensor) and order is not None:
            self._permuted[name] = (order, value.permute(order).entry(name))
        else:
            self.resident[name] = value if isinstance(value, FileTensor) else value.detach()

    def located(self, wanted: Wanted) -> Wanted:
        """The same box in the coordinates of what is stored, whose dims may be in another order."""
        if wanted.entry.name not in self._permuted:
            return wanted
        order, entry = self._permuted[wanted.entry.name]
        box = Box(*(tuple(extents[d] for d in order) for extents in (wanted.box.offset, wanted.box.size)))
        return Wanted(entry, box, wanted.view.permute(order))

    def add_pieces(self, name: str, shape: Sequence[int], dtype_name: str, pieces: Iterable[Piece]) -> None:
        """Add a tensor that lies in parts in one or several files.

        Raises:
            CheckpointError: The parts do not make up the tensor: a file is missing.
        """
        entry = TensorEntry(name, tuple(shape), dtype_name, tuple(pieces))
        fault = find_fault(entry.shape, entry.copies)
        if fault:
            raise CheckpointError(
                f"the files of '{self.path}' do not make up tensor '{name}' of shape {entry.shape}: {fault}.",
                remedy="Make sure that the files of all ranks are there.",
            )
        self.entries[name] = entry

    def add_model(self, state_dict: Mapping[str, Any]) -> None:
        """Add a module's state dict; names that share their place in a file are tied."""
        extra = self.objects.setdefault("extra", {})
        for name, value in state_dict.items():
            key = f"model.{name}"
            if not isinstance(value, (FileTensor, Tensor)):
                extra[name] = value
                continue
            place = _place(value)
            if place is not None and place in self._places:
                self.aliases[key] = self._places[place]
                continue
            if place is not None:
                self._places[place] = key
            self.add(key, value)

    def add_optimizer(self, state: Mapping[str, Any], names: Sequence[str] | None = None) -> None:
        """Add the next optimizer: ``state`` and ``param_groups`` as torch has them, named or numbered.

        Args:
            state: As ``Optimizer.state_dict()`` gives it; further keys are kept too.
            names: What parameter 0, 1, ... of the groups is called. Where they are not given and the groups
                hold ``param_names`` (torch stores them for optimizers built from ``named_parameters``),
                these replace the numbers, if they are names of the model added before: those of one of
                its parts are not.
        """
        optimizers = self.objects.setdefault("optim", [])
        prefix = f"optim.{len(optimizers)}.state"
        renamed = self._names_by_number(state["param_groups"], names)
        values: dict[Any, dict[str, Any]] = {}
        for parameter, entries in state["state"].items():
            name = renamed.get(parameter, parameter)
            for key, value in entries.items():
                if isinstance(value, (FileTensor, Tensor)):
                    self.add(f"{prefix}.{name}.{key}", value)
                else:
                    values.setdefault(name, {})[key] = value
        groups = [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [renamed.get(parameter, parameter) for parameter in group["params"]],
            }
            for group in state["param_groups"]
        ]
        optimizers.append({"groups": groups, "values": values})
        other = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
        if other:
            optimizers[-1]["other"] = other

    def _names_by_number(
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[str] | None
    ) -> dict[Any, str]:
        if names is not None:
            return dict(enumerate(names))
        found: dict[Any, str] = {}
        for group in groups:
            if "param_names" in group:
                found.update(zip(group["params"], group["param_names"], strict=True))
        known = {*self.entries, *self.aliases}
        return found if all(f"model.{name}" in known for name in found.values()) else {}

    def set_trainer(self, rest: Mapping[str, Any]) -> None:
        """Set what remains of Lightning's dict."""
        self.objects["trainer"] = dict(rest)

    def opened(
        self, *, world_size: int = 1, provenance: Mapping[str, Any] | None = None
    ) -> ForeignCheckpoint:
        """The checkpoint, after naming the tensors in objects and making sure that all can be read.

        Raises:
            CheckpointError: A tensor has an element type that nothing here can read.
        """
        self.objects = self._lift(self.objects, "objects")
        self.rank_objects = {
            rank: self._lift(tree, f"rank.{rank}") for rank, tree in self.rank_objects.items()
        }
        for alias, name in self.aliases.items():
            if name not in self.entries:
                raise CheckpointError(
                    f"'{self.path}' holds the name '{alias}' for tensor '{name}', which it does not hold.",
                    remedy="Restore it from a backup, or use another checkpoint.",
                )
        for entry in self.entries.values():
            if entry.dtype_name not in DTYPES:
                raise CheckpointError(
                    f"tensor '{entry.name}' of '{self.path}' has element type {entry.dtype_name}, "
                    "which is not supported.",
                    remedy=f"Convert it to one of {', '.join(DTYPES)} with the program that wrote it.",
                )
        return ForeignCheckpoint(self, world_size=world_size, provenance=provenance or {})

    def _lift(self, tree: Any, prefix: str) -> Any:
        """Give every tensor of a tree a name that says where it stands, as `Encoder` does."""

        def lift(path: tuple[str, ...], value: Any) -> Any:
            if not isinstance(value, (FileTensor, Tensor)):
                return value
            name = wanted = ".".join((prefix, *path))
            number = 1
            while name in self.entries:
                number += 1
                name = f"{wanted}#{number}"
            self.add(name, value)
            return Lifted(name)

        return map_paths(tree, lift)


def _place(value: FileTensor | Tensor) -> tuple[Any, ...] | None:
    """What two tied tensors have in common; None for a tensor without elements."""
    if isinstance(value, FileTensor):
        return (value.path, value.start, value.shape, value.stride, value.dtype) if value.numel else None
    if value.numel() == 0:
        return None
    return (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
