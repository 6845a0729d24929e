"""Make each device mesh once per world, because its process groups last as long as the world."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nnx_core._torch_compat import forget_dtensors

_Key = tuple[str, tuple[int, ...], tuple[str, ...]]
_meshes: dict[dist.ProcessGroup | None, dict[_Key, DeviceMesh]] = {}


def mesh_of(device_type: str, shape: tuple[int, ...], *, names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of all ranks in this shape. Collective the first time.

    Torch keeps the groups of a dropped mesh. A new mesh for each Trainer would leak groups, threads and
    sockets with every run.

    Args:
        device_type: A device type such as ``"cpu"``.
        shape: The number of ranks along each mesh dim.
        names: The names of the mesh dims.
    """
    key = (device_type, shape, names)
    if key not in _meshes.get(dist.group.WORLD, {}):
        made = init_device_mesh(device_type, shape, mesh_dim_names=names)  # also makes a missing world
        if dist.group.WORLD not in _meshes:
            _meshes.clear()  # their world was destroyed
            forget_dtensors()
        _meshes.setdefault(dist.group.WORLD, {})[key] = made
    return _meshes[dist.group.WORLD][key]
