"""Checkpoints of nnx's strategies: all ranks save and load their shards.

Saving is collective and passes handles. Loading first opens the checkpoint, for hooks to read, and then reads
each rank's shards. If a step fails on one rank, it raises on all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.optim import Optimizer

import nnx_checkpoint as storage
from nnx_base.dtypes import as_bytes
from nnx_base.ranks import (
    all_gather_object,
    control_group,
    gather_object,
    is_distributed,
    rank_and_size,
    together,
)
from nnx_base.shard import Shard
from nnx_checkpoint.reading.loading import load_model
from nnx_checkpoint.reading.naming import (
    RANKS,
    LazyStateDict,
    Saved,
    StoredRanks,
    collect,
    numbered_optimizer_state,
    numbers_parameters,
    positional_optimizer_state,
    stored_objects,
    stored_optimizer_states,
)
from nnx_checkpoint.reading.state import as_state_dict, is_extra_state
from nnx_checkpoint.storage.locations import place_of
from nnx_core.backend import Backend
from nnx_core.errors import CheckpointError
from nnx_core.lightning.checkpoint import (
    CheckpointIO,
    has_logical_names,
    innermost_checkpoint_io,
    load_single_file,
    refuse_storage_options,
    settle_together,
)
from nnx_core.lightning.compat import WeightsOnDisk
from nnx_core.lightning.routing import unwrap_optimizer


def module_state_dict(backend: Backend[Any], module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict with handles on this rank's shards; tied names share one. Collective."""
    backend.sync_buffers(module)
    return as_state_dict(backend.model_state(module))


def save_lightning_checkpoint(
    strategy: Any,
    checkpoint: dict[str, Any],
    path: Any,
    storage_options: Any,
    *,
    own: dict[str, Any] | None = None,
) -> None:
    """Save Lightning's dict through the strategy's CheckpointIO. Collective.

    With `nnx.CheckpointIO` every rank writes its shards. Another IO gets unsharded tensors on rank zero, so
    every strategy can write a plain ``.ckpt`` file.

    Args:
        strategy: The strategy of the checkpoint.
        checkpoint: Lightning's dict.
        path: The path to write to.
        storage_options: Options for another IO than nnx's.
        own: The state of this rank alone, such as its random state; on all ranks or none.
    """
    io = strategy.checkpoint_io
    if isinstance(io, CheckpointIO):
        refuse_storage_options(storage_options)
        io.save_sharded(collect_shards(checkpoint, own), path, provenance=_provenance(strategy))
        return
    checkpoint, entries = split_rank_entries(checkpoint)
    if own is not None and entries:
        own = {**own, _ENTRIES: entries}
    full = _gather_tree(checkpoint, {})
    if own is not None:
        full[RANKS] = gather_object(own, control_group())
    with together(control_group(), doing=f"saving {str(path)!r}"):
        if strategy.is_global_zero:
            states = full.get("optimizer_states", ())
            if states:
                named = innermost_checkpoint_io(io) is not None
                full["optimizer_states"] = [numbered_optimizer_state(s, keep_names=named) for s in states]
            io.save_checkpoint(full, path, storage_options=storage_options)


def collect_shards(checkpoint: Mapping[str, Any], own: dict[str, Any] | None) -> Saved:
    """Collect this rank's shards of Lightning's dict, and the state of this rank alone. Collective.

    Args:
        checkpoint: Lightning's dict.
        own: See `save_lightning_checkpoint`.
    """
    rest, entries = split_rank_entries(checkpoint)
    saved = collect(rest.pop("state_dict", None), rest.pop("optimizer_states", None), rest)
    saved.rank_objects = {**own, _ENTRIES: entries} if own is not None and entries else own
    return saved


_ENTRIES = "entries"
"""The key, in the state of a single rank, of state dict entries that differ between ranks."""


def split_rank_entries(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split off replicated entries of the state dict that differ between ranks, such as metrics. Collective.

    Args:
        checkpoint: Lightning's dict.

    Returns:
        The dict with rank zero's values, as ``ddp`` saves it; and this rank's own values.
    """
    kept = dict(checkpoint)
    model: Any = kept.get("state_dict")
    found = {
        name: value.data[0] if isinstance(value, Shard) else value
        for name, value in (model.items() if isinstance(model, Mapping) else ())
        if (value.is_copy and value.is_whole if isinstance(value, Shard) else not is_extra_state(name))
    }
    digests = {name: _digest(value) for name, value in found.items()}
    if _is_equal_everywhere(digests):
        return kept, {}
    ranks = all_gather_object(digests, control_group())
    own = {name: value for name, value in found.items() if len({r.get(name) for r in ranks}) > 1}
    if own and rank_and_size(control_group())[0] != 0:
        empty = {name: replace(v, boxes=(), data=()) for name, v in model.items() if isinstance(v, Shard)}
        kept["state_dict"] = {name: empty.get(name, v) if name in own else v for name, v in model.items()}
    return kept, own


def _is_equal_everywhere(digests: Mapping[str, str]) -> bool:
    """Return True if all ranks have the same digests: one small message, where a gather takes two."""
    if not is_distributed():
        return True
    number = int(hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:14], 16)
    extremes = torch.tensor([number, -number], device="cpu")
    all_reduce(extremes, op=dist.ReduceOp.MAX, group=control_group())
    return bool(extremes.sum() == 0)


def _digest(value: Any) -> str:
    """Return a text that is equal for equal values."""
    if isinstance(value, Tensor):
        data = as_bytes(value.cpu()).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    if isinstance(value, (list, tuple)):
        return f"[{' '.join(_digest(item) for item in value)}]"
    return repr(value)


def take_rank_entries(checkpoint: Mapping[str, Any], rank: int, size: int) -> None:
    """Restore this rank's own entries of the state dict, if equally many ranks saved. Collective.

    Args:
        checkpoint: Lightning's dict.
        rank: The rank of this process.
        size: The number of processes.
    """
    ranks = checkpoint.get(RANKS, ())
    with together(control_group(), doing="reading the entries of each rank"):
        entries = ranks[0].get(_ENTRIES, {}) if len(ranks) > 0 else {}
        if entries and len(ranks) == size:
            checkpoint["state_dict"].update(ranks[rank][_ENTRIES])
        elif entries:
            rank_zero_warn(
                f"Each of the {len(ranks)} ranks that saved had its own {', '.join(entries)[:200]}: "
                f"all {size} ranks of this run get the values of rank 0."
            )


def _provenance(strategy: Any) -> dict[str, Any]:
    return {
        "strategy": strategy.name,
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "torch": torch.__version__,
        "lightning": _lightning_version(strategy),
        "nnx": version("nnx-core"),
    }


def _lightning_version(strategy: Any) -> str:
    distribution: str = strategy.root.partition(".")[0]
    return version(distribution)


def _gather_tree(value: Any, seen: dict[int, Tensor | None]) -> Any:
    """Replace every shard in a tree by the unsharded tensor on rank zero, and by None elsewhere.

    Args:
        value: The tree.
        seen: The replacements of shards, so that tied names share one tensor.
    """
    if isinstance(value, Shard):
        if id(value) not in seen:
            seen[id(value)] = gather_full(value)
        return seen[id(value)]
    if isinstance(value, dict):
        return {key: _gather_tree(item, seen) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_gather_tree(item, seen) for item in value)
    return value


def gather_full(shard: Shard, *, everywhere: bool = False) -> Any:
    """Gather a tensor in CPU memory, on rank zero or `everywhere`; None on other ranks. Collective."""
    own = [(box, view.detach().cpu()) for box, view in zip(shard.boxes, shard.data, strict=True)]
    gather = all_gather_object if everywhere else gather_object
    by_rank = gather(own, control_group())
    if by_rank is None:
        return None
    full = torch.empty(shard.shape, dtype=shard.dtype)
    for views in by_rank:
        for box, view in views:
            full[box.slices] = view
    return full


def open_together(
    strategy: Any, path: Any, weights_only: bool | None, *, is_for_trainer: bool = False
) -> storage.Checkpoint | dict[str, Any]:
    """Open a checkpoint of any format on every rank; raise on all if one rank cannot. Collective.

    Args:
        strategy: The strategy, whose CheckpointIO may read other formats.
        path: A checkpoint of any format.
        weights_only: False executes code in the checkpoint.
        is_for_trainer: True for Trainer, which reads only model, optimizers and its own entries, so that a
            file with the user's own keys needs no special treatment.

    Returns:
        The open checkpoint. For a file of ``torch.save`` that Trainer did not write, and for formats that
        only the user's own CheckpointIO reads: the saved dict.
    """
    io = strategy.checkpoint_io
    ours = innermost_checkpoint_io(io) is not None
    settle_together()
    with together(control_group(), doing=f"opening {str(path)!r}"):
        if ours or place_of(path).kind() == "directory":
            stored = storage.open_checkpoint(path, weights_only=weights_only is not False)
            is_understood = is_for_trainer or has_logical_names(stored)
            return stored if is_understood else load_single_file(path, None, weights_only)
        loaded: dict[str, Any] = io.load_checkpoint(path, weights_only=weights_only)
        return loaded


def load_lightning_checkpoint(strategy: Any, path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Open a checkpoint as Lightning's dict; its ``state_dict`` is read on use. Collective."""
    opened = open_together(strategy, path, weights_only, is_for_trainer=True)
    if isinstance(opened, dict):
        return opened
    stored = WeightsOnDisk(opened)
    # Trainer requires these entries, and checkpoints of other programs lack them.
    required = {"pytorch-lightning_version": _lightning_version(strategy), "lr_schedulers": []}
    checkpoint = {**required, **stored_objects(stored, "trainer")}
    checkpoint["state_dict"] = LazyStateDict(stored)
    states = stored_optimizer_states(stored)
    if states is None and stored.format == "hf":
        states = []  # pretrained weights: training starts from them
    if states is not None:
        checkpoint["optimizer_states"] = states
    ranks = StoredRanks(stored)
    if len(ranks) > 0:
        checkpoint[RANKS] = ranks
    return checkpoint


def restore_model(
    backend: Backend[Any], module: nn.Module, source: Mapping[str, Any], *, strict: bool
) -> None:
    """Load a state dict: parameters and buffers in place, other entries by the module. Collective."""
    load_model(
        module,
        backend.model_state(module),
        source,
        strict=strict,
        group=control_group(),
        device=backend.context.device,
        filled=lambda: backend.finish_load(module, []),
    )


def restore_optimizers(
    backend: Backend[Any], module: nn.Module, optimizers: Sequence[Any], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Fill the state of every optimizer in place, by parameter name. Collective.

    Args:
        backend: The engine.
        module: Owner of the parameters.
        optimizers: The optimizers to restore.
        saved: The state of each, by name, or numbered as torch's own.
    """
    if optimizers and not saved:
        rank_zero_warn(
            f"The checkpoint holds no optimizer state, as one that was saved without training: "
            f"{', '.join(type(unwrap_optimizer(each)).__name__ for each in optimizers)} starts without state."
        )
        return
    backend.model_state(module)  # reshard after a forward without backward, as of a summary
    with together(control_group(), doing="restoring the optimizers"):
        if len(optimizers) != len(saved):
            raise CheckpointError(
                f"this run has {len(optimizers)} optimizers and the checkpoint has {len(saved)}.",
                remedy="Return the same optimizers from `configure_optimizers` as when it was saved.",
            )
        for wrapped, state in zip(optimizers, saved, strict=True):
            optimizer = unwrap_optimizer(wrapped)
            backend.load_optimizer_state(module, optimizer, _by_name(backend, module, optimizer, state))
    backend.finish_load(module, [unwrap_optimizer(optimizer) for optimizer in optimizers])


def _by_name(backend: Backend[Any], module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> Any:
    """Convert a state in torch's numbered form to names, by the positions of the parameters."""
    if not numbers_parameters(state):
        return state
    groups = backend.optimizer_state(module, optimizer)["param_groups"]  # it may hold the engine's tensors
    order = [name for group in groups for name in group["params"]]
    saved = sum(len(group["params"]) for group in state["param_groups"])
    if saved != len(order):
        raise CheckpointError(
            f"{type(optimizer).__name__} has {len(order)} parameters and the checkpoint has {saved}.",
            remedy="Build the optimizer as it was when the checkpoint was saved.",
        )
    return positional_optimizer_state(state, order)
