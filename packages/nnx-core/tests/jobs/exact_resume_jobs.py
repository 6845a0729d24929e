"""Runs that are interrupted and resumed, and the batches of each rank."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nnx
from jobs.exact_resume_data import WIDTH, Case, Numbers, loader_of
from nnx_test_helpers.training import digest_of


@dataclass
class Report:
    """The report of one rank.

    Attributes:
        batches: The sample ids of every batch, in order.
        losses: The loss of every batch.
        where: The epoch and batch index of every batch.
        validations: The number of validation batches.
        digest: The digest of the final weights.
        said: The warnings about resuming.
        loaded: The loaded samples, if the loader works in this process.
        saved_after: The number of batches before the checkpoint.
        validations_when_saved: The number of validation batches before the checkpoint.
    """

    batches: list[Any]
    losses: list[float]
    where: list[tuple[int, int]]
    validations: int
    digest: str
    said: list[str]
    loaded: int = 0
    saved_after: int = -1
    validations_when_saved: int = 0


class Dropping(LightningModule):
    """A small model with dropout that records its batches."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.case = case
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.report = Report([], [], [], 0, "", [])
        self.hooks_drew: list[float] = []

    def train_dataloader(self) -> Any:
        self.data = Numbers(self.case.samples, self.case.workers == 0)
        return loader_of(self.case, self.trainer, self.data)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(6, True), batch_size=3) if self.case.validate is not None else []

    def on_fit_start(self) -> None:
        _seed_all(self.case.seed + 100 * self.global_rank)  # Lightning seeds all ranks alike

    def on_train_epoch_start(self) -> None:
        self.hooks_drew.append(float(torch.rand(())))

    def training_step(self, batch: Any, index: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else batch
        parts = parts if isinstance(parts[0], (list, tuple)) or parts[0] is None else [parts]
        ids, losses = [], []
        for part in parts:
            if part is None:
                ids.append(None)
                continue
            numbers, values = part
            numbers = torch.as_tensor(numbers).reshape(-1)
            ids.append(numbers.tolist())
            losses.append(self._loss(values.reshape(-1, WIDTH)))
        loss = torch.stack(losses).mean()
        self.report.batches.append(ids[0] if len(ids) == 1 else ids)
        self.report.losses.append(loss.item())
        self.report.where.append((self.current_epoch, index))
        return loss

    def _loss(self, values: Tensor) -> Tensor:
        return F.mse_loss(self.layers(values), values.sum(1, keepdim=True))

    def validation_step(self, batch: Any, index: int) -> None:
        self.report.validations += not self.trainer.sanity_checking
        self.log("val", self._loss(batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class SaveIn(Callback):
    """Saves in one call of one hook."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.calls = 0
        for hook in (
            "on_train_start",
            "on_train_epoch_start",
            "on_train_batch_end",
            "on_validation_end",
            "on_train_epoch_end",
        ):
            setattr(self, hook, self._saver(hook))

    def _saver(self, hook: str) -> Any:
        def save(trainer: Trainer, module: Any, *args: Any) -> None:
            if not self.case.path or hook != self.case.save_at[0] or trainer.sanity_checking:
                return
            self.calls += 1
            if self.calls == self.case.save_at[1]:
                module.report.saved_after = len(module.report.batches)
                module.report.validations_when_saved = module.report.validations
                trainer.save_checkpoint(self.case.path)

        return save


def run(case: Case) -> Report:
    """Train as described; every rank reports."""
    seed_everything(case.seed, verbose=False)
    module = Dropping(case)
    lightnings = case.strategy in ("auto", "ddp")
    plugins: list[Any] = [nnx.CheckpointIO(**case.options)] if lightnings else []
    if case.plain:
        plugins = [TorchCheckpointIO()]
    ours = bool(case.options) and not lightnings
    trainer = Trainer(
        strategy=nnx.strategy(case.strategy, **case.options) if ours else case.strategy,
        accelerator="cpu",
        devices=case.devices,
        max_epochs=case.epochs,
        max_steps=case.steps,
        accumulate_grad_batches=case.accumulate,
        val_check_interval=case.validate,
        num_sanity_val_steps=2,
        callbacks=[SaveIn(case)],
        plugins=plugins,
        use_distributed_sampler=not case.own_sampler,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, ckpt_path=case.resume)
    report = module.report
    report.loaded = module.data.loaded
    report.said = [str(w.message) for w in caught if "resuming" in str(w.message).lower()]
    report.digest = digest_of({name: value.detach() for name, value in module.state_dict().items()})
    if case.path and case.save_at[0] in ("afterwards", "weights"):
        trainer.save_checkpoint(case.path, weights_only=case.save_at[0] == "weights")
    return report


def interrupted(case: Case) -> tuple[Report, Report]:
    """A whole run that saves on its way, and one that resumes from there under another seed."""
    whole = run(case)
    return whole, run(replace(case, resume=case.path, path="", seed=99))


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draws() -> tuple[float, ...]:
    """The next number of every generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def evaluate(case: Case) -> bool:
    """Return True if validating from a checkpoint draws the same random numbers as without one."""
    seen = []
    for path in (None, case.path):
        module = Dropping(replace(case, validate=1.0))
        trainer = _quiet_trainer(case)
        _seed_all(1)
        trainer.validate(module, ckpt_path=path, verbose=False)
        seen.append(draws())
    return seen[0] == seen[1]


def error_of(case: Case) -> str:
    """The error that a run ends with."""
    try:
        run(case)
    except nnx.NnxError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def fit_twice_with_one_loader(case: Case) -> dict[str, Any]:
    """Report on a user's loader after a resumed fit and a second, fresh fit."""
    data = Numbers(case.samples, False)
    loader = DataLoader(data, batch_size=case.batch)
    batch_sampler, sampler = loader.batch_sampler, loader.sampler
    report: dict[str, Any] = {"same": [], "batches": []}
    for resume in (case.path, None):
        module = Dropping(case)
        trainer = _quiet_trainer(case)
        trainer.fit(module, loader, ckpt_path=resume)
        report["same"].append(loader.batch_sampler is batch_sampler and loader.sampler is sampler)
        report["batches"].append(len(module.report.batches))
        predicted = trainer.predict(Predicting(case), loader)
        report["predicted"] = sum(len(each) for each in predicted or ())
    report["left on the strategy"] = sorted(
        {"process_dataloader", "on_train_start"} & set(vars(trainer.strategy))
    )
    return report


class Predicting(Dropping):
    """Predicts the ids of the samples."""

    def predict_step(self, batch: Any, index: int) -> Any:
        return batch[0]


def _quiet_trainer(case: Case) -> Trainer:
    return Trainer(
        strategy=case.strategy,
        accelerator="cpu",
        devices=case.devices,
        max_epochs=case.epochs,
        plugins=[nnx.CheckpointIO()] if case.strategy in ("auto", "ddp") else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


# --- Fabric -------------------------------------------------------------------------------------------


def fabric_draws(
    path: str, devices: int, save: bool, strategy: str = "fsdp_auto", strict: bool = False
) -> Any:
    """Save and draw, or load and draw; with a load that does not ask for random numbers in between."""
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(nn.Linear(2, 2))
    _seed_all((3 if save else 99) + fabric.global_rank)
    state = {"model": model, "random": nnx.RandomState(strict=strict)}
    if save:
        fabric.save(path, state)
        return draws()
    before = torch.get_rng_state()
    fabric.load(path, {"model": model})
    untouched = torch.equal(before, torch.get_rng_state())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fabric.load(path, state)
        except nnx.NnxError as error:
            return f"{type(error).__name__}: {error}"
    said = [str(warning.message) for warning in caught if "random state" in str(warning.message)]
    return draws(), untouched, said
