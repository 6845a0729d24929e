"""Jobs that train under Lightning's averaging callbacks and report both sets of weights."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

import nnx_checkpoint as storage
from jobs import engines
from jobs.lightning_checkpoint_jobs import PLUGINS
from nnx_test_helpers.training import MODELS, Block, Net, Run, SaveAt, make_trainer


class Normed(Net):
    """With batch norm: buffers that each rank computes from its own data, whole numbers among them."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.embed(self.frozen(x)))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) + self.back(hidden)


class Looks(Net):
    """Only looks at every second batch: a forward that no backward follows."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        loss = F.mse_loss(self.forward(batch[0]), batch[1])
        if index % 2 == 0:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self._record(loss)


class Warming(Net):
    """Has a scheduler that no other scheduler's state can be loaded into."""

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: (epoch + 1) / 4)]


class Pretrained(EMAWeightAveraging):
    """Starts from an average of its own, which counts as that of many steps."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        with torch.no_grad():
            for parameter in self._average_model.module.parameters():
                parameter.add_(1.0)
        self._average_model.n_averaged += 5


class OfAnother(WeightAveraging):
    """Averages into something else than the model."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._average_model.module.more = nn.Linear(2, 2)


class OnMeta(Net):
    """Builds its blocks in ``configure_model``, once, on the meta device."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.blocks: Any = None

    def configure_model(self) -> None:
        if self.blocks is None:
            with torch.device("meta"):
                self.blocks = nn.ModuleList(Block(10) for _ in range(3))


MODELS.update({"normed": Normed, "looks": Looks, "warming": Warming, "on_meta": OnMeta})


def make_callback(kind: str) -> Any:
    """An averaging callback by name."""
    if kind == "ema":
        return EMAWeightAveraging(decay=0.6)
    if kind == "mean":
        return WeightAveraging()
    if kind == "lists":
        return WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.6))
    if kind == "no_buffers":
        return WeightAveraging(use_buffers=False)
    if kind == "pretrained":
        return Pretrained(decay=0.6)
    if kind == "of_another":
        return OfAnother()
    if kind == "late":
        return EMAWeightAveraging(decay=0.6, update_starting_at_step=4)
    if kind == "epochs":
        return EMAWeightAveraging(decay=0.6, update_every_n_steps=0, update_starting_at_epoch=0)
    return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=2)


class Look(Callback):
    """Notes during training how much of the average this rank holds."""

    def __init__(self, averaging: Any) -> None:
        self.averaging = averaging
        self.elements = 0
        self.of_the_model = 0
        self.same_kinds = False

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        average = average_module(self.averaging)
        self.elements = sum(local(p).numel() for p in average.parameters())
        self.of_the_model = sum(local(p).numel() for p in module.parameters())
        self.same_kinds = [isinstance(p, DTensor) for p in average.parameters()] == [
            isinstance(p, DTensor) for p in module.parameters()
        ]


def average_module(callback: Any) -> nn.Module:
    average = callback._average_model
    return getattr(average, "module", average)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fit(run: Run, kind: str, epochs: int | None = None, plugin: str | None = None) -> dict[str, Any]:
    """Train, in epochs of two batches on request; return both sets of weights, and the observations."""
    extra: dict[str, Any] = {"max_epochs": epochs, "limit_train_batches": 2} if epochs else {}
    engines.register()
    callback = make_callback(kind) if kind != "none" else Callback()
    look = Look(callback)
    module = MODELS[run.model](run)
    if run.strategy.startswith("ddp"):
        plugin = "nnx"
    if plugin is not None:
        extra["plugins"] = [PLUGINS[plugin]()]
    watching = [callback, look] if kind != "none" else []
    trainer = make_trainer(run, callbacks=[*watching, SaveAt(run)], **extra)
    trainer.fit(module, ckpt_path=run.resume)
    return {} if kind == "none" else report(trainer, module, callback, look)


def report(trainer: Trainer, module: Net, callback: Any, look: Look) -> dict[str, Any]:
    average = average_module(callback)
    own_function = getattr(callback, "_kwargs", {}).get("multi_avg_fn")
    everything = (*average.parameters(), *average.buffers(), *module.parameters())
    return {
        "losses": module.losses,
        "weights": state(module),
        "average": state(average),
        "val_loss": float(trainer.callback_metrics.get("val_loss", 0.0)),
        "plain": all(type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" for t in everything),
        "routed": sorted(set(vars(callback)) & set(dir(type(callback)))),
        "own function": getattr(callback._average_model, "multi_avg_fn", None) is own_function,
        "share": look.elements / max(1, sum(p.numel() for p in module.parameters())),
        "same_kinds": look.same_kinds and look.elements == look.of_the_model,
    }


def read_as_a_whole(run: Run) -> list[str]:
    """Resume, and return the tensors that were read unsharded."""
    whole: list[str] = []
    original = storage.Checkpoint.read

    def read(self: storage.Checkpoint, name: str, box: Any = None) -> Tensor:
        if box is None:
            whole.append(name)
        return original(self, name, box)

    storage.Checkpoint.read = read
    try:
        make_trainer(run, callbacks=[make_callback("ema")]).fit(Net(run), ckpt_path=run.resume)
    finally:
        storage.Checkpoint.read = original
    return whole


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def every_stage(run: Run, kind: str) -> dict[str, Any]:
    """Fit, validate, test and predict with one Trainer, and fit once more."""
    callback = make_callback(kind)
    look = Look(callback)
    module = MODELS[run.model](run)
    trainer = make_trainer(run, callbacks=[callback, look])
    trainer.fit(module)
    seen: dict[str, Any] = {"first": state(average_module(callback))}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)  # so that validation shows which weights it uses
    seen["val"] = trainer.validate(module, verbose=False)[0]["val_loss"]
    seen["test"] = trainer.test(module, verbose=False)[0]["test_loss"]
    seen["predicted"] = sum(float(t.double().square().sum()) for t in trainer.predict(module))
    seen["average after"] = state(average_module(callback))
    trainer.fit_loop.epoch_loop.max_steps = 2 * run.steps
    trainer.fit(module)
    return seen | report(trainer, module, callback, look)


def save_afterwards(run: Run, path: str, start: str | None = None) -> dict[str, Any]:
    """Train and save when training is over; or load first and save without training."""
    callback = make_callback("ema")
    module = MODELS[run.model](run)
    trainer = make_trainer(run, callbacks=[callback])
    trainer.fit(module, ckpt_path=start)
    trainer.save_checkpoint(path)
    return {"weights": state(module)}


def resume_without(run: Run, path: str) -> dict[str, Any]:
    """Test and resume from a checkpoint of averaged weights, without the callback."""
    module = MODELS[run.model](run)
    trainer = make_trainer(run)
    loss = trainer.test(module, ckpt_path=path, verbose=False)[0]["test_loss"]
    weights = state(module)
    trainer.fit(module, ckpt_path=path)
    return {"loss": loss, "weights": weights, "losses": module.losses}


def fail_while_averaging(run: Run, on: list[int]) -> dict[str, Any]:
    """Fail at the third step; return the remaining state of the average."""
    callback = make_callback("ema")
    module = MODELS[run.model](run)

    class Fail(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2 and trainer.global_rank in on:
                raise ValueError("bad batch")

    trainer = make_trainer(run, callbacks=[callback, Fail()])
    try:
        trainer.fit(module)
        error = ""
    except ValueError as caught:
        error = str(caught)
    average = average_module(callback)
    plain = all(type(p) is nn.Parameter for p in average.parameters())
    made = state(average) if plain else {}
    routed = set(vars(callback)) & set(dir(type(callback)))
    if len(on) < trainer.world_size:  # the others wait for this rank
        print(f"routed: {sorted(routed)}", flush=True)
        os._exit(3)
    return {"error": error, "average": made, "routed": routed}


def copied_at_setup(run: Run, kind: str) -> tuple[int, int]:
    """Return the elements of the callback's copy before the model is sharded, and of a deep copy."""
    callback = make_callback(kind)
    held: list[int] = []

    class Count(Callback):
        def setup(self, trainer: Trainer, module: Any, stage: str) -> None:
            held.append(sum(p.numel() for p in average_module(callback).parameters()))
            copy.deepcopy(module)  # which others may do, and get the whole
            held.append(sum(p.numel() for p in copy.deepcopy(module).parameters()))

    module = MODELS[run.model](run)
    make_trainer(run, callbacks=[callback, Count()]).fit(module)
    return held[0], held[1]


def error_while_averaging(run: Run, kind: str) -> str:
    """Return the error message of a run with an averaging callback."""
    try:
        fit(run, kind)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
