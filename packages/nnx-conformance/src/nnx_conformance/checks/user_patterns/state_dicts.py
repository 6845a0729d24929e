"""State loaded by the module's own code resumes, and rank zero exports complete state dicts."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.checkpoints.runs import SAVED_AFTER, TASK, TOLERANCE, Resumable, path_in, run
from nnx_conformance.comparing import expect_equal_losses, expect_equal_weights
from nnx_conformance.patterns import UserPattern, shared_job
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task

Model = TypeVar("Model", bound="type[Noting]")


class Noting(Resumable):
    """Notes a number before every step.

    Attributes:
        noted: The numbers.

    """

    noted: list[float]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("noted", []).append(self.note())

    def note(self) -> float:
        """Return the number."""
        return float(self.head.weight.abs().sum())


def loads(name: str, *, kinds: Any = ("backend", "strategy")) -> Callable[[Model], Model]:
    """Return a decorator that makes a check: a resumed module notes the numbers of one process.

    Args:
        name: The check's name.
        kinds: The kinds of strategies that the check applies to.

    """

    def register(model: Model) -> Model:
        def run_check(bench: Bench) -> None:
            task = replace(TASK, model=model)
            noted, losses, weights = bench.alone(_trained, task)
            for rank, seen in enumerate(bench.run(_resumed, task, path_in(bench))):
                where = f"resumed, rank {rank}"
                worst = max(abs(a - b) for a, b in zip(seen[0], noted[SAVED_AFTER:], strict=True))
                expect(worst < 1e-4, f"{where}: its code sees {seen[0]} instead of {noted[SAVED_AFTER:]}.")
                expect_equal_losses(seen[1], losses[SAVED_AFTER:], tolerance=TOLERANCE, where=where)
                expect_equal_weights(seen[2], weights, tolerance=TOLERANCE, where=where)

        run_check.__doc__, run_check.__module__ = model.__doc__, model.__module__
        check(name=name, kinds=kinds)(run_check)
        return model

    return register


def _trained(subject: Subject, task: Task) -> Any:
    module: Any = task.module()
    record = run(subject, task, module=module)
    return module.noted, record.losses, _weights(record.weights)


def _resumed(subject: Subject, task: Task, path: str) -> Any:
    run(subject, task, paths={SAVED_AFTER: path})
    module: Any = replace(task, seed=task.seed + 1).module()
    record = run(subject, task, module=module, ckpt_path=path)
    return module.noted, record.losses, _weights(record.weights)


def _weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if not name.startswith("own.")}


class OwnTensor(nn.Module):
    """Saves and loads a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.ones(1)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}value"] = self.value.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.value = state_dict.pop(f"{prefix}value").clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)


@loads("custom_load_from_state_dict")
class WithOwnTensor(Noting):
    """A tensor that a layer loads by `_load_from_state_dict` has its saved value in a resumed run."""

    def build(self) -> None:
        super().build()
        self.own = OwnTensor()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Scale the loss by the tensor, then change the tensor."""
        loss = super().training_step(batch, index) * self.own.value.item()
        self.own.value = self.own.value * 1.5
        return loss

    def note(self) -> float:
        return self.own.value.item()


@loads("rank_local_state", kinds=("backend",))
class CountsItsSamples(WithOwnTensor):
    """A count that each rank keeps by itself, like a torchmetrics metric, resumes rank by rank."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Count the samples of this rank, each with a different weight."""
        mine = self.batch_of_step(self.trainer.global_step)
        self.own.value = self.own.value + mine[0].abs().sum().cpu()
        return Resumable.training_step(self, batch, index)

    def note(self) -> float:
        """Return the sum over the ranks, without the initial one of each."""
        values: Any = self.all_gather(self.own.value)
        return float(values.sum() - values.numel())


class SavedUnderOldNames(Noting):
    """Saves the last layer under the names of an older version of the class."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        for name in [name for name in weights if name.startswith("head.")]:
            weights[name.replace("head.", "old.")] = weights.pop(name)


def _renamed(state_dict: Any) -> None:
    for name in [name for name in state_dict if name.startswith("old.")]:
        state_dict[name.replace("old.", "head.")] = state_dict.pop(name)


@loads("load_state_dict_override")
class OverridesLoading(SavedUnderOldNames):
    """A module that renames entries in its own `load_state_dict` resumes with all its weights."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        renamed = dict(state_dict)
        _renamed(renamed)
        return super().load_state_dict(renamed, *args, **kwargs)


@loads("load_state_dict_pre_hook")
class LoadStateDictPreHook(SavedUnderOldNames):
    """`register_load_state_dict_pre_hook` may rename entries before they are loaded."""

    def build(self) -> None:
        super().build()
        self.register_load_state_dict_pre_hook(_rename_first)  # type: ignore[no-untyped-call]


def _rename_first(module: nn.Module, state_dict: Any, *_: Any) -> None:
    _renamed(state_dict)


@loads("load_state_dict_post_hook")
class LoadStateDictPostHook(Noting):
    """`register_load_state_dict_post_hook` is called once and sees the loaded weights."""

    def build(self) -> None:
        """Register a hook that changes a loaded weight."""
        super().build()
        self.register_load_state_dict_post_hook(_double)  # type: ignore[no-untyped-call]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save half of the weight, which the hook doubles."""
        weights = checkpoint["state_dict"]
        weights["head.bias"] = _half(weights["head.bias"])


def _half(value: Any) -> Any:
    """Halve a tensor, or the local shard of one."""
    if isinstance(value, Tensor):
        return value / 2
    return replace(value, data=tuple(view / 2 for view in value.data))


def _double(module: Any, keys: Any) -> None:
    assert not keys.missing_keys
    with torch.no_grad():
        module.head.bias.mul_(2)


pattern = shared_job()


class Exporting(UserPattern):
    """Saves the weights with `torch.save` on rank zero, as with ddp."""

    ranks_differ = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Call `state_dict()` on all ranks."""
        if batch_idx != 1:
            return
        weights, total = self.gathered(self.state_dict()), 0.0
        if self.global_rank == 0:
            file = io.BytesIO()
            torch.save(weights, file)
            file.seek(0)
            total = float(sum(value.abs().sum() for value in torch.load(file).values()))
        self.observe(self.trainer.strategy.broadcast(total))

    def gathered(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights unchanged."""
        return weights


@pattern()
class StateDictSavedOnRankZero(Exporting):
    """All ranks call `state_dict()`, and only rank zero passes it to `torch.save`."""


@pattern()
class StateDictCopySavedOnRankZero(Exporting):
    """All ranks copy their `state_dict()` to the CPU, and only rank zero saves the copies."""

    def gathered(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy as an error message of nnx proposes."""
        return {name: value.detach().cpu().clone() for name, value in weights.items()}
