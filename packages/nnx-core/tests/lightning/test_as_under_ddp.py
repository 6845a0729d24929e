"""Requirements of Lightning's own tests, reworded, that nnx once met differently from ``ddp``."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Timer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

import nnx
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import CheckpointError


class Net(BoringModel):
    """Two layers, of which one can be unfrozen later; notes its losses and the order of its hooks."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Linear(32, 32)
        self.lr = 0.01
        self.losses: list[float] = []
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(self.backbone(x))
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = super().training_step(torch.ones(2, 32) * (batch_idx + 1), batch_idx)
        self.losses.append(float(output["loss"]))
        return output

    def configure_optimizers(self) -> Any:
        self.calls.append("configure_optimizers")
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)

    def setup(self, stage: str) -> None:
        self.calls.append("setup")

    def configure_model(self) -> None:
        self.calls.append("configure_model")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls.append("on_load_checkpoint")

    def on_fit_start(self) -> None:
        self.calls.append("on_fit_start")


class Steps(Callback):
    """A state that has to be there when training begins."""

    def __init__(self) -> None:
        self.count = 0
        self.count_at_start = -1

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.count_at_start = self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Forward(Callback):
    """Calls the model with no backward after it, as a summary of it does."""

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        module(torch.ones(2, 32))


class OwnConfig:
    """An object of the user's own in the hyper-parameters."""

    width = 3


class RaisesInStep(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        raise ValueError("the real error")


def trainer_with(strategy: Any, **arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_train_batches": 2,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
    }
    return Trainer(strategy=strategy, accelerator="cpu", **{"devices": 1, **quiet, **arguments})


def in_a_notebook(folder: str) -> dict[str, Any]:
    """Processes forked by this one: the module is attached to a Trainer only in them."""
    raised = ""
    failing = trainer_with(nnx.strategy("fsdp_auto", start_method="fork"), devices=2, max_steps=1)
    try:
        failing.fit(RaisesInStep())
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    trainer = trainer_with(nnx.strategy("fsdp_auto", start_method="fork"), devices=2, max_steps=1)
    trainer.fit(Net())
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    loaded = trainer.strategy.load_checkpoint(f"{folder}/a.ckpt")
    return {"raised": raised, "names": sorted(loaded["state_dict"])}


@pytest.mark.full
def test_a_notebook_sees_the_error_of_its_process_and_saves_after_the_run(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path)]  # a worker of the pool has threads: it must not fork
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    seen = json.loads(finished.stdout.splitlines()[-1])
    assert seen["raised"].startswith("ProcessRaisedException: ")
    assert "ValueError: the real error" in seen["raised"]
    assert seen["names"] == ["backbone.bias", "backbone.weight", "layer.bias", "layer.weight"]


def resumed_after_unfreezing(strategy: str, folder: str) -> dict[str, Any]:
    def trainer(epochs: int) -> Trainer:
        callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1), Steps(), Timer(duration={"hours": 1})]
        return trainer_with(strategy, max_epochs=epochs, callbacks=callbacks)

    first = trainer(2)
    first.fit(Net())
    first.save_checkpoint(f"{folder}/{strategy}.ckpt")
    second, module = trainer(4), Net()
    second.fit(module, ckpt_path=f"{folder}/{strategy}.ckpt")
    steps = next(callback for callback in second.callbacks if isinstance(callback, Steps))
    groups = len(second.optimizers[0].param_groups)
    return {
        "calls": module.calls,
        "losses": module.losses,
        "groups": groups,
        "count at start": steps.count_at_start,
    }


def test_a_run_resumes_after_layers_were_unfrozen_with_the_hooks_in_ddps_order(
    pool: WorkerPool, tmp_path: Path
) -> None:
    (expected,) = pool.run(resumed_after_unfreezing, "ddp", str(tmp_path), world_size=1)
    (resumed,) = pool.run(resumed_after_unfreezing, "fsdp_auto", str(tmp_path), world_size=1)
    assert expected["groups"] == 2
    assert expected["count at start"] == 4
    assert resumed == {**expected, "losses": pytest.approx(expected["losses"], rel=1e-5)}


def other_ways_of_resuming(folder: str) -> dict[str, Any]:
    """Begin a run in every possible way, from paths of ddp and of nnx, and return the results."""
    seen: dict[str, Any] = {}
    saved = trainer_with("ddp", max_epochs=1)
    saved.fit(Net(OwnConfig()))
    saved.save_checkpoint(f"{folder}/object.ckpt")
    resumed = trainer_with("fsdp_auto", max_epochs=2, callbacks=[Forward()])
    resumed.fit(Net(OwnConfig()), ckpt_path=f"{folder}/object.ckpt", weights_only=False)
    seen["steps with an object of one's own"] = resumed.global_step
    untrained = trainer_with("fsdp_auto", limit_val_batches=1)
    untrained.validate(Net(), verbose=False)
    untrained.save_checkpoint(f"{folder}/untrained.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_with("fsdp_auto", max_steps=1).fit(Net(), ckpt_path=f"{folder}/untrained.ckpt")
    seen["said without optimizer state"] = [str(each.message) for each in caught]
    twice = trainer_with("fsdp_auto", max_steps=1, plugins=[AsyncCheckpointIO(AsyncCheckpointIO())])
    twice.fit(Net())
    twice.save_checkpoint(f"{folder}/twice.ckpt")
    twice.strategy.teardown()
    twice.strategy.checkpoint_io.checkpoint_io.teardown()  # Lightning waits for the outer one alone
    seen["wrapped twice"] = (Path(folder) / "twice.ckpt").exists()
    try:
        trainer_with("fsdp_auto", max_steps=1).fit(Net(), ckpt_path=f"{folder}/nowhere.ckpt")
    except FileNotFoundError as error:
        seen["missing"] = isinstance(error, CheckpointError), str(error)
    tuned = trainer_with("fsdp_auto", max_epochs=2, default_root_dir=folder)
    found = [
        Tuner(tuned).lr_find(Net(), num_training=8, update_attr=False).results["loss"][-1] for _ in range(3)
    ]
    seen["searches for a rate"] = len(found)
    return seen


def test_checkpoints_that_ddp_takes_are_taken(pool: WorkerPool, tmp_path: Path) -> None:
    (seen,) = pool.run(other_ways_of_resuming, str(tmp_path), world_size=1)
    assert seen["steps with an object of one's own"] == 4
    said = " ".join(seen["said without optimizer state"])
    assert "The checkpoint holds no optimizer state" in said
    assert "SGD starts without state." in said
    assert seen["wrapped twice"]
    is_ours, text = seen["missing"]
    assert is_ours
    assert text == f"there is no checkpoint at '{tmp_path}/nowhere.ckpt'. Check the path."
    assert seen["searches for a rate"] == 3


def pickled_after_fit() -> list[str]:
    plugin = MixedPrecision("bf16-mixed", "cpu")
    steps = Steps()
    trainer = trainer_with(
        "fsdp_auto", max_steps=1, callbacks=[steps], plugins=[plugin], gradient_clip_val=1.0
    )
    module = Net()
    trainer.fit(module)
    for each in (module, steps, trainer):
        pickle.loads(pickle.dumps(each))
    torch.save(trainer, io.BytesIO())
    return [name for name in vars(plugin) if callable(vars(plugin)[name])]


def test_trainer_and_callbacks_can_be_pickled_after_a_run(pool: WorkerPool) -> None:
    (replaced,) = pool.run(pickled_after_fit, world_size=1)
    assert replaced == []  # the plugin may serve another strategy next


if __name__ == "__main__":
    print(json.dumps(in_a_notebook(sys.argv[1])))
