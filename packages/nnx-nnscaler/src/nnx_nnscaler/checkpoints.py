"""Read nnScaler's checkpoints: directories of ``<rank>.pt`` by its Lightning strategy, and merged files.

Every rank's file names the slice of the original tensor behind each of its tensors. With ZeRO it also gives
the position in the optimizer's flat buffers. `_Shards` indexes files by these facts. It follows nnScaler
0.8's source: no file by nnScaler itself was available. Read only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from nnx_base.box import Box
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign.contents import Contents, ForeignCheckpoint, load_rank_file, malformed_explained
from nnx_checkpoint.foreign.flat_buffers import add_shared_state, pieces_of_range, spans_of_partitions
from nnx_checkpoint.format.index import Piece
from nnx_checkpoint.reading.formats import CheckpointFormat
from nnx_checkpoint.unpickling.torch_file import FileTensor, mentions

_RANK_FILE = re.compile(r"(\d+)\.pt")
_EXTRA = "nnscaler-extra-state"
_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"
_PLAN = "CUBE_EXTRA_STATE"
_OWN_CLASSES = ("nnscaler.", "cube.")


class NnScaler(CheckpointFormat):
    """A directory with a file for each rank, sharded or deduped, or the merged file."""

    name = "nnscaler"

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        place = Path(path)
        if place.is_dir():
            return mentions(place / "0.pt", _EXTRA)
        return mentions(place, _EXTRA)

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> ForeignCheckpoint:
        place = Path(path)
        with malformed_explained(path, "nnScaler"):
            if place.is_dir():
                return _open_directory(place, weights_only)
            return _open_merged(place, weights_only)


def _load(file: Path, weights_only: bool) -> dict[str, Any]:
    own = (_MODEL, _OPTIMIZERS, _EXTRA)
    loaded = load_rank_file(file, weights_only=weights_only, own=own, inert=_OWN_CLASSES)
    if _EXTRA not in loaded or _MODEL not in loaded:
        raise CheckpointError(
            f"'{file}' is not a file of nnScaler's Lightning strategy: it lacks '{_EXTRA}' or '{_MODEL}'.",
            remedy="Restore it from a backup, or use another checkpoint.",
        )
    return loaded


def _trainer(loaded: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in loaded.items() if key not in (_MODEL, _OPTIMIZERS, _EXTRA)}


def _open_merged(file: Path, weights_only: bool) -> ForeignCheckpoint:
    loaded = _load(file, weights_only)
    kind = loaded[_EXTRA]["state-dict-type"]
    if kind != "merged":
        raise CheckpointError(
            f"'{file}' is one rank's shard of a checkpoint of type '{kind}'.",
            remedy=f"Open its directory, '{file.parent}'.",
        )
    contents = Contents(file, NnScaler.name)
    contents.add_model(loaded[_MODEL])
    _add_rest_of_module(contents, loaded)
    for state in loaded.get(_OPTIMIZERS, ()):
        contents.add_optimizer({key: state[key] for key in ("state", "param_groups")})
    contents.set_trainer(_trainer(loaded))
    return contents.opened(provenance={"format": NnScaler.name, "state_dict_type": kind})


def _add_rest_of_module(contents: Contents, loaded: Mapping[str, Any]) -> None:
    """Return the LightningModule's state beside the parallelized module, such as metrics."""
    rest = loaded[_EXTRA].get("pl_state_dict", {})
    known = {*contents.entries, *contents.aliases}
    contents.add_model({name: value for name, value in rest.items() if f"model.{name}" not in known})


def _open_directory(directory: Path, weights_only: bool) -> ForeignCheckpoint:
    first = _load(directory / "0.pt", weights_only)
    config = _plan(first, directory / "0.pt")["compute_config"]
    _refuse_other_plans(config, directory)
    files = {0: first}
    for rank in range(1, max(_writers(config))):
        files[rank] = _load(directory / f"{rank}.pt", weights_only)
    _require_same_step(directory, files)
    contents = Contents(directory, NnScaler.name)
    shards = _Shards(directory, [files[rank] for rank in sorted(files)])
    shards.add_model(contents)
    _add_rest_of_module(contents, first)
    if first.get(_OPTIMIZERS):
        shards.add_optimizer(contents)
    contents.set_trainer(_trainer(first))
    origin = {
        "format": NnScaler.name,
        "state_dict_type": first[_EXTRA]["state-dict-type"],
        "plan_ngpus": config["plan_ngpus"],
    }
    return contents.opened(world_size=int(config["runtime_ngpus"]), provenance=origin)


def _plan(loaded: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Return nnScaler's notes about its plan, for a completely parallelized module."""
    prefixes = [name.removesuffix(_PLAN) for name in loaded[_MODEL] if name.endswith(_PLAN)]
    if prefixes != [""]:
        raise CheckpointError(
            f"'{file}' holds parallel modules at {prefixes}, expected the whole LightningModule to be one.",
            remedy="Merge it with nnScaler first (`NnScalerStrategy.merge_checkpoint`).",
        )
    plan: Mapping[str, Any] = loaded[_MODEL][_PLAN]
    return plan


def _refuse_other_plans(config: Mapping[str, Any], directory: Path) -> None:
    if int(config["use_zero"]) > 1:
        raise CheckpointError(
            f"'{directory}' was written with use_zero={config['use_zero']}, which splits the weights in a "
            "layout that nnx does not know.",
            remedy="Merge it with nnScaler first (`NnScalerStrategy.merge_checkpoint`).",
        )


def _writers(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many of the first ranks hold the complete model and the complete optimizer state."""
    plan, world = int(config["plan_ngpus"]), int(config["runtime_ngpus"])
    return plan, world // int(config["zero_ngroups"]) if config["use_zero"] else plan


def _require_same_step(directory: Path, files: Mapping[int, Mapping[str, Any]]) -> None:
    steps = {rank: loaded.get("global_step") for rank, loaded in files.items()}
    if len(set(steps.values())) > 1:
        raise CheckpointError(
            f"the files of '{directory}' are from different steps, {steps} by rank: a save was interrupted.",
            remedy="Restore the directory from a backup, or use another checkpoint.",
        )


class _Shards:
    """The shards of the ranks.

    Args:
        directory: The directory, for messages.
        files: The files of the ranks, in order of rank.
    """

    def __init__(self, directory: Path, files: Sequence[Mapping[str, Any]]) -> None:
        self._directory = directory
        self._plans = [_plan(loaded, directory / f"{rank}.pt") for rank, loaded in enumerate(files)]
        self._models = [loaded[_MODEL] for loaded in files]
        self._optimizers = [(loaded.get(_OPTIMIZERS) or [None])[0] for loaded in files]
        self._config = self._plans[0]["compute_config"]
        self._planned = _writers(self._config)[0]
        self._stored_as = self._names()

    def _names(self) -> dict[str, str]:
        """Return the stored name in each name's group of tied names, by name in the original module."""
        first = self._plans[0]
        kept = set(first["origin_param_names"])
        stored = {name: name for name in (*first["origin_state_dict_names"], *first["origin_param_names"])}
        for group in first["origin_shared_param_names"]:
            chosen = next((name for name in group if name in kept), next(iter(group)))
            stored |= dict.fromkeys(group, chosen)
        return stored

    def _areas(self, rank: int) -> Iterator[tuple[str, Mapping[str, Any], Box]]:
        """Yield each tensor of a rank: its name there, its logical tensor, and its slice."""
        for local, area in self._plans[rank]["param_area_map"].items():
            if area["val_chunks"] != 1:
                raise CheckpointError(
                    f"rank {rank} of '{self._directory}' holds one of {area['val_chunks']} summands "
                    f"of tensor '{area['orig_name']}'.",
                    remedy="nnx cannot read values that are split into summands; use another plan.",
                )
            bounds = [
                slicer.indices(extent) for slicer, extent in zip(area["slicers"], area["shape"], strict=True)
            ]
            box = Box(tuple(a for a, _, _ in bounds), tuple(b - a for a, b, _ in bounds))
            yield local, area, box

    def add_model(self, contents: Contents) -> None:
        """Add parameters and buffers under their original names."""
        found: dict[str, list[Piece]] = {}
        kinds: dict[str, tuple[Sequence[int], str]] = {}
        for rank in range(self._planned):
            for local, area, box in self._areas(rank):
                value = self._models[rank].get(local)
                if not isinstance(value, FileTensor):
                    continue  # this buffer is not saved
                name = self._stored_as.get(area["orig_name"], area["orig_name"])
                kinds[name] = area["shape"], str(value.dtype).removeprefix("torch.")
                found.setdefault(name, []).extend(pieces_of_range(value, 0, box, 0, box.numel))
        for name, pieces in found.items():
            contents.add_pieces(f"model.{name}", *kinds[name], pieces)
        for name in self._plans[0]["origin_state_dict_names"]:
            stored = self._stored_as[name]
            if name != stored and stored in found:
                contents.aliases[f"model.{name}"] = f"model.{stored}"

    def add_optimizer(self, contents: Contents) -> None:
        """Add the optimizer; nnScaler has one, with one param group."""
        state = self._optimizers[0]
        if len(state["param_groups"]) != 1:
            raise CheckpointError(
                f"'{self._directory}' has several param groups, which nnScaler does not write."
            )
        states = _States(contents, self._optimizers)
        for rank in range(self._planned):
            parameters = [(area, box) for _, area, box in self._areas(rank) if area["is_param"]]
            for number, (area, box) in enumerate(parameters):
                name = self._stored_as.get(area["orig_name"], area["orig_name"])
                states.collect(name, area["shape"], box, self._places(rank, number, box))
        states.add()
        names = list(dict.fromkeys(self._stored_as[name] for name in self._plans[0]["origin_param_names"]))
        groups = [{**state["param_groups"][0], "params": names}]
        contents.objects["optim"] = [{"groups": groups, "values": states.values}]

    def _places(self, rank: int, number: int, box: Box) -> list[_Place]:
        """Return the places of the optimizer state for one parameter of a rank."""
        plan = self._plans[rank]
        offset = self._optimizers[rank][_PLAN]["parallel_module_locs"][""]["offset"]
        if not self._config["use_zero"]:
            return [_Place(rank, offset + number, 0, 0, box.numel)]
        found = plan["model_idx2opt_idx"].get(number)
        if found is None:
            return []  # the parameter requires no gradient
        if isinstance(found, int):
            return [_Place(rank, offset + found, 0, 0, box.numel)]
        bucket, first, last, _ = found
        ranks, size = plan["opt_idx2ranks"][bucket]
        spans = spans_of_partitions(first, last - first, size // len(ranks))
        return [_Place(ranks[s.rank], offset + bucket, s.position, s.start, s.stop) for s in spans]


@dataclass(frozen=True, slots=True)
class _Place:
    """A place of state: elements [start, stop) of a shard of a parameter, in a rank's state of one number."""

    rank: int
    number: int
    position: int
    start: int
    stop: int


class _States:
    """Optimizer state, collected shard by shard.

    Attributes:
        values: The values that are no tensors, by parameter.
    """

    def __init__(self, contents: Contents, optimizers: Sequence[Any]) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self._contents = contents
        self._optimizers = optimizers
        self._pieces: dict[str, list[Piece]] = {}
        self._kinds: dict[str, tuple[Sequence[int], str]] = {}
        self._seen: set[tuple[str, Box]] = set()

    def collect(self, name: str, shape: Sequence[int], box: Box, places: Sequence[_Place]) -> None:
        """Note the places of the state of one shard of a parameter, once if several ranks hold it."""
        if (name, box) in self._seen:
            return
        self._seen.add((name, box))
        for place in places:
            state = self._optimizers[place.rank]["state"].get(place.number, {})
            for key, value in state.items():
                self._collect(f"optim.0.state.{name}.{key}", name, shape, box, place, value)

    def _collect(
        self, key: str, name: str, shape: Sequence[int], box: Box, place: _Place, value: Any
    ) -> None:
        whole = isinstance(value, FileTensor) and (value.shape or box.numel == 1)
        if not whole or key.endswith(".step"):
            if key not in self._contents.entries:
                found = self.values.get(name, {})
                add_shared_state(self._contents, key, value, found)
                if found:
                    self.values[name] = found
            return
        self._kinds[key] = shape, str(value.dtype).removeprefix("torch.")
        pieces = pieces_of_range(value, place.position, box, place.start, place.stop)
        self._pieces.setdefault(key, []).extend(pieces)

    def add(self) -> None:
        """Add the collected tensors."""
        for key, pieces in self._pieces.items():
            self._contents.add_pieces(key, *self._kinds[key], pieces)
