"""Jobs that train with Lite: converted loops, and checkpoints that Trainer resumes and that Lite resumes.

Every loop reads the same global batches in order, so that its losses equal those of one plain process.
"""

from __future__ import annotations

import importlib
import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from nnx_lite import LightningLite
from nnx_test_helpers.lightning_jobs import QUIET
from nnx_test_helpers.repository import from_repository
from nnx_test_helpers.resume_jobs import Seen, exact_state
from nnx_test_helpers.training import GLOBAL_BATCH, Block, Strided, dataset

WIDTH = 10
LEARNING_RATE = 0.02


class Regressor(nn.Module):
    """Blocks of odd sizes, a frozen layer, a tied pair and a buffer."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 6, bias=False)
        self.back = nn.Linear(WIDTH, 6, bias=False)
        self.back.weight = self.head.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5]))
        self.example_input_array = torch.zeros(4, 6)  # for engines that trace the forward

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(self.frozen(x))
        for block in self.blocks:
            hidden = block(hidden)
        return (self.head(hidden) + 0.1 * self.back(hidden.tanh())) * self.scale


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Moments and a step for each parameter that is trained; two groups."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    blocks = [p for name, p in trained.items() if "blocks" in name]
    rest = [p for name, p in trained.items() if "blocks" not in name]
    groups = [{"params": blocks}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=0.1)


def share_of(strategy: Any) -> dict[str, int]:
    """Return this rank's share of the data; ranks that compute one batch together have the same share."""
    return getattr(strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}


def batch_of(strategy: Any, index: int) -> tuple[Tensor, Tensor]:
    """This rank's share of a global batch."""
    share = share_of(strategy)
    size = GLOBAL_BATCH // share["num_replicas"]
    start = index * GLOBAL_BATCH + share["rank"] * size
    inputs, targets = dataset().tensors
    return inputs[start : start + size], targets[start : start + size]


# --- the four stages, and a page ----------------------------------------------------------------------


def examples() -> Path:
    """The folder of the example."""
    return from_repository(__file__, "examples/lite")


def stage(name: str) -> Any:
    """A module of the example."""
    folder = str(examples())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def run_stage(name: str, strategy: str, devices: int, epochs: int) -> list[float]:
    """The losses of one stage of the example."""
    module = stage(name)
    if name == "stage1_plain":
        return module.run(epochs)
    flags: dict[str, Any] = {"accelerator": "cpu", "strategy": strategy, "devices": devices}
    if name == "stage2_lite":
        return module.Lite(**flags).run(epochs)
    if name == "stage3_fabric":
        return module.run(Fabric(**flags), epochs)
    return module.run(Trainer(**{**QUIET, **flags}, max_epochs=epochs))


def run_blocks(blocks: list[tuple[str, str]], folder: str) -> str:
    """Run blocks of code in one namespace, in a folder, and return their output.

    Args:
        blocks: The position and the code of each block.
        folder: The working directory, the same for all ranks.
    """
    sys.modules.pop("__main_of_page__", None)
    namespace: dict[str, Any] = {"__name__": "__main_of_page__"}
    printed = io.StringIO()
    with redirect_stdout(printed):
        import os

        os.chdir(folder)
        for place, code in blocks:
            exec(compile(code, place, "exec"), namespace)
    return printed.getvalue()


# --- resuming -----------------------------------------------------------------------------------------


class Training(LightningLite):
    """A script of then: state dicts are saved, loaded and handed to their owners."""

    def run(self, steps: int, save: str | None, resume: str | None) -> Seen:
        module = Regressor(seed=7 if resume is None else 99)
        raw = optimizer_of(module)
        model, optimizer = self.setup(module, raw)
        start = 0
        if resume is not None:
            start = self.resume(resume, model, optimizer)
        loaded = self.exact(module, raw)
        losses = [self.step(model, optimizer, index) for index in range(start, start + steps)]
        if save is not None:
            loaded = self.exact(module, raw)
            self.store(save, model, optimizer, start + steps)
        return Seen(*loaded, losses)

    def store(self, path: str, model: Any, optimizer: Any, step: int) -> None:
        self.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)

    def resume(self, path: str, model: Any, optimizer: Any) -> int:
        content = self.load(path)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        return content["step"]

    def step(self, model: Any, optimizer: Any, index: int) -> float:
        inputs, targets = batch_of(self.strategy, index)
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        self.backward(loss)
        optimizer.step()
        return self.reduce(loss.detach().double(), reduce_op="mean").item()

    def exact(self, module: nn.Module, raw: Any) -> tuple[str, str]:
        return exact_state(SimpleNamespace(strategy=self.strategy, optimizers=[raw]), module)


class Resuming(Training):
    """A script of now: the objects themselves are saved, and restored in place; Trainer reads the same."""

    def store(self, path: str, model: Any, optimizer: Any, step: int) -> None:
        self.save({"model": model, "optimizer": optimizer, "step": step}, path)

    def resume(self, path: str, model: Any, optimizer: Any) -> int:
        rest = self.load(path, {"model": model, "optimizer": optimizer})
        return rest["step" if "step" in rest else "global_step"]


def scripted(
    strategy: str, devices: int, steps: int, save: str | None = None, resume: str | None = None
) -> Seen:
    """Train under Lite as a script of then, from the start or from a checkpoint."""
    return Training(accelerator="cpu", strategy=strategy, devices=devices).run(steps, save, resume)


def lite(strategy: str, devices: int, steps: int, save: str | None = None, resume: str | None = None) -> Seen:
    """Train under Lite with objects that are saved whole, from the start or from a checkpoint."""
    return Resuming(accelerator="cpu", strategy=strategy, devices=devices).run(steps, save, resume)


class Module(LightningModule):
    """The same model in a LightningModule."""

    def __init__(self, skip: int, seed: int) -> None:
        super().__init__()
        self.model = Regressor(seed)
        self.skip = skip
        self.losses: list[float] = []
        self.seen = ("", "")

    @property
    def example_input_array(self) -> Any:
        return None

    def on_train_start(self) -> None:
        self.seen = exact_state(self.trainer, self.model)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = F.mse_loss(self.model(batch[0]), batch[1])
        self.losses.append(self.trainer.strategy.reduce(loss.detach().double(), reduce_op="mean").item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model)

    def train_dataloader(self) -> Any:
        share = share_of(self.trainer.strategy)
        data = dataset()
        sampler = Strided(len(data), skip=self.skip, **share)
        return DataLoader(data, batch_size=GLOBAL_BATCH // share["num_replicas"], sampler=sampler)


def trainer(
    strategy: str,
    devices: int,
    steps: int = 3,
    save: str | None = None,
    resume: str | None = None,
) -> Seen:
    """Train under Trainer, from the start or from a checkpoint of Lite after some steps.

    Lite's checkpoint has no position in the data, so the module skips the batches that its loop has seen.
    """
    import nnx

    plugins = [nnx.CheckpointIO()] if strategy.startswith("ddp") else None
    module = Module(skip=0 if resume is None else steps, seed=7 if resume is None else 99)
    trainer = Trainer(
        strategy=strategy,
        devices=devices,
        max_steps=steps,
        plugins=plugins,
        use_distributed_sampler=False,
        **QUIET,
    )
    trainer.fit(module, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
        module.seen = exact_state(trainer, module.model)
    return Seen(*module.seen, module.losses)


def plain(steps: int) -> list[float]:
    """The losses of the same loop in plain PyTorch."""
    module = Regressor()
    optimizer = optimizer_of(module)
    losses = []
    for index in range(steps):
        inputs, targets = batch_of(None, index)
        optimizer.zero_grad()
        loss = F.mse_loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
