"""What the ranks do in test_tiny_backend.py."""

from __future__ import annotations

import os
from pathlib import Path

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

    import nnx

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
    config = GPTConfig(context=32, layers=2, heads=2, width=32)
    nnx.StrategyRegistry.register("tiny", "nnx_tiny.backend:TinyBackend", override=True)
    try:
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
        module = Descent(config, steps=STEPS)
        if resume is None:
            trainer.fit(module, datamodule=data)
            trainer.save_checkpoint(directory / "last.ckpt")
        else:
            trainer.validate(module, datamodule=data, ckpt_path=resume, verbose=False)
    finally:
        nnx.StrategyRegistry.remove("tiny")
    return {"train": record.losses, "val": [float(trainer.callback_metrics["val_loss"])]}


def refused_option() -> str:
    """The message for an option out of range."""
    import nnx

    nnx.StrategyRegistry.register("tiny", "nnx_tiny.backend:TinyBackend", override=True)
    try:
        nnx.strategy("tiny", bucket_megabytes=0)
    except nnx.OptionError as error:
        return str(error)
    finally:
        nnx.StrategyRegistry.remove("tiny")
    return "no error"
