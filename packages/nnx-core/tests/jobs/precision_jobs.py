"""Jobs about Lightning's precision plugins: the dtypes of a computation, and loss scaling."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.amp import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.distributed.tensor import DTensor

import nnx
from nnx_test_helpers.fabric_jobs import batch, loss_of, model_and_optimizer
from nnx_test_helpers.lightning_jobs import OPTIONS, full, rank, trainer_for
from nnx_test_helpers.training import Net, Run, digest_of, make_trainer

START = 2.0**10
"""Loss scale to begin with; small enough that the test model never overflows by itself."""


class Dtypes(Net):
    """Notes the dtypes that a step really sees."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.seen: dict[str, str] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(self.frozen(x))
        self.seen = {"input": str(x.dtype), "hidden": str(hidden.dtype)}
        self.seen["weight"] = str(self.embed.weight.dtype)
        return super().forward(x)


def with_precision(run: Run) -> dict[str, Any]:
    """Train and validate; losses, dtypes, and weights in double precision."""
    module = Dtypes(run)
    trainer = make_trainer(run)
    trainer.fit(module)
    return {
        "losses": module.losses,
        "val": float(trainer.callback_metrics["val_loss"]),
        "dtypes": module.seen,
        "weights": {name: value.detach().double() for name, value in module.state_dict().items()},
        "stored": {str(value.dtype) for value in module.parameters()},
    }


class Poison(Net):
    """One element of one rank's own gradients overflows in one step."""

    poisoned: tuple[int, int] = (-1, -1)
    clip_to: float | None = None

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.scales: list[float] = []
        self.digests: list[str] = []
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        step, where = self.poisoned
        if self.trainer.fit_loop.epoch_loop.batch_idx == step and rank() == where:
            gradient: Any = self.blocks[1].up.weight.grad
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient)[-1, -1] = float("inf")

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.clip_to is None:
            return
        self.clip_gradients(optimizer, self.clip_to, "norm")
        squares = [full(p.grad).double().square().sum() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))


class Watch(Callback):
    """Notes the loss scale at the start and the scale and weights after each step."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        module.scales.append(trainer.precision_plugin.scaler.get_scale())

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        module.scales.append(trainer.precision_plugin.scaler.get_scale())
        weights = {name: full(value) for name, value in module.state_dict().items()}
        module.digests.append(digest_of(weights))


def scaled(
    devices: int,
    strategy: str = "fsdp_auto",
    poisoned: tuple[int, int] = (-1, -1),
    clip_to: float | None = None,
    start: float = START,
    save: str | None = None,
    resume: str | None = None,
    steps: int = 5,
) -> dict[str, Any]:
    """Train in 16-mixed with a gradient scaler, on the CPU."""
    module = Poison(Run(devices=devices))
    module.poisoned, module.clip_to = poisoned, clip_to
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=1000)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = trainer_for(
        devices,
        strategy,
        plugins=[plugin],
        callbacks=[Watch()],
        max_steps=steps,
        use_distributed_sampler=False,
    )
    trainer.fit(module, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return {
        "losses": module.losses,
        "scales": module.scales,
        "digests": module.digests,
        "norms": module.norms,
        "scaler": type(trainer.precision_plugin.scaler).__name__,
    }


def scaled_in_fabric(devices: int) -> dict[str, Any]:
    """The same through Fabric: an overflow on the last rank in the second of three steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=START)
    plugin = FabricMixedPrecision("16-mixed", "cpu", scaler=scaler)
    strategy = nnx.strategy("fsdp_auto", namespace="lightning.fabric", **OPTIONS)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=devices, plugins=[plugin])
    fabric.launch()
    module, raw = model_and_optimizer()
    model, optimizer = fabric.setup(module, raw)
    digests, norms = [], []
    for index in range(3):
        fabric.backward(loss_of(model, batch(fabric, index)))
        if index == 1 and fabric.global_rank == devices - 1:
            gradient: Any = module.embed.weight.grad
            gradient.to_local()[-1, -1] = float("nan")
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=False)))
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest_of({name: full(value) for name, value in module.state_dict().items()}))
    return {"digests": digests, "scale": plugin.scaler.get_scale(), "norms": norms}
