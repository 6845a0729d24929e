"""`nnx.CheckpointIO`: Trainer's checkpoints in nnx's format, under any strategy.

Strategies of nnx save from all ranks (`save_lightning_checkpoint`). Lightning's own, such as ``ddp``, call
`CheckpointIO.save_checkpoint` on rank zero with unsharded tensors. Both write the same format, resume each
other's runs, and can save in the background.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, Literal

import torch

import nnx_checkpoint as storage
from nnx_base.ranks import control_group, together
from nnx_checkpoint.format.inflight import after_save, settle
from nnx_checkpoint.loop import with_states
from nnx_checkpoint.reading.naming import (
    FABRIC_KEYS,
    RANKS,
    LazyStateDict,
    Saved,
    StoredName,
    StoredRanks,
    collect,
    numbered_optimizer_state,
    positional_optimizer_state,
    stored_objects,
    stored_optimizer_states,
)
from nnx_checkpoint.reading.state import OptimizerState
from nnx_checkpoint.storage.locations import place_of
from nnx_checkpoint.writing.background import release, save_async
from nnx_checkpoint.writing.request import SaveRequest
from nnx_checkpoint.writing.writer import save
from nnx_core.errors import CheckpointError
from nnx_core.options import StateDictType, check_choice, check_interval

_instances: weakref.WeakSet[CheckpointIO] = weakref.WeakSet()


def exists() -> bool:
    """Return True if this process has made a `CheckpointIO`."""
    return len(_instances) > 0


class CheckpointIO:
    """Reads and writes checkpoint directories of nnx, and reads Lightning's single files.

    Args:
        state_dict_type: ``"deduped"`` stores each element once over the ranks, ``"sharded"`` the complete
            local state of every rank.
        opaque_objects: ``"error"`` refuses objects without a JSON form; ``"pickle"`` stores them, and only
            torch's restricted unpickler loads them.
        resume_data: The position of the training data after a resume inside an epoch, under Lightning's own
            strategies: ``"skip"`` skips seen samples, ``"restart"`` starts over. Strategies of nnx have an
            option of this name.
        strict_rng: Refuse to resume if the random state cannot resume exactly, under Lightning's own
            strategies.
        async_save: Save in the background. During a run of Trainer, a later step or the end of the run raises
            its errors, and removed checkpoints stay until the next one is on disk. After the run saves wait.
        memory_checkpoint: Copy the state to the memory of two hosts after every so many optimizer steps,
            under Lightning's own strategies. Strategies of nnx have an option of this name.
        memory_directory: The directory of each host whose files are in memory.

    Example:
        ``Trainer(strategy="ddp", plugins=[nnx.CheckpointIO()])``
    """

    def __init__(
        self,
        *,
        state_dict_type: StateDictType = "deduped",
        opaque_objects: Literal["error", "pickle"] = "error",
        resume_data: Literal["skip", "restart"] = "skip",
        strict_rng: bool = False,
        async_save: bool = False,
        memory_checkpoint: int | None = None,
        memory_directory: str = "/dev/shm",
    ) -> None:
        self.state_dict_type: StateDictType = state_dict_type
        self.opaque_objects: Literal["error", "pickle"] = opaque_objects
        check_choice("resume_data", resume_data, ("skip", "restart"))
        self.resume_data: Literal["skip", "restart"] = resume_data
        self.strict_rng = strict_rng
        self.async_save = async_save
        check_interval(memory_checkpoint)
        self.memory_checkpoint, self.memory_directory = memory_checkpoint, memory_directory
        self._run_has_ended = False
        self._join_lightning()
        _instances.add(self)

    @classmethod
    def _join_lightning(cls) -> None:
        """Register as a CheckpointIO with every copy of Lightning in this process, without inheriting."""
        roots = [root for root in ("lightning.fabric", "lightning_fabric") if root in sys.modules]
        for root in roots or ["lightning.fabric"]:
            importlib.import_module(f"{root}.plugins.io.checkpoint_io").CheckpointIO.register(cls)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint from this process alone.

        Args:
            checkpoint: Lightning's dict, with unsharded tensors.
            path: The directory to write; an existing checkpoint of nnx is replaced atomically.
            storage_options: Not supported.

        Raises:
            CheckpointError: An optimizer's parameters have no names, or writing failed.
        """
        refuse_storage_options(storage_options)
        self._save(collect_unsharded(checkpoint), path, provenance={}, collective=False)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read all of a checkpoint, as Lightning's dict.

        Args:
            path: A checkpoint of any known format.
            map_location: Passed to ``torch.load`` for files that Trainer did not write; other tensors are on
                CPU.
            weights_only: False executes code in the checkpoint; otherwise loading is safe.

        Raises:
            CheckpointError: There is no checkpoint, or it is damaged.
        """
        if self.async_save:
            settle_together()
        stored = storage.open_checkpoint(path, weights_only=weights_only is not False)
        if not has_logical_names(stored):
            return load_single_file(path, map_location, weights_only)
        checkpoint = dict(stored_objects(stored, "trainer"))
        if stored.format != "nnx" or FABRIC_KEYS in checkpoint:
            # Trainer requires these entries; checkpoints of Fabric and Lite lack them.
            required = {"pytorch-lightning_version": version("lightning"), "lr_schedulers": []}
            checkpoint = {**required, **checkpoint}
        state_dict = dict(LazyStateDict(stored))
        if state_dict:
            checkpoint["state_dict"] = state_dict
        states = stored_optimizer_states(stored)
        if states is not None:
            read = map(read_optimizer_state, states)
            checkpoint["optimizer_states"] = [numbered_optimizer_state(state) for state in read]
        ranks = StoredRanks(stored)
        if len(ranks) > 0:
            checkpoint[RANKS] = ranks
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint, if there is one.

        During a background save the deletion follows its commit. If the save fails, the checkpoint stays, so
        the last complete one is never deleted.
        """
        after_save(f"removing '{path}'", place_of(path).remove)

    def start_run(self) -> None:
        """Allow background saves until `teardown`: the steps of the run raise their errors."""
        self._run_has_ended = False

    def wait(self) -> None:
        """Wait for the save in flight. Collective if the save is.

        Raises:
            CheckpointError: The save failed.
        """
        settle()

    def teardown(self) -> None:
        """Wait for the save in flight, and free the memory of its copy.

        Raises:
            CheckpointError: The save failed.
        """
        self._run_has_ended = True
        settle()
        release()

    def save_sharded(self, saved: Saved, path: Any, *, provenance: Mapping[str, Any]) -> None:
        """Write a checkpoint from all ranks. Collective.

        Args:
            saved: This rank's shards, and the objects of rank zero.
            path: The directory to write; an existing checkpoint of nnx is replaced atomically.
            provenance: Metadata about the run, without influence on loading.
        """
        self._save(saved, path, provenance=provenance, collective=True)

    def _save(self, saved: Saved, path: Any, *, provenance: Mapping[str, Any], collective: bool) -> None:
        # After a save of this name Lightning asks SLURM to end the job, so the save must be complete.
        is_last = self._run_has_ended or place_of(path).name.startswith("hpc_ckpt_")
        request = SaveRequest(
            path,
            tensors=saved.tensors,
            objects=saved.objects,
            aliases=saved.aliases,
            rank_objects=saved.rank_objects,
            state_dict_type=self.state_dict_type,
            provenance=provenance,
            opaque=self.opaque_objects,
            collective=collective,
        )
        if self.async_save and not is_last:
            save_async(request)
        else:
            save(with_states(request))


def collect_unsharded(checkpoint: Mapping[str, Any]) -> Saved:
    """Collect Lightning's dict with unsharded tensors, as its own strategies pass it.

    Raises:
        CheckpointError: An optimizer's parameters have no names.
    """
    rest = dict(checkpoint)
    model = rest.pop("state_dict", None)
    states = rest.pop("optimizer_states", None)
    named = None if states is None else [_named(state, i) for i, state in enumerate(states)]
    return collect(model, named, rest)


def settle_together() -> None:
    """Wait for the save in flight, and raise its error on every rank. Collective."""
    with together(control_group(), doing="the save in the background"):
        settle()


def innermost_checkpoint_io(io: Any) -> CheckpointIO | None:
    """Return the `CheckpointIO` inside of wrappers such as ``AsyncCheckpointIO``; None if there is none."""
    while not isinstance(io, CheckpointIO) and getattr(io, "checkpoint_io", None) is not None:
        io = io.checkpoint_io
    return io if isinstance(io, CheckpointIO) else None


def has_logical_names(stored: storage.Checkpoint) -> bool:
    """Return True for a checkpoint with logical names; False for files of Fabric with the user's own keys."""
    if stored.format != "lightning":
        return True
    return "pytorch-lightning_version" in stored.tree(None, lambda name: name)["trainer"]  # reads no tensor


def load_single_file(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a file of ``torch.save`` unchanged, mapped into memory."""
    safe = weights_only is not False
    try:
        loaded: dict[str, Any] = torch.load(
            path, map_location=map_location or "cpu", weights_only=safe, mmap=True
        )
    except Exception as error:
        raise CheckpointError(
            f"cannot read {str(path)!r}: {type(error).__name__}: {error}",
            remedy="If you trust the file, pass `weights_only=False` to Trainer.fit." if safe else "",
        ) from error
    return loaded


def read_optimizer_state(state: Mapping[str, Any]) -> OptimizerState:
    """Read the tensors in an optimizer's state that are still on disk."""

    def read(value: Any) -> Any:
        if not isinstance(value, StoredName):
            return value
        return value.read()

    entries = {
        name: {key: read(value) for key, value in values.items()} for name, values in state["state"].items()
    }
    return OptimizerState(state=entries, param_groups=state["param_groups"])


def _named(state: Mapping[str, Any], index: int) -> OptimizerState:
    groups = state["param_groups"]
    if not all("param_names" in group for group in groups):
        raise CheckpointError(
            f"optimizer {index} numbers its parameters without names, so its state cannot be saved by name.",
            remedy="Build it from `self.named_parameters()`, or save through Trainer.",
        )
    names: dict[int, str] = {}
    for group in groups:
        names.update(zip(group["params"], group["param_names"], strict=True))
    return positional_optimizer_state(state, [names[number] for number in range(len(names))])


def refuse_storage_options(storage_options: Any) -> None:
    """Raise a `CheckpointError` for storage options, which nnx does not support."""
    if storage_options is not None:
        raise CheckpointError(
            f"storage_options={storage_options!r} is not supported by nnx.CheckpointIO.",
            remedy="Set options on `nnx.CheckpointIO(...)` or on the strategy instead.",
        )
