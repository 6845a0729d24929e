"""Jobs at the edges of a run: replaced layers, early optimizers, averaging, and errors on some ranks."""

from __future__ import annotations

import os
import traceback
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from nnx_test_helpers.lightning_jobs import Noisy, full, rank, trainer_for, uneven
from nnx_test_helpers.training import Net, Run, make_strategy, make_trainer


class LookInside(Callback):
    """Notes the module classes while the strategy is set up."""

    def __init__(self) -> None:
        self.classes: list[str] = []

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.classes = [type(part).__name__ for part in module.modules()]


def synchronized_batch_norm(devices: int) -> dict[str, Any]:
    """Set up with ``sync_batchnorm=True``, on a CPU, where such a layer can be built but not trained."""
    module = Noisy()
    look = LookInside()
    trainer = trainer_for(
        devices, sync_batchnorm=True, callbacks=[look], max_epochs=1, use_distributed_sampler=False
    )
    try:
        trainer.fit(module, uneven(rank(), devices))
        error = ""
    except ValueError as caught:
        error = str(caught)
    second = trainer_for(devices, sync_batchnorm=True, use_distributed_sampler=False)
    tested = Noisy()
    outcome = second.test(tested, uneven(rank(), devices), verbose=False)[0]["error"]
    plain = trainer_for(devices, use_distributed_sampler=False)
    return {
        "inside": look.classes,
        "error": error,
        "after fit": [type(part).__name__ for part in module.modules()],
        "batches": int(module.layers[1].num_batches_tracked),
        "after test": [type(part).__name__ for part in tested.modules()],
        "tested": outcome,
        "expected": plain.test(Noisy(), uneven(rank(), devices), verbose=False)[0]["error"],
    }


class Failing(Net):
    """Raises in its second step, on given ranks."""

    failing: tuple[int, ...] = ()

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        if index == 1 and self.global_rank in self.failing:
            raise ValueError(
                f"bad sample on rank {self.global_rank}" if len(self.failing) == 1 else "bad sample"
            )
        return super().training_step(batch, index)


def fail_on_one_rank(run: Run, failing: int) -> None:
    """One rank's data is broken; its process ends with the error, as a script's would."""
    module = Failing(run)
    module.failing = (failing,)
    try:
        make_trainer(run).fit(module)
    except ValueError:
        traceback.print_exc()
        os._exit(3)


def fail_and_go_on(run: Run) -> dict[str, Any]:
    """All ranks fail in the same step, twice; then the user repairs the data and trains again."""
    module = Failing(run)
    error = ""
    for _ in range(2):
        module.failing = tuple(range(run.devices))
        module.load_state_dict(Net(run).state_dict())
        module.losses.clear()
        try:
            make_trainer(run).fit(module)
        except ValueError as caught:
            error = str(caught)
    plain = all(type(p) is nn.Parameter for p in module.parameters())
    module.failing = ()
    make_trainer(run).fit(module)
    return {"error": error, "plain": plain, "losses": module.losses}


class EarlyOptimizer(Net):
    """Builds its optimizer and scheduler before anything is sharded."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.early = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.early


class EMA(Callback):
    """Keeps an average of every weight in its state, as many users' callbacks do."""

    def __init__(self, decay: float = 0.5) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self.restored: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            value = parameter.detach().clone()
            old = self.average.get(name)
            self.average[name] = value if old is None else self.decay * old + (1 - self.decay) * value

    def state_dict(self) -> dict[str, Any]:
        return {"average": {name: full(value) for name, value in self.average.items()}, "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state["average"]
        self.decay = state["decay"]


class Exploding(Net):
    """Its gradients are not finite on one rank."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss * float("inf") if self.global_rank == 1 else loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.trainer.strategy.backend.clip_grad_norm(optimizer, 1.0, error_if_nonfinite=True)


def explode(run: Run) -> str:
    """The error of clipping gradients that are not finite."""
    try:
        make_trainer(run).fit(Exploding(run))
    except RuntimeError as error:
        return str(error)
    return "no error"


def fit_early_optimizer(run: Run) -> dict[str, Any]:
    """Evaluate first, then fit, then fit again: the same optimizer object is used throughout."""
    module = EarlyOptimizer(run)
    optimizer = module.early["optimizer"] if isinstance(module.early, dict) else module.early
    make_trainer(run).validate(module, verbose=False)
    make_trainer(run).fit(module)
    make_trainer(run).fit(module)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    state = {name: value for p, v in optimizer.state.items() for name, value in v.items()}
    return {
        "losses": module.losses,
        "holds the module's parameters": held == {id(p) for p in module.parameters() if p.requires_grad},
        "state": sorted(state),
        "strategy": str(make_strategy(run)) != "",
    }
