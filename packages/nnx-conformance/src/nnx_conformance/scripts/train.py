"""A user's training script: ``python train.py JOB`` trains a task and writes an account of it to JOB.

A new Python runs the script by path, so that Lightning is asked for the strategy before any import of nnx.
`checks.lifecycle.launch` writes JOB, a directory, and reads the accounts.

"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

REGISTRIES = {
    "lightning.pytorch": "StrategyRegistry",
    "pytorch_lightning": "StrategyRegistry",
    "lightning.fabric": "STRATEGY_REGISTRY",
    "lightning_fabric": "STRATEGY_REGISTRY",
}


def main(directory: Path) -> None:
    """Train, and write an account."""
    job = json.loads((directory / "job.json").read_text())
    found = look_around(job)
    account = train(directory, job) if job["through"] == "Trainer" else train_by_cli(directory, job)
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    (directory / f"account-{rank}.pickle").write_bytes(pickle.dumps({**account, "found": found}))


def look_around(job: dict[str, Any]) -> dict[str, Any]:
    """Return the trees that know the strategy, and the imports so far, before the strategy is used."""
    known = [
        tree
        for tree, registry in REGISTRIES.items()
        if job["strategy"] in getattr(importlib.import_module(f"{tree}.strategies"), registry)
    ]
    return {
        "known in": known,
        "nnx was imported": "nnx_conformance" in sys.modules,
        "engine was imported": job["engine"] in sys.modules,
    }


def train(directory: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Train as `fit` does in the workers."""
    from nnx_conformance.training import make_trainer, outcome_of

    subject, task = pickle.loads((directory / "job.pickle").read_bytes())
    if job["prepare"]:
        subject.prepare()
    module = task.module()
    trainer = make_trainer(subject, task, devices=job["devices"])
    trainer.fit(module)
    return {"outcome": outcome_of(trainer, module), "world size": trainer.world_size}


def train_by_cli(directory: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Train with LightningCLI, with the strategy as a command-line argument."""
    from lightning.pytorch.cli import LightningCLI

    from nnx_conformance.task import Plain
    from nnx_conformance.training import outcome_of, trainer_settings

    subject, task = pickle.loads((directory / "job.pickle").read_bytes())
    settings = trainer_settings(subject, task, devices=job["devices"])
    del settings["strategy"]

    class Model(Plain):
        def __init__(self) -> None:
            super().__init__(task)

    arguments = ["fit", "--trainer.strategy", job["strategy"]]
    cli = LightningCLI(Model, args=arguments, save_config_callback=None, trainer_defaults=settings)
    return {"outcome": outcome_of(cli.trainer, cli.model), "world size": cli.trainer.world_size}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
