"""Programs written for lightning-fairscale by its users, and the effects of its arguments."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import wrap
from torch.utils.data import DataLoader

from jobs.fairscale_jobs import Layer, Loop, Net, make_backend
from nnx_core.backend import ParallelContext

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "max_steps": 3,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


class Boring(BoringModel):
    """Its optimizer is built from the Trainer's model, as the documentation advised."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.1)


class Wrapped(LightningModule):
    """Wraps its layers by hand and puts them into a second module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear_layer = nn.Linear(32, 32)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def configure_sharded_model(self) -> None:
        linear_layer = wrap(self.linear_layer)
        for index, layer in enumerate(self.block):
            self.block[index] = wrap(layer)
        self.model = nn.Sequential(linear_layer, nn.ReLU(), self.block)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.shapes = {tuple(parameter.shape) for parameter in self.model.parameters()}
        loss: Tensor = self.model(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters())

    train_dataloader = BoringModel.train_dataloader


PROGRAMS: dict[str, type[LightningModule]] = {"boring": Boring, "wrapped": Wrapped}


def train_program(
    name: str, arguments: dict[str, Any] | None, precision: Any = "32-true"
) -> dict[str, Tensor]:
    """Train under ``DDPFullyShardedStrategy``, or without arguments under DDP; returns the weights."""
    from nnx_fairscale.strategies import DDPFullyShardedStrategy

    torch.manual_seed(1)
    strategy: Any = "ddp" if arguments is None else DDPFullyShardedStrategy(**arguments)
    module = PROGRAMS[name]()
    Trainer(strategy=strategy, precision=precision, **QUIET).fit(module, _batches())
    weights: dict[str, Tensor] = {name: value.clone() for name, value in module.state_dict().items()}
    return weights


def _batches() -> DataLoader[Any]:
    batches = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
    return DataLoader(list(batches), batch_size=None)  # type: ignore[arg-type]


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of fairscale's FSDP for the root of a model, and the resulting layout."""
    backend: Any = make_backend(Loop("fsdp", options))
    backend.setup(ParallelContext(device=torch.device("cpu")))
    module = Net()
    torch.distributed.init_process_group("gloo")
    backend.parallelize(module, lambda: ((), {}))
    units = backend._layouts[module].units
    root = units[module]
    calls: list[nn.Module] = []
    for layer in module.layers:
        layer.norm.register_forward_pre_hook(lambda norm, args: calls.append(norm))
    backend.backward(module, backend.run_step(module, module, torch.ones(2, 5)).square().mean())
    seen = {
        "units": sorted(type(owner).__name__ for owner in units),
        "flatten_parameters": bool(root._num_flatten_params),
        "reshard_after_forward": next(iter(units.values())).reshard_after_forward,  # the root never does
        "fp32_reduce_scatter": root.fp32_reduce_scatter,
        "mixed_precision": root.mixed_precision,
        "compute_dtype": str(root.compute_dtype),
        "bucket_cap_mb": root.bucket_cap_mb,
        "calls of a layer": len(calls) // len(module.layers),
    }
    backend.unparallelize(module)
    backend.teardown()
    return seen


LAYER: type[nn.Module] = Layer
