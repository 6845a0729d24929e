"""Jobs about Lightning's sharded directories: Fabric runs, and Lightning's loaders on directories of nnx."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import nnx
from nnx_test_helpers.fabric_jobs import model_and_optimizer, step
from nnx_test_helpers.lightning_jobs import OPTIONS
from nnx_test_helpers.resume_jobs import Seen, run_cell
from nnx_test_helpers.training import MODELS, Parallelized, Run, digest_of


class Named(Parallelized):
    """Builds its optimizer from ``named_parameters``, which torch keeps in its groups."""

    def _optimizer(self, parameters: Any, lr: float) -> torch.optim.Optimizer:
        chosen = {id(parameter) for parameter in parameters}
        named = [(name, p) for name, p in self.named_parameters() if id(p) in chosen]
        return torch.optim.AdamW(named, lr=lr, weight_decay=0.1)


MODELS |= {"named": Named}


def cell(run: Run, at: int) -> Seen:
    """As `run_cell`, with the model above too."""
    return run_cell(run, at)


@dataclass
class FabricRun:
    """The report of a run with Fabric."""

    weights: str
    momenta: str
    losses: list[float]
    note: Any
    rest: list[str]


def fabric_run(kind: str, world: int, steps: range, save: str | None, resume: str | None) -> FabricRun:
    """Train with Fabric on our strategy (``nnx``) or on Lightning's, under keys of our own."""
    fabric, model, optimizer = _set_up(kind, world)
    state = {"net": model, "opt": optimizer, "note": {"epoch": 0}}
    rest: list[str] = []
    if resume is not None:
        rest = sorted(fabric.load(resume, state))
    seen = _digests(model, optimizer)
    losses = [step(fabric, model, optimizer, index) for index in steps]
    if save is not None:
        seen = _digests(model, optimizer)
        fabric.save(save, {**state, "note": {"epoch": 5}})
    return FabricRun(*seen, losses, state["note"], rest)


def _set_up(kind: str, world: int) -> tuple[Fabric, Any, Any]:
    if kind == "nnx":
        strategy: Any = nnx.strategy("fsdp_auto", namespace="lightning.fabric", **OPTIONS)
    else:
        strategy = ModelParallelStrategy(_shard, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=world)
    fabric.launch()
    module, optimizer = model_and_optimizer()
    if kind == "nnx":
        return fabric, *fabric.setup(module, optimizer)
    model = fabric.setup(module)
    return fabric, model, fabric.setup_optimizers(module.configure_optimizers())


def _shard(module: Any, mesh: Any) -> Any:
    for block in module.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(module, mesh=mesh["data_parallel"])


def _digests(model: Any, optimizer: Any) -> tuple[str, str]:
    names = {parameter: _plain(name) for name, parameter in model.named_parameters()}
    momenta = {
        f"{names[parameter]}.{key}": _whole(value)
        for parameter, entries in optimizer.optimizer.state.items()
        for key, value in entries.items()
    }
    weights = {names[parameter]: _whole(parameter) for parameter in names}
    return digest_of(weights), digest_of(momenta)


def _plain(name: str) -> str:
    """A parameter's name without those of wrappers."""
    return name.replace("_forward_module.", "").removeprefix("module.")


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()


def load_as_fsdp(path: str, weights: dict[str, torch.Tensor]) -> Any:
    """Load an optimizer as Lightning's FSDPStrategy does, without an accelerator."""
    loaded = load_sharded_optimizer_state_dict(
        model_state_dict=weights, optimizer_key="optimizer_0", storage_reader=FileSystemReader(path)
    )
    state = {
        name: {key: _local(value) for key, value in entries.items()}
        for name, entries in loaded["optimizer_0"]["state"].items()
    }
    return {"state": state, "param_groups": loaded["optimizer_0"]["param_groups"]}


def _local(value: Any) -> Any:
    return value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
