"""Faults that the checks of the group `checkpoints` catch.

A `Backend` only describes and restores its state. Faults in writing, hooks and counters need strategies that
derive from Lightning's own.

"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

import nnx_checkpoint
from faults import EVERYTHING, fault
from nnx_base.shard import shard_of
from nnx_checkpoint.reading.naming import RANKS
from nnx_checkpoint.reading.state import ModelState, OptimizerState
from nnx_fsdp.backend import FSDPBackend
from nnx_tiny.backend import TinyBackend


class ForgottenMoments(TinyBackend):
    """Restores param groups, but not the optimizer's moments."""

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        super().load_optimizer_state(
            module, optimizer, OptimizerState(state={}, param_groups=saved["param_groups"])
        )


class StaleSteps(TinyBackend):
    """Lets the optimizer count its steps from zero."""

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        super().load_optimizer_state(module, optimizer, saved)
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].zero_()


class FirstGroupOnly(TinyBackend):
    """Restores the hyperparameters of the first param group only."""

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        kept = [dict(group) for group in optimizer.param_groups[1:]]
        super().load_optimizer_state(module, optimizer, saved)
        for group, before in zip(optimizer.param_groups[1:], kept, strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})


class FirstOptimizerOnly(TinyBackend):
    """Forgets the second optimizer of `TwoOptimizers`."""

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        if not isinstance(optimizer, SGD):
            super().load_optimizer_state(module, optimizer, saved)


class ForgottenBuffers(TinyBackend):
    """Neither saves nor restores buffers."""

    def model_state(self, module: nn.Module) -> ModelState:
        state = super().model_state(module)
        for name, _ in module.named_buffers():
            state.tensors.pop(name, None)
        return state


class RankZerosShard(FSDPBackend):
    """Loads rank 0's shard on every rank."""

    def finish_load(self, module: nn.Module, optimizers: Any) -> None:
        for parameter in module.parameters():
            if isinstance(parameter, DTensor):
                local = parameter.to_local().detach()
                shared = [local.clone()]
                dist.broadcast_object_list(shared, src=0)
                rows = min(len(local), len(shared[0]))
                local[:rows] = shared[0][:rows]


class OwnNames(TinyBackend):
    """Stores the names of its wrapper in the checkpoint."""

    def model_state(self, module: nn.Module) -> ModelState:
        state = super().model_state(module)
        state.tensors = {f"module.{name}": shard for name, shard in state.tensors.items()}
        return state


class OwnStateNames(TinyBackend):
    """Stores Adam's moments under names of its own."""

    _is_loading = False

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        state = super().optimizer_state(module, optimizer)
        return state if self._is_loading else _with_keys(state, {"exp_avg": "momentum"})

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        self._is_loading = True  # the core looks up the destination of loaded tensors
        super().load_optimizer_state(module, optimizer, _with_keys(saved, {"momentum": "exp_avg"}))
        self._is_loading = False


def _with_keys(state: OptimizerState, changes: dict[str, str]) -> OptimizerState:
    renamed = {
        name: {changes.get(key, key): value for key, value in entries.items()}
        for name, entries in state["state"].items()
    }
    return OptimizerState(state=renamed, param_groups=state["param_groups"])


class OwnEntry(TinyBackend):
    """Cannot resume without an entry that only its own checkpoints have."""

    def optimizer_state(self, module: nn.Module, optimizer: Optimizer) -> OptimizerState:
        state = super().optimizer_state(module, optimizer)
        for group in state["param_groups"]:
            group["owner"] = "tiny"
        return state

    def load_optimizer_state(self, module: nn.Module, optimizer: Optimizer, saved: OptimizerState) -> None:
        if any(group["owner"] != "tiny" for group in saved["param_groups"]):
            raise ValueError("not mine")
        super().load_optimizer_state(module, optimizer, saved)


class SameWorldSizeOnly(DDPStrategy):
    """Restores optimizers only at the world size of the save."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.is_same_size = len(checkpoint.get(RANKS, ())) == self.world_size
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self.is_same_size:
            super().load_optimizer_state_dict(checkpoint)


class LostSchedule(DDPStrategy):
    """Restarts the schedule of the learning rate."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        return {**checkpoint, "lr_schedulers": []}


class EvaluatesCurrentWeights(DDPStrategy):
    """Ignores the weights of a checkpoint unless it trains."""

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        if self.lightning_module.trainer.state.fn == "fit":
            super().load_model_state_dict(checkpoint, strict)


class ForgetsOptimizersAfterFit(DDPStrategy):
    """Drops its optimizers at the end of training, before a save after fit."""

    def teardown(self) -> None:
        self.optimizers = []
        super().teardown()


class SameRandomNumbers(TinyBackend):
    """Continues with the same random numbers on every rank."""

    _is_resumed = False

    def finish_load(self, module: nn.Module, optimizers: Any) -> None:
        self._is_resumed = True

    def run_step(self, module: nn.Module, step: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_resumed:
            self._is_resumed = False
            random.seed(1)
            np.random.seed(1)
            torch.manual_seed(1)
        return super().run_step(module, step, *args, **kwargs)


class ForgottenRandomNumbers(DDPStrategy):
    """Leaves random numbers and the position in the data out of its checkpoints."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        checkpoint.pop(RANKS, None)
        super().save_checkpoint(checkpoint, filepath, storage_options)


class DrawsWhileSaving(DDPStrategy):
    """Draws from the run's random numbers while saving."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        torch.rand(1)
        super().save_checkpoint(checkpoint, filepath, storage_options)


class DataStartsOver(DDPStrategy):
    """Resumes random numbers, but reads the data from the beginning of the epoch."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        for own in checkpoint.get(RANKS, ()):
            own["data"]["loaders"] = [{**one, "consumed": 0} for one in own["data"]["loaders"]]
        super().save_checkpoint(checkpoint, filepath, storage_options)


class SavesInPlace(DDPStrategy):
    """Removes the old checkpoint before it writes the new one."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.is_global_zero:
            shutil.rmtree(filepath, ignore_errors=True)
        super().save_checkpoint(checkpoint, filepath, storage_options)


class SavesOnce(DDPStrategy):
    """Does not overwrite a checkpoint."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not Path(filepath).exists():
            super().save_checkpoint(checkpoint, filepath, storage_options)


class SavesOptimizersAlways(DDPStrategy):
    """Saves optimizers although only weights were requested."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        names = {p: name for name, p in self.lightning_module.named_parameters()}
        if "optimizer_states" not in checkpoint:
            states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
            for optimizer, state in zip(self.optimizers, states, strict=True):
                for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                    saved["param_names"] = [names[parameter] for parameter in group["params"]]
            checkpoint["optimizer_states"] = states
            checkpoint["lr_schedulers"] = []
        super().save_checkpoint(checkpoint, filepath, storage_options)


class SavesTooLate(DDPStrategy):
    """Writes in the background the weights of a later step."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self.checkpoint_io.async_save:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.is_global_zero:
            self.late = checkpoint, filepath

    def teardown(self) -> None:
        if hasattr(self, "late"):
            self.checkpoint_io.save_checkpoint(*self.late)
        super().teardown()


class SavesRounded(DDPStrategy):
    """Writes weights in a smaller precision."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value.bfloat16().to(value.dtype) for name, value in weights.items()}
        super().save_checkpoint(checkpoint, filepath, storage_options)


class SavesEveryRank(DDPStrategy):
    """Stores every rank's own copy."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        weights = {f"model.{name}": shard_of(value) for name, value in checkpoint["state_dict"].items()}
        rest = {key: checkpoint[key] for key in ("global_step", "pytorch-lightning_version")}
        objects = {"trainer": rest, "extra": {}}
        nnx_checkpoint.save(filepath, tensors=weights, objects=objects, state_dict_type="sharded")


class BreaksWhatItSaved(DDPStrategy):
    """Changes a byte after writing."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            file = next(Path(filepath).rglob("*.safetensors"))
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)


class RemovesOnEveryRank(DDPStrategy):
    """Deletes old checkpoints from every rank."""

    def remove_checkpoint(self, filepath: Any) -> None:
        self.checkpoint_io.remove_checkpoint(filepath)


class RemovesNothing(DDPStrategy):
    """Keeps every checkpoint."""

    def remove_checkpoint(self, filepath: Any) -> None:
        """Keep the file."""


class HooksOnRankZero(DDPStrategy):
    """Passes hook entries to rank 0 only."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if not self.is_global_zero:
            checkpoint.pop("entry", None)
        return checkpoint


class ForgottenCallbacks(DDPStrategy):
    """Does not save the state of callbacks."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, "callbacks": {}}, filepath, storage_options)


class WrappedNames(DDPStrategy):
    """Shows hooks the names of its wrapper, and removes them from the checkpoint."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {f"module.{name}": value for name, value in super().lightning_module_state_dict().items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.removeprefix("module."): value for name, value in weights.items()}
        super().save_checkpoint(checkpoint, filepath, storage_options)


class LoadsBeforeHooks(DDPStrategy):
    """Loads the weights from before the hooks' changes."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self.weights = dict(checkpoint["state_dict"])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        super().load_model_state_dict({**checkpoint, "state_dict": self.weights}, strict=False)


class LoadsWhatFits(DDPStrategy):
    """Silently skips entries of another model's checkpoint that do not fit."""

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        own = self.lightning_module.state_dict()
        weights = checkpoint["state_dict"]
        fitting = {n: v for n, v in weights.items() if n in own and own[n].shape == v.shape}
        super().load_model_state_dict({**checkpoint, "state_dict": fitting}, strict=False)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        saved = [len(state["state"]) for state in checkpoint["optimizer_states"]]
        if saved == [len(list(self.lightning_module.parameters()))] or len(saved) > 1:
            super().load_optimizer_state_dict(checkpoint)


class FailsOnRankZero(DDPStrategy):
    """Reads a checkpoint on rank 0 while the other ranks wait."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self.is_global_zero:
            super().load_checkpoint(checkpoint_path, weights_only)
        self.barrier()
        return super().load_checkpoint(checkpoint_path, weights_only)


class VagueErrors(DDPStrategy):
    """Raises an error without the cause."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        try:
            return super().load_checkpoint(checkpoint_path, weights_only)
        except Exception as error:
            raise RuntimeError("loading failed") from error


_RESUMED = (
    "losses_resume",
    "two_optimizers_resume",
    "resume_and_save_again",
    "save_after_fit",
    "resume_at_world_sizes",
    "resume_from_ddp",
    "load_hook_renames",
    "random_state_resumes",
)
"""Checks that continue training with the optimizer."""


FAULTS = [
    fault("optimizer state lost", ForgottenMoments, "optimizer_state_resumes", *_RESUMED),
    fault("optimizer steps counted anew", StaleSteps, "optimizer_state_resumes", *_RESUMED),
    fault("second param group lost", FirstGroupOnly, "param_groups_resume"),
    fault("second optimizer lost", FirstOptimizerOnly, "two_optimizers_resume"),
    fault("buffers lost", ForgottenBuffers, "buffers_resume", *EVERYTHING),
    fault("rank 0's shard on every rank", RankZerosShard, "weights_resume", *EVERYTHING),
    fault("names of a wrapper in the checkpoint", OwnNames, "names_in_the_checkpoint", *EVERYTHING),
    fault(
        "own names for optimizer state",
        OwnStateNames,
        "names_in_the_checkpoint",
        "optimizer_state_resumes",
        "two_optimizers_resume",
        "resume_from_ddp",
        "resume_under_ddp",
    ),
    fault("own entry needed", OwnEntry, "resume_from_ddp"),
    fault("optimizer resumed at the same world size only", SameWorldSizeOnly, "resume_at_world_sizes"),
    fault("schedule lost", LostSchedule, "schedulers_and_counters_resume"),
    fault(
        "checkpoint not evaluated",
        EvaluatesCurrentWeights,
        "evaluate_a_checkpoint",
        "weights_only_evaluates",
        "ckpt_path_best_and_last",
    ),
    fault("optimizers gone after fit", ForgetsOptimizersAfterFit, "save_after_fit"),
    fault(
        "same random numbers on all ranks",
        SameRandomNumbers,
        "random_state_resumes_per_rank",
        "random_state_resumes",
    ),
    fault("random numbers and position not saved", ForgottenRandomNumbers, "random_state_resumes"),
    fault(
        "random numbers drawn while saving",
        DrawsWhileSaving,
        "save_keeps_training_unchanged",
        "random_state_resumes",
    ),
    fault("data read from the beginning", DataStartsOver, "data_position_resumes", "random_state_resumes"),
    fault("saved in place", SavesInPlace, "killed_while_saving", "killed_at_every_file_operation"),
    fault("never saved twice", SavesOnce, "resume_and_save_again", "ckpt_path_best_and_last"),
    fault(
        "optimizer saved with weights only",
        SavesOptimizersAlways,
        "weights_only_has_no_optimizer",
        "weights_only_evaluates",
    ),
    fault("saved too late in the background", SavesTooLate, "async_save"),
    fault("weights rounded", SavesRounded, "values_in_the_checkpoint", *EVERYTHING),
    fault("every rank's copy stored", SavesEveryRank, "elements_stored_once", *EVERYTHING),
    fault("byte changed after saving", BreaksWhatItSaved, "checksums_verify", *EVERYTHING),
    fault(
        "removed on every rank",
        RemovesOnEveryRank,
        "old_checkpoint_removed_once",
        "model_checkpoint_keeps_best",
        "ckpt_path_best_and_last",
    ),
    fault("never removed", RemovesNothing, "model_checkpoint_keeps_best"),
    fault("hooks' entries on rank 0 only", HooksOnRankZero, "hook_entries_restored"),
    fault("state of callbacks lost", ForgottenCallbacks, "callback_state_restored"),
    fault(
        "names of a wrapper in hooks",
        WrappedNames,
        "save_hook_sees_the_weights",
        "save_after_fit",
        "resume_from_ddp",
        "resume_under_ddp",
        "values_in_the_checkpoint",
        "async_save",
        "weights_only_has_no_optimizer",
        "load_in_one_process",
        "evaluate_a_checkpoint",
    ),
    fault("hooks' changes ignored", LoadsBeforeHooks, "load_hook_renames", "save_hook_sees_the_weights"),
    fault("another model's weights taken", LoadsWhatFits, "checkpoint_of_another_model"),
    fault("errors on rank 0 only", FailsOnRankZero, "missing_checkpoint", "flipped_byte", "truncated_file"),
    fault("vague errors", VagueErrors, "flipped_byte", "truncated_file", "missing_checkpoint"),
]
