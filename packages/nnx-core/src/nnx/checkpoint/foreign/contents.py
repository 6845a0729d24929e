"""Gathering what a foreign checkpoint holds under the logical names, and reading it from there.

A format's reader hands state dicts and optimizer states to `Contents`, as its program nests them;
`Contents.opened` gives the `Checkpoint`. Optimizer states that number their parameters keep the numbers:
whoever resumes knows the parameters' order, and a guess could be wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from nnx.box import find_fault
from nnx.checkpoint.dtypes import DTYPES
from nnx.checkpoint.fetch import Fetcher, PlainFiles, Wanted
from nnx.checkpoint.foreign.torch_file import FileTensor, read_tensors
from nnx.checkpoint.index import Piece, TensorEntry
from nnx.checkpoint.opened import Checkpoint
from nnx.errors import CheckpointError

__all__ = ["Contents", "ForeignCheckpoint"]


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
    def objects(self) -> Any:
        return self._contents.objects

    @property
    @override
    def world_size(self) -> int:
        return self._world_size

    @property
    @override
    def provenance(self) -> Mapping[str, Any]:
        return self._provenance

    @override
    def rank_objects(self, rank: int) -> Any | None:
        return None

    @override
    def _fetch(self, wanted: Sequence[Wanted]) -> None:
        resident = self._contents.resident
        for want in wanted:
            if want.entry.name in resident:
                want.view.copy_(resident[want.entry.name][want.box.slices])
        Fetcher(PlainFiles()).fetch([want for want in wanted if want.entry.name not in resident])


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
        self.resident: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.objects: dict[str, Any] = {"trainer": {}}
        self._places: dict[tuple[Any, ...], str] = {}

    def add(self, name: str, value: FileTensor | Tensor) -> None:
        """Add a complete tensor under a logical name."""
        if isinstance(value, FileTensor) and value.is_contiguous:
            self.entries[name] = value.entry(name)
            return
        tensor = value.read() if isinstance(value, FileTensor) else value.detach()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.entries[name] = TensorEntry(name, tuple(tensor.shape), dtype, ())
        self.resident[name] = tensor

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
                extra[name] = read_tensors(value)
                continue
            place = _place(value)
            if place is not None and place in self._places:
                self.aliases[key] = self._places[place]
                continue
            if place is not None:
                self._places[place] = key
            self.add(key, value)

    def add_optimizer(self, state: Mapping[str, Any]) -> None:
        """Add the next optimizer: ``state`` and ``param_groups`` as torch has them, named or numbered.

        Where the groups hold ``param_names`` (torch stores them for optimizers built from
        ``named_parameters``), these replace the numbers.
        """
        optimizers = self.objects.setdefault("optim", [])
        prefix = f"optim.{len(optimizers)}.state"
        names = _names_by_number(state["param_groups"])
        values: dict[Any, dict[str, Any]] = {}
        for parameter, entries in state["state"].items():
            name = names.get(parameter, parameter)
            for key, value in entries.items():
                if isinstance(value, (FileTensor, Tensor)):
                    self.add(f"{prefix}.{name}.{key}", value)
                else:
                    values.setdefault(name, {})[key] = read_tensors(value)
        groups = [
            {
                **{key: read_tensors(v) for key, v in group.items() if key != "param_names"},
                "params": [names.get(parameter, parameter) for parameter in group["params"]],
            }
            for group in state["param_groups"]
        ]
        optimizers.append({"groups": groups, "values": values})

    def set_trainer(self, rest: Mapping[str, Any]) -> None:
        """Set what remains of Lightning's dict, read completely."""
        self.objects["trainer"] = read_tensors(dict(rest))

    def opened(
        self, *, world_size: int = 1, provenance: Mapping[str, Any] | None = None
    ) -> ForeignCheckpoint:
        """The checkpoint, after making sure that every element type can be read.

        Raises:
            CheckpointError: A tensor has an element type that nothing here can read.
        """
        for entry in self.entries.values():
            if entry.dtype_name not in DTYPES:
                raise CheckpointError(
                    f"tensor '{entry.name}' of '{self.path}' has element type {entry.dtype_name}, "
                    "which is not supported.",
                    remedy=f"Convert it to one of {', '.join(DTYPES)} with the program that wrote it.",
                )
        return ForeignCheckpoint(self, world_size=world_size, provenance=provenance or {})


def _place(value: FileTensor | Tensor) -> tuple[Any, ...] | None:
    """What two tied tensors have in common; None for a tensor without elements."""
    if isinstance(value, FileTensor):
        return (value.path, value.start, value.shape, value.stride, value.dtype) if value.numel else None
    if value.numel() == 0:
        return None
    return (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)


def _names_by_number(groups: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    names: dict[Any, str] = {}
    for group in groups:
        if "param_names" in group:
            names.update(zip(group["params"], group["param_names"], strict=True))
    return names
