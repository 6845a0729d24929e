"""One training run: an ordinary Lightning script, started as `python -m gpt.run` from examples/.

This script does not import nnx: the installed package registers `strategy="fsdp_auto"` with Lightning, which
starts the processes itself.
"""

from __future__ import annotations

import argparse
import re
import warnings
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from gpt.data import StandardLibrary
from gpt.model import GPTConfig
from gpt.module import LitGPT

__all__ = ["main"]


def main() -> None:
    """Train, and leave `losses/metrics.csv` and checkpoints in the output directory."""
    arguments = parse_arguments()
    silence_expected_warnings()
    seed_everything(arguments.seed, verbose=False)
    config = GPTConfig()
    model = LitGPT(config, steps=arguments.steps)
    data = StandardLibrary(
        steps=arguments.steps,
        global_batch=arguments.global_batch,
        context=config.context,
        seed=arguments.seed,
    )
    build_trainer(arguments).fit(model, datamodule=data, ckpt_path=arguments.resume)


def build_trainer(arguments: argparse.Namespace) -> Trainer:
    """A trainer that logs the loss of every step, validates four times and saves in the middle."""
    middle = arguments.steps // 2
    return Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy=arguments.strategy,
        max_epochs=1,  # the data module serves as many global batches as there are steps
        val_check_interval=max(1, arguments.steps // 4),
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger(arguments.out, name="losses", version=""),
        callbacks=ModelCheckpoint(
            arguments.out / "checkpoints",
            filename="step-{step}",
            auto_insert_metric_name=False,
            every_n_train_steps=middle,
            save_top_k=-1,
        ),
        # The data module gives every rank its share, so that runs at any world size can be compared.
        use_distributed_sampler=False,
        enable_model_summary=False,
    )


def silence_expected_warnings() -> None:
    """Keep the output readable; each of these is about something done here on purpose, or not by us."""
    expected = [
        "does not have many workers",  # two cores are busy with the model
        "The dirpath has changed",  # a resumed run keeps its own checkpoints apart
        "`isinstance(treespec, LeafSpec)` is deprecated",  # Lightning 2.6 on torch 2.13
    ]
    for message in expected:
        warnings.filterwarnings("ignore", message=f".*{re.escape(message)}")


def parse_arguments() -> argparse.Namespace:
    """The command line of one run."""
    parser = argparse.ArgumentParser(prog="python -m gpt.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for losses and checkpoints")
    parser.add_argument("--devices", type=int, default=2, help="number of CPU processes")
    parser.add_argument("--strategy", default="fsdp_auto", help="any name that `nnx list` shows")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps in all")
    parser.add_argument("--global-batch", type=int, default=12, help="sequences per step, over all processes")
    parser.add_argument("--seed", type=int, default=1, help="fixes initial weights and data order")
    parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
    return parser.parse_args()


if __name__ == "__main__":
    main()
