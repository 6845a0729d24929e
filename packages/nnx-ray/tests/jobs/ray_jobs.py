"""Functions and classes that run in Ray's actors; they are importable, because Ray sends them by name."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from nnx_conformance.subject import Subject
from nnx_conformance.task import Plain, Task, share_of
from nnx_conformance.training import make_trainer


class Account(Callback):
    """Writes each step of rank 0 and the identity of each rank to files; a rank may be slow, die or raise.

    Args:
        folder: A directory that all processes share.
        seconds: The duration of a step.
        dies: The rank and the step after which it is killed, the first time.
        raises: The rank and the step after which it raises an error.
    """

    def __init__(
        self,
        folder: Path,
        *,
        seconds: float = 0.0,
        dies: tuple[int, int] | None = None,
        raises: tuple[int, int] | None = None,
    ) -> None:
        self.folder, self.seconds, self.dies, self.raises = folder, seconds, dies, raises

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Write the identity of this rank."""
        who = {
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "node": trainer.node_rank,
            "local": trainer.local_rank,
            "share": share_of(trainer),
            "raylet": ray_node(),
        }
        (self.folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(who))
        (self.folder / f"rank-{trainer.global_rank}.pid").write_text(str(os.getpid()))

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        """Write the loss, and do the planned action."""
        here = (trainer.global_rank, trainer.global_step)
        if trainer.is_global_zero:
            with (self.folder / "steps.jsonl").open("a") as file:
                line = {"step": trainer.global_step, "loss": module.losses[-1], "at": time.time()}
                file.write(f"{json.dumps(line)}\n")
        time.sleep(self.seconds)
        mark = self.folder / "died"
        if self.dies == here and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.raises == here:
            raise KeyError(f"rank {here[0]} at step {here[1]}")


class Logging(Plain):
    """Logs its loss."""

    def training_step(self, batch: Any, index: int) -> Any:
        """One batch."""
        loss = super().training_step(batch, index)
        self.log("loss", loss, sync_dist=True)
        return loss


def train_with_fabric(fabric: Any) -> tuple[list[float], list[int]]:
    """Train under Fabric; return the mean losses of all ranks, and rank, node rank and world size."""
    import torch

    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    module = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.1))
    batches = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in batches:
        own = batch[fabric.global_rank :: fabric.world_size]
        loss = module(own).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
    return losses, [fabric.global_rank, fabric.node_rank, fabric.world_size]


def ray_node() -> str:
    """The raylet that this process belongs to; empty outside of Ray."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that rank 0 wrote, in order; repeated steps occur again."""
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def ranks_of(folder: Path) -> list[dict[str, Any]]:
    """Return the ranks of the last start, by node. (Plan units share the rank that they show.)"""
    found = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda who: (who["node"], who["local"]))


def train_in_ray_train(config: dict[str, Any]) -> None:
    """The function of a `TorchTrainer`: nothing in it is Ray's."""
    import nnx

    folder, name = Path(config["folder"]), config["strategy"]
    task = Task(steps=config["steps"], clip=0.5, optimizer="adamw", model=Logging)
    options = {} if name == "ddp" else {"launcher": "ray"}
    trainer = make_trainer(
        Subject(name, options=options),
        task,
        devices=config["devices"],
        num_nodes=config["nodes"],
        callbacks=[Account(folder)],
        plugins=[nnx.CheckpointIO()] if name == "ddp" else [],
    )
    trainer.fit(task.module())
    trainer.save_checkpoint(folder / "end.ckpt")
