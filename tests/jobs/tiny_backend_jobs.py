"""Jobs of test_tiny_backend.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS = 4


def train(strategy: str, directory: Path, resume: Path | None = None) -> dict[str, list[float]]:
    """A few steps of the example's GPT, with accumulation and clipping: the global loss of each batch.

    With SGD, and clipping that spares most elements: Adam, or clipping by norm, would hide a wrong scale.
    """
    import torch
    from gpt.data import StandardLibrary
    from gpt.model import GPTConfig
    from gpt.module import LitGPT
    from lightning.pytorch import Callback, Trainer, seed_everything

    class Descent(LitGPT):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    class Record(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.losses.append(
                float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean"))
            )

    seed_everything(1, verbose=False)
    record = Record()
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.01,
        gradient_clip_algorithm="value",
        callbacks=record,
        limit_val_batches=2,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = StandardLibrary(steps=2 * STEPS, global_batch=12, context=32, limit=50_000)
    module = Descent(GPTConfig(context=32, layers=2, heads=2, width=32), steps=STEPS)
    if resume is None:
        trainer.fit(module, datamodule=data)
        trainer.save_checkpoint(directory / "last.ckpt")
    else:
        trainer.validate(module, datamodule=data, ckpt_path=resume, verbose=False)
    return {"train": record.losses, "val": [float(trainer.callback_metrics["val_loss"])]}


def refused_option() -> str:
    """The message for an option out of range."""
    import nnx

    try:
        nnx.strategy("tiny", bucket_megabytes=0)
    except nnx.OptionError as error:
        return str(error)
    return "no error"


def show_in_a_fresh_process(name: str) -> tuple[str, bool]:
    """Return the output of ``nnx show --json``, and True if it imports torch."""
    script = (
        "import sys; from nnx_checkpoint.cli.command import main\n"
        f"sys.argv = ['nnx', 'show', {name!r}, '--json']\n"
        "try: main()\n"
        "finally: sys.stderr.write(str('torch' in sys.modules))\n"
    )
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    return finished.stdout, finished.stderr == "True"


def average(bucket_megabytes: float) -> dict[str, Any]:
    """Gradients after averaging, of parameters that not every rank uses."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from nnx_tiny.averaging import average_gradients

    rank = dist.get_rank()
    module = nn.ParameterDict(
        {name: nn.Parameter(torch.zeros(1)) for name in ("only on rank 1", "nowhere", "frozen")}
    )
    module["shared"] = nn.Parameter(torch.zeros(3))
    module["lower precision"] = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    module["frozen"].requires_grad_(False)
    module["shared"].grad = torch.tensor([1.0, 2.0, 3.0]) * rank
    module["lower precision"].grad = torch.full((1,), rank, dtype=torch.bfloat16)
    if rank == 1:
        module["only on rank 1"].grad = torch.full((1,), 6.0)
    average_gradients(module, bucket_megabytes=bucket_megabytes)
    return {name: parameter.grad for name, parameter in module.items()}


def sampler_shares() -> dict[tuple[int, int], dict[str, int]]:
    """Return the data share of each process of three nodes with two processes."""
    import torch

    from nnx_tiny.strategy import TinyStrategy

    shares = {}
    for node in range(3):
        for local in (0, 1):
            environment = SimpleNamespace(
                node_rank=lambda node=node: node,
                local_rank=lambda local=local: local,
                set_world_size=lambda size: None,
            )
            environment.set_global_rank = lambda rank, where=environment: setattr(where, "rank", rank)
            environment.global_rank = lambda where=environment: where.rank
            strategy = TinyStrategy(
                parallel_devices=[torch.device("cpu")] * 2, cluster_environment=environment
            )
            strategy.num_nodes = 3
            strategy.set_world_ranks()
            shares[node, local] = strategy.distributed_sampler_kwargs
    return shares


def reductions() -> dict[str, Any]:
    """Every kind of reduction of this rank's number."""
    import torch
    import torch.distributed as dist

    from nnx_tiny.strategy import TinyStrategy

    strategy = TinyStrategy(parallel_devices=[torch.device("cpu")])
    rank = dist.get_rank()
    given = torch.tensor(float(rank))
    kinds = ["mean", "avg", "sum", "max", dist.ReduceOp.SUM, None]
    seen: dict[str, Any] = {
        "ReduceOp.SUM" if isinstance(kind, dist.ReduceOp.RedOpType) else str(kind): strategy.reduce(
            given, reduce_op=kind
        ).item()
        for kind in kinds
    }
    seen["mean of integers"] = strategy.reduce(torch.tensor(rank)).item()
    seen["not a tensor"] = strategy.reduce(rank)
    seen["argument"] = given.item()
    return seen
