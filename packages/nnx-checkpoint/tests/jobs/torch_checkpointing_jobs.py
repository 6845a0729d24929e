"""Jobs that save and load with `torch_checkpointing` itself."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch_checkpointing as library
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def _gather(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """Replace the library's gathering, which needs CUDA."""
    found = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(found, data, group=process_group)
    return dict(enumerate(found))


def manager(*resharded: str, safetensors: bool = False) -> Any:
    """A manager that saves synchronously, without direct I/O."""
    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization()) if safetensors else None
    spec = {key: library.ItemSpec(resharder=DefaultResharder()) for key in resharded}
    if layout is not None:
        spec["model"] = library.ItemSpec(resharder=DefaultResharder(), layout=layout)
    DefaultMetadataManager._all_gather_pickled_data = _gather
    writer = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
    return library.CheckpointManager.Config(
        items=spec,
        save=SyncCheckpointSaverConfig(writer_config=writer),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()


def module() -> nn.Module:
    """A module whose rows do not divide among two ranks."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sharded(kind: str) -> nn.Module:
    """The module, sharded by rows, by columns, or replicated and sharded."""
    made = module()
    if kind == "replicas":
        fully_shard(
            made, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
        )
    elif kind == "columns":
        fully_shard(made, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    elif kind != "ddp":
        fully_shard(made)
    return made


def full_tensors(model: dict[str, Any], state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model and its optimizer under nnx's names, unsharded."""
    tensors = {f"model.{name}": value for name, value in model.items()}
    for name, entries in state["state"].items():
        tensors |= {f"optim.0.state.{name}.{key}": value for key, value in entries.items()}
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in tensors.items()
    }


def save(path: str, kind: str, resharded: bool = True) -> dict[str, torch.Tensor]:
    """Train for a step and save with the library; return the full tensors."""
    init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))  # also the process group
    made = sharded(kind)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    made(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    model, state = get_state_dict(made, optimizer)
    keys = ("model", "optimizer") if resharded else ()
    saver = manager(*keys, safetensors=kind == "safetensors")
    items = {"model": model, "optimizer": state, "step": 7, "seed": {"rank": dist.get_rank()}}
    saver.save(path, items)
    saver.close()
    dist.barrier()
    return full_tensors(model, state)


def load(path: str) -> dict[str, torch.Tensor]:
    """Load into a sharded module and optimizer with the library; return the full weights."""
    made = sharded("rows")
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    made(torch.zeros(2, 6)).sum().backward()
    optimizer.step()
    model, state = get_state_dict(made, optimizer)
    reader = manager("model", "optimizer")
    reader.load(path, {"model": model, "optimizer": {"state": state["state"]}})
    reader.close()
    return full_tensors(model, state)
