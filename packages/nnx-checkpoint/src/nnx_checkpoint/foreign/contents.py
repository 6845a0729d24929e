"""Collect the tensors and objects of a foreign checkpoint under logical names, and read them.

A format's reader passes state dicts and optimizer states to `Contents`, nested as its program does;
`Contents.opened` returns the `Checkpoint`. Optimizer states that number their parameters keep the numbers:
the resuming program knows the parameters' order, and a guess here could be wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from nnx_base.box import Box, find_fault
from nnx_base.errors import CheckpointError
from nnx_checkpoint.format.index import Piece, TensorEntry
from nnx_checkpoint.format.rankfile_header import DTYPES
from nnx_checkpoint.reading.fetching import Fetcher, PlainFiles, Wanted
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.storage.files import FileReader
from nnx_checkpoint.unpickling.torch_file import FileTensor, load_torch_file, map_paths, map_tree


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
    def omits_prefix(self) -> bool:
        return self._contents.omits_prefix

    @property
    @override
    def world_size(self) -> int:
        return self._world_size

    @property
    @override
    def own_ranks(self) -> Sequence[int]:
        return sorted(self._contents.rank_objects)

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
        with malformed_explained(self.path, self.format), ExitStack() as files:
            opened: dict[Path, FileReader] = {}
            for want in wanted:
                value = resident.get(want.entry.name)
                if isinstance(value, FileTensor):
                    if value.path not in opened:
                        opened[value.path] = files.enter_context(closing(FileReader(value.path)))
                    value = value.read(opened[value.path])
                if value is not None:
                    want.view.copy_(value[want.box.slices])
        direct = [self._contents.located(want) for want in wanted if want.entry.name not in resident]
        Fetcher(PlainFiles()).fetch(direct)


@dataclass(frozen=True, slots=True)
class Lifted:
    """A reference in a tree of objects to a tensor with a logical name."""

    name: str


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A tensor whose elements stay in several files or ranges.

    Attributes:
        shape: Its shape.
        dtype: Its element type.
        pieces: Its boxes, each with the position of its elements in row-major order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def entry(self, name: str) -> TensorEntry:
        """Return the tensor's entry for the index."""
        return TensorEntry(name, self.shape, str(self.dtype).removeprefix("torch."), self.pieces)

    def read(self) -> Tensor:
        """Read the tensor into new memory."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        Fetcher(PlainFiles()).fetch([Wanted(self.entry(""), Box.whole(self.shape), tensor)])
        return tensor


IN_FILES = (FileTensor, LocatedTensor)
TENSORS = (*IN_FILES, Tensor)
"""The forms of a tensor in the state dicts of `Contents`."""


class Contents:
    """The logical contents of a foreign checkpoint, collected step by step.

    Args:
        path: The checkpoint.
        format: Name of its format.
    """

    def __init__(self, path: str | os.PathLike[str], format: str) -> None:
        self.path = Path(path)
        self.format = format
        self.entries: dict[str, TensorEntry] = {}
        self.resident: dict[str, FileTensor | Tensor] = {}
        """Tensors in memory, and tensors with gaps in the file, which are read completely."""
        self.aliases: dict[str, str] = {}
        self.omits_prefix = False
        """The value of `Checkpoint.omits_prefix`."""
        self.objects: dict[str, Any] = {"trainer": {}}
        """The common objects; `opened` names the tensors in them."""
        self.rank_objects: dict[int, Any] = {}
        """The objects of single ranks; `opened` names the tensors in them."""
        self._places: dict[tuple[Any, ...], str] = {}
        self._permuted: dict[str, tuple[tuple[int, ...], TensorEntry]] = {}

    def add(self, name: str, value: FileTensor | LocatedTensor | Tensor) -> None:
        """Add a complete tensor under a logical name."""
        if isinstance(value, LocatedTensor) or (isinstance(value, FileTensor) and value.is_contiguous):
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
        """Return the same box in the coordinates of the stored tensor, whose dims may be in another order."""
        if wanted.entry.name not in self._permuted:
            return wanted
        order, entry = self._permuted[wanted.entry.name]
        box = Box(*(tuple(extents[d] for d in order) for extents in (wanted.box.offset, wanted.box.size)))
        return Wanted(entry, box, wanted.view.permute(order))

    def add_pieces(self, name: str, shape: Sequence[int], dtype_name: str, pieces: Iterable[Piece]) -> None:
        """Add a tensor that is partitioned over one or several files.

        Raises:
            CheckpointError: The pieces do not partition the tensor: a file is missing.
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
        """Add a module's state dict; names with the same position in a file are tied."""
        extra = self.objects.setdefault("extra", {})
        for name, value in state_dict.items():
            key = f"model.{name}"
            if not isinstance(value, TENSORS):
                extra[name] = value
                continue
            place = _place(value)
            if place is not None and place in self._places:
                self.aliases[key] = self._places[place]
                continue
            if place is not None:
                self._places[place] = key
            self.add(key, value)

    def add_optimizer(
        self, state: Mapping[str, Any], names: Sequence[str] | Mapping[Any, str] | None = None
    ) -> None:
        """Add the next optimizer: ``state`` and ``param_groups`` as torch has them, named or numbered.

        Args:
            state: The result of ``Optimizer.state_dict()``; further keys are kept too.
            names: The names of parameters 0, 1, ... of the groups, or a mapping of them. By default the
                groups' ``param_names`` (torch stores them for optimizers built from ``named_parameters``)
                replace the numbers, if they are names of the model added before. Names relative to a
                submodule are not.
        """
        optimizers = self.objects.setdefault("optim", [])
        prefix = f"optim.{len(optimizers)}.state"
        renamed = self._names_by_number(state["param_groups"], names)
        values: dict[Any, dict[str, Any]] = {}
        for parameter, entries in state["state"].items():
            name = renamed.get(parameter, parameter)
            for key, value in entries.items():
                if isinstance(value, TENSORS):
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
        self, groups: Sequence[Mapping[str, Any]], names: Sequence[str] | Mapping[Any, str] | None
    ) -> Mapping[Any, str]:
        if names is not None:
            return names if isinstance(names, Mapping) else dict(enumerate(names))
        found: dict[Any, str] = {}
        for group in groups:
            if "param_names" in group:
                found.update(zip(group["params"], group["param_names"], strict=True))
        known = {*self.entries, *self.aliases}
        return found if all(f"model.{name}" in known for name in found.values()) else {}

    def set_trainer(self, rest: Mapping[str, Any]) -> None:
        """Set the remaining entries of a Lightning checkpoint."""
        self.objects["trainer"] = dict(rest)

    def opened(
        self, *, world_size: int = 1, provenance: Mapping[str, Any] | None = None
    ) -> ForeignCheckpoint:
        """Name the tensors in objects, check that all can be read, and return the checkpoint.

        Raises:
            CheckpointError: A tensor has an unsupported element type.
        """
        self.objects = self._lift(self.objects, "objects")
        self.rank_objects = {
            rank: self._lift(tree, f"rank.{rank}") for rank, tree in self.rank_objects.items()
        }
        for alias, name in self.aliases.items():
            if name not in self.entries:
                raise CheckpointError(
                    f"'{self.path}' has the name '{alias}' for tensor '{name}', which is missing.",
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
        """Name every tensor of a tree by its path, like `Encoder`."""

        def lift(path: tuple[str, ...], value: Any) -> Any:
            if not isinstance(value, TENSORS):
                return value
            name = wanted = ".".join((prefix, *path))
            number = 1
            while name in self.entries:
                number += 1
                name = f"{wanted}#{number}"
            self.add(name, value)
            return Lifted(name)

        return map_paths(tree, lift)


def _place(value: FileTensor | LocatedTensor | Tensor) -> tuple[Any, ...] | None:
    """Return the key that two tied tensors share; None for a tensor without elements."""
    if isinstance(value, LocatedTensor):
        return value.pieces or None
    if isinstance(value, FileTensor):
        return (value.path, value.start, value.shape, value.stride, value.dtype) if value.numel else None
    if value.numel() == 0:
        return None
    return (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)


def load_rank_file(
    path: Path, *, weights_only: bool, own: Collection[str], inert: Sequence[str] = ()
) -> dict[str, Any]:
    """Read a rank's file, leaving its tensors in the file, even with ``weights_only=False``.

    Args:
        path: The file.
        weights_only: False executes code of entries under other keys than `own`.
        own: The keys of the program that wrote the file. Their entries are always restricted to safe classes.
        inert: Prefixes of the names of the program's own classes.

    Raises:
        CheckpointError: The file is missing or damaged, is no dict, or needs ``weights_only=False``.
    """
    try:
        loaded = load_torch_file(path, inert=inert)
    except CheckpointError:
        if weights_only:
            raise
        located = load_torch_file(path, inert=("",))
        trusted = load_torch_file(path, weights_only=False)
        loaded = {key: located[key] if key in own else value for key, value in trusted.items()}
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"'{path}' holds a {type(loaded).__name__}, expected the dict of one rank.",
            remedy="Restore it from a backup, or use another checkpoint.",
        )
    return dict(loaded)


@contextmanager
def malformed_explained(path: Any, program: str) -> Iterator[None]:
    """Context manager that converts errors of unexpected nested data into one that names the files."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        IndexError,
        KeyError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(
            f"'{path}' differs from the format of {program}: {type(error).__name__}: {error}.",
            remedy=f"Restore it from a backup. If it is intact, it is from a {program} version that nnx does "
            "not know: merge it with that program first.",
        ) from error
