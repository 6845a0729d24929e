"""Programs that use fairscale 0.4.13 itself, without nnx's strategies, and save checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.fairscale_jobs import WEIGHTS
from nnx_core.errors import NnxError
from nnx_test_helpers.training import MODELS, Net, Run, make_trainer, train

STEP, STEPS = 2, 4


class Sharded(Net):
    """A model whose optimizer is fairscale's OSS."""

    def configure_optimizers(self) -> Any:
        from fairscale.optim import OSS

        return OSS([p for p in self.parameters() if p.requires_grad], torch.optim.AdamW, lr=0.01)


class Whole(Net):
    """The same with torch's optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


MODELS["whole"] = Whole


def save_oss(path: str) -> list[float]:
    """Save a model that stock Lightning trained with OSS, consolidated; return the losses of a longer run."""
    run = Run(strategy="ddp", steps=STEP)
    module = Sharded(run)
    trainer = make_trainer(run)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    longer = Run(strategy="ddp", steps=STEPS, model="whole")
    return train(longer).losses


def save_fsdp(folder: str, flatten: bool) -> WEIGHTS:
    """Train with fairscale's FSDP alone, and save its shards in ``shards`` and the complete ``full.pt``."""
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    from nnx_fairscale._fairscale_fsdp import STREAMS, HostShim

    dist.init_process_group("gloo")
    module = Net(Run()).requires_grad_()  # fairscale does not shard what is frozen with the rest
    settings: dict[str, Any] = {
        "process_group": dist.group.WORLD,
        "process_group_reduce_scatter": dist.group.WORLD,
        "compute_device": torch.device("cpu"),
        "flatten_parameters": flatten,
    }
    stream = HostShim.install()
    for index, block in enumerate(module.blocks):
        module.blocks[index] = FullyShardedDataParallel(block, **settings)
    root = FullyShardedDataParallel(module, **settings)
    root._lazy_init()
    root._streams.update(dict.fromkeys(STREAMS, stream))  # every unit has this dict
    _train(root)
    rank, shards = dist.get_rank(), Path(folder) / "shards"
    shards.mkdir(exist_ok=True)
    held = {"weights": root.local_state_dict(), "meta": root.local_metadata_dict()}
    torch.save(held, shards / f"model-shard{rank}.pt")
    full = {name: value.clone() for name, value in root.state_dict().items()}
    HostShim.remove()
    if rank == 0:
        torch.save(full, Path(folder) / "full.pt")
    dist.barrier()
    return full


def _train(root: nn.Module) -> None:
    optimizer = torch.optim.AdamW(root.parameters(), lr=0.01)
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(STEP):
        optimizer.zero_grad()
        F.mse_loss(root(inputs), torch.sin(inputs)).backward()
        optimizer.step()


def evaluate(run: Run) -> tuple[float, str]:
    """The loss of the weights that a run resumes, and the error of resuming them."""
    trainer = make_trainer(run)
    trainer.test(Net(run), ckpt_path=run.resume, verbose=False)
    return float(trainer.callback_metrics["test_loss"]), error_of(run, KeyError)


def loss_of(weights: dict[str, Tensor], run: Run) -> float:
    """The loss of weights that are in the model already."""
    module = Net(run)
    module.load_state_dict(weights)
    trainer = make_trainer(run)
    trainer.test(module, verbose=False)
    return float(trainer.callback_metrics["test_loss"])


def losses_of(run: Run) -> list[float]:
    """The losses of a run."""
    return train(run).losses


def error_of(run: Run, *expected: type[Exception]) -> str:
    """The error that a run ends with, on this rank."""
    try:
        train(run)
    except (NnxError, *expected) as error:
        return f"{type(error).__name__}: {error}"
    return "it trained"
