"""State dicts: what a module loads by its own code is resumed, and what rank zero exports is complete."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.checks.checkpoints_runs import SAVED_AFTER, TASK, TOLERANCE, Resumable, path_in, run
from nnx_conformance.comparing import expect_equal_losses, expect_equal_weights
from nnx_conformance.habits import Habitual, chapter
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
        """Note."""
        self.__dict__.setdefault("noted", []).append(self.note())

    def note(self) -> float:
        """The number."""
        return float(self.head.weight.abs().sum())


def loads(name: str, *, kinds: Any = ("backend", "strategy")) -> Callable[[Model], Model]:
    """A decorator that makes a check of a module: resumed, it notes what it notes in one process.

    Args:
        name: The check's name.
        kinds: What it is asked of.
    """

    def register(model: Model) -> Model:
        def tried(bench: Bench) -> None:
            task = replace(TASK, model=model)
            noted, losses, weights = bench.alone(_trained, task)
            for rank, seen in enumerate(bench.run(_resumed, task, path_in(bench))):
                where = f"resumed, rank {rank}"
                worst = max(abs(a - b) for a, b in zip(seen[0], noted[SAVED_AFTER:], strict=True))
                expect(worst < 1e-4, f"{where}: its code sees {seen[0]} instead of {noted[SAVED_AFTER:]}.")
                expect_equal_losses(seen[1], losses[SAVED_AFTER:], tolerance=TOLERANCE, where=where)
                expect_equal_weights(seen[2], weights, tolerance=TOLERANCE, where=where)

        tried.__doc__, tried.__module__ = model.__doc__, model.__module__
        check(name=name, kinds=kinds)(tried)
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
    """Has a tensor that is neither parameter nor buffer, and saves and loads it."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.ones(1)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}value"] = self.value.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.value = state_dict.pop(f"{prefix}value").clone()
        super()._load_from_state_dict(state_dict, prefix, *rest)


@loads("state_loaded_by_its_module")
class WithOwnTensor(Noting):
    """A tensor that a layer saves and loads by `_load_from_state_dict` is what it was when a run resumes."""

    def build(self) -> None:
        """The layer."""
        super().build()
        self.own = OwnTensor()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """It scales the loss, and changes."""
        loss = super().training_step(batch, index) * self.own.value.item()
        self.own.value = self.own.value * 1.5
        return loss

    def note(self) -> float:
        """Its value."""
        return self.own.value.item()


@loads("state_of_each_rank", kinds=("backend",))
class CountsItsSamples(WithOwnTensor):
    """What each rank counts by itself, as a metric of torchmetrics does, is resumed rank by rank."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The rank's samples, weighted so that each counts otherwise."""
        mine = self.batch_of_step(self.trainer.global_step)
        self.own.value = self.own.value + mine[0].abs().sum().cpu()
        return Resumable.training_step(self, batch, index)

    def note(self) -> float:
        """The sum over the ranks, each of which begins with one."""
        values: Any = self.all_gather(self.own.value)
        return float(values.sum() - values.numel())


class SavedUnderOldNames(Noting):
    """Saves the last layer as an older version of the class did."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Another name."""
        weights = checkpoint["state_dict"]
        for name in [name for name in weights if name.startswith("head.")]:
            weights[name.replace("head.", "old.")] = weights.pop(name)


def _renamed(state_dict: Any) -> None:
    for name in [name for name in state_dict if name.startswith("old.")]:
        state_dict[name.replace("old.", "head.")] = state_dict.pop(name)


@loads("overridden_load_state_dict")
class OverridesLoading(SavedUnderOldNames):
    """A module that renames entries in its own `load_state_dict` is resumed with all its weights."""

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """The new names."""
        renamed = dict(state_dict)
        _renamed(renamed)
        return super().load_state_dict(renamed, *args, **kwargs)


@loads("hooks_before_loading")
class HooksBeforeLoading(SavedUnderOldNames):
    """`register_load_state_dict_pre_hook` may rename entries before they are loaded."""

    def build(self) -> None:
        """Registers it."""
        super().build()
        self.register_load_state_dict_pre_hook(_rename_first)  # type: ignore[no-untyped-call]


def _rename_first(module: nn.Module, state_dict: Any, *_: Any) -> None:
    _renamed(state_dict)


@loads("hooks_after_loading")
class HooksAfterLoading(Noting):
    """`register_load_state_dict_post_hook` is called once, and finds the weights that were loaded."""

    def build(self) -> None:
        """Registers it; a new weight is made of what was loaded."""
        super().build()
        self.register_load_state_dict_post_hook(_double)  # type: ignore[no-untyped-call]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Half of the weight, which the hook doubles."""
        weights = checkpoint["state_dict"]
        weights["head.bias"] = _half(weights["head.bias"])


def _half(value: Any) -> Any:
    """Of a tensor, or of what a rank holds of one."""
    if isinstance(value, Tensor):
        return value / 2
    return replace(value, data=tuple(view / 2 for view in value.data))


def _double(module: Any, keys: Any) -> None:
    assert not keys.missing_keys
    with torch.no_grad():
        module.head.bias.mul_(2)


habit = chapter()


class Exporting(Habitual):
    """Rank zero saves the weights with `torch.save` after a step, as with ddp."""

    ranks_differ = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """All ranks call `state_dict()`."""
        if batch_idx != 1:
            return
        weights, total = self.gathered(self.state_dict()), 0.0
        if self.global_rank == 0:
            file = io.BytesIO()
            torch.save(weights, file)
            file.seek(0)
            total = float(sum(value.abs().sum() for value in torch.load(file).values()))
        self.look(self.trainer.strategy.broadcast(total))

    def gathered(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """As they are."""
        return weights


@habit()
class StateDictSavedByRankZero(Exporting):
    """All ranks call `state_dict()` and rank zero alone gives it to `torch.save`."""


@habit()
class CopiesSavedByRankZero(Exporting):
    """All ranks copy what `state_dict()` returns to the CPU, and rank zero alone saves the copies."""

    def gathered(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """As an error of nnx proposes."""
        return {name: value.detach().cpu().clone() for name, value in weights.items()}
