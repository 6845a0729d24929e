"""Runs with `NnScalerStrategy` and with options of the nnscaler engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from nnx_nnscaler import ComputeConfig, NnScalerPrecision, NnScalerStrategy
from nnx_test_helpers.training import Net, Outcome, Run, train


def trained_with_the_class(folder: str) -> tuple[list[float], str, bool]:
    """Train as code for the original does, save and merge; losses, precision, and is the file right."""
    run = Run(steps=4)
    module = Net(run)
    strategy = NnScalerStrategy(
        compute_config=ComputeConfig(1, 2, use_zero=True, zero_ngroups=1),
        pas_policy="dp",
        gen_savedir=f"{folder}/code",
        reuse="override",
        instance_name="mine",
        state_dict_type="deduped",
        precision_plugin=NnScalerPrecision("32-true"),
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=run.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    if trainer.global_rank == 0:
        NnScalerStrategy.merge_checkpoint([f"{folder}/last.ckpt"], f"{folder}/merged.ckpt")
    trainer.strategy.barrier()
    merged = torch.load(f"{folder}/merged.ckpt", weights_only=True)["state_dict"]
    same = all(torch.equal(merged[name], value) for name, value in module.state_dict().items())
    return module.losses, trainer.precision, same


class Dtypes(Callback):
    """Records dtypes after the first step."""

    def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
        (optimizer,) = trainer.optimizers
        parameter = next(p for p in optimizer.param_groups[0]["params"] if "exp_avg" in optimizer.state[p])
        self.seen = {
            "parameter": parameter.dtype,
            "gradient": None if parameter.grad is None else parameter.grad.dtype,
            "state": optimizer.state[parameter]["exp_avg"].dtype,
        }


def dtypes_with_masters(run: Run) -> dict[str, Any]:
    """Return the dtypes of a run with float32 masters."""
    note = Dtypes()
    train(run, callbacks=[note])
    return note.seen


def interrupted(run: Run, path: str, at: int) -> tuple[list[float], list[float]]:
    """Losses of a whole run, and of one that was resumed, from the step on at which it was interrupted."""
    whole = train(replace(run, save=path, save_at=at))
    resumed = train(replace(run, resume=path))
    return whole.losses[at:], resumed.losses


def warned(run: Run) -> tuple[Outcome, list[str]]:
    """Return the outcome of a run, and the engine's warnings."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("nnx.nnscaler")
    logger.addHandler(handler)
    try:
        return train(run), messages
    finally:
        logger.removeHandler(handler)
