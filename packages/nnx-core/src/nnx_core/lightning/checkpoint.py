"""Lightning's checkpoints as shared ones: `nnx.CheckpointIO`, and saving and loading under nnx's strategies.

nnx's own strategies save from all ranks (`save_lightning_checkpoint`). Lightning's own, such as ``ddp``, call
`CheckpointIO.save_checkpoint` on rank 0 only, with complete tensors; the directory that results is the same
format, and each resumes under the other. Both save in the background on request.
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
from nnx_core.options import StateDictType, check_choice

_instances: weakref.WeakSet[CheckpointIO] = weakref.WeakSet()


def exists() -> bool:
    """Return True if this process has made a `CheckpointIO`."""
    return len(_instances) > 0


class CheckpointIO:
    """Reads and writes the nnx checkpoint directory; reads Lightning's single files too.

    Args:
        state_dict_type: ``"deduped"`` stores each element once over the ranks, ``"sharded"`` every rank's
            whole local state.
        opaque_objects: ``"error"`` refuses objects that have no JSON form; ``"pickle"`` stores them, to be
            loaded by torch's restricted unpickler only.
        resume_data: Under Lightning's own strategies, how training data goes on when a run is resumed inside
            an epoch; nnx's strategies have an option of this name.
        strict_rng: Likewise, refuse to resume where the random state cannot go on exactly.
        async_save: Save in the background. Within a run of Trainer, errors are raised at a later step or
            at its end, and removed checkpoints are kept until the next one is on disk. After the run, when
            there is nothing to overlap with, saving waits.

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
    ) -> None:
        self.state_dict_type: StateDictType = state_dict_type
        self.opaque_objects: Literal["error", "pickle"] = opaque_objects
        check_choice("resume_data", resume_data, ("skip", "restart"))
        self.resume_data: Literal["skip", "restart"] = resume_data
        self.strict_rng = strict_rng
        self.async_save = async_save
        self._run_has_ended = False
        self._join_lightning()
        _instances.add(self)

    @classmethod
    def _join_lightning(cls) -> None:
        """Be a CheckpointIO to every copy of Lightning in this process, without inheriting from one."""
        roots = [root for root in ("lightning.fabric", "lightning_fabric") if root in sys.modules]
        for root in roots or ["lightning.fabric"]:
            importlib.import_module(f"{root}.plugins.io.checkpoint_io").CheckpointIO.register(cls)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint from this process alone.

        Args:
            checkpoint: Lightning's dict, with complete tensors.
            path: Directory to write; an nnx checkpoint there is replaced atomically.
            storage_options: Not supported.

        Raises:
            CheckpointError: An optimizer's parameters have no names, or writing failed.
        """
        refuse_storage_options(storage_options)
        rest = dict(checkpoint)
        model = rest.pop("state_dict", None)
        states = rest.pop("optimizer_states", None)
        named = None if states is None else [_named(state, i) for i, state in enumerate(states)]
        self._save(collect(model, named, rest), path, provenance={}, collective=False)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint completely, as Lightning's dict.

        Args:
            path: A checkpoint of any known format.
            map_location: Passed to ``torch.load`` for files that Trainer did not write; else tensors are on
                the CPU.
            weights_only: Safe loading unless False, which executes what the checkpoint brings along.

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
            # What Trainer insists on, and neither Fabric's checkpoints nor Lite's have.
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
        """Delete a checkpoint; nothing happens where there is none.

        While a save is in flight this waits for its commit, in the background. If that save fails the
        checkpoint is kept, so that the last good one is never deleted.
        """
        after_save(f"removing '{path}'", place_of(path).remove)

    def start_run(self) -> None:
        """From now on somebody takes notice of background saves, until `teardown`."""
        self._run_has_ended = False

    def wait(self) -> None:
        """Wait for the save in flight; on every rank, if it was started on every rank.

        Raises:
            CheckpointError: It failed.
        """
        settle()

    def teardown(self) -> None:
        """Wait for the save in flight, and give the memory of its copy back.

        Raises:
            CheckpointError: It failed.
        """
        self._run_has_ended = True
        settle()
        release()

    def save_sharded(self, saved: Saved, path: Any, *, provenance: Mapping[str, Any]) -> None:
        """Write a checkpoint from all ranks. Collective.

        Args:
            saved: This rank's shards, and the objects of rank 0.
            path: Directory to write; an nnx checkpoint there is replaced atomically.
            provenance: Says who wrote it; nothing depends on it.
        """
        self._save(saved, path, provenance=provenance, collective=True)

    def _save(self, saved: Saved, path: Any, *, provenance: Mapping[str, Any], collective: bool) -> None:
        # After saving this one Lightning asks SLURM to end the job.
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


def settle_together() -> None:
    """Wait for the save in flight, and raise its error on every rank. Collective."""
    with together(control_group(), doing="the save in the background"):
        settle()


def innermost_checkpoint_io(io: Any) -> CheckpointIO | None:
    """Ours, in which a plugin such as ``AsyncCheckpointIO`` writes in the end; None if it is another's."""
    while not isinstance(io, CheckpointIO) and getattr(io, "checkpoint_io", None) is not None:
        io = io.checkpoint_io
    return io if isinstance(io, CheckpointIO) else None


def has_logical_names(stored: storage.Checkpoint) -> bool:
    """Return True if its own keys do not matter: what Fabric's users save has keys that they will ask for."""
    if stored.format != "lightning":
        return True
    return "pytorch-lightning_version" in stored.tree(None, lambda name: name)["trainer"]  # reads no tensor


def load_single_file(path: Any, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a file of ``torch.save`` as it is, mapped into memory rather than copied."""
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
    """An optimizer's state by name, its tensors read where they are on disk still."""

    def read(value: Any) -> Any:
        if not isinstance(value, StoredName):
            return value
        return value.stored.read(value.key)

    entries = {
        name: {key: read(value) for key, value in values.items()} for name, values in state["state"].items()
    }
    return OptimizerState(state=entries, param_groups=state["param_groups"])


def _named(state: Mapping[str, Any], index: int) -> OptimizerState:
    groups = state["param_groups"]
    if not all("param_names" in group for group in groups):
        raise CheckpointError(
            f"optimizer {index} numbers its parameters, and nothing says which number is which, so its state "
            "cannot be saved by name.",
            remedy="Build it from `self.named_parameters()`, or save through Trainer.",
        )
    names: dict[int, str] = {}
    for group in groups:
        names.update(zip(group["params"], group["param_names"], strict=True))
    return positional_optimizer_state(state, [names[number] for number in range(len(names))])


def refuse_storage_options(storage_options: Any) -> None:
    """Raise a `CheckpointError` for options that nothing would honour."""
    if storage_options is not None:
        raise CheckpointError(
            f"storage_options={storage_options!r} is not supported by nnx.CheckpointIO.",
            remedy="Set options on `nnx.CheckpointIO(...)` or on the strategy instead.",
        )
