"""Device meshes, each made once for a world: their process groups last as long as the world does."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from nnx_core._torch_compat import forget_dtensors

_Key = tuple[str, tuple[int, ...], tuple[str, ...]]
_meshes: dict[dist.ProcessGroup | None, dict[_Key, DeviceMesh]] = {}


def mesh_of(device_type: str, shape: tuple[int, ...], *, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of all ranks in this shape. Collective the first time.

    Torch never takes down the groups of a mesh that is dropped, so a mesh for each Trainer would leave
    groups, threads and sockets behind with every run.

    Args:
        device_type: Such as ``"cpu"``.
        shape: Ranks along each axis.
        names: The names of the axes.
    """
    key = (device_type, shape, names)
    if key not in _meshes.get(dist.group.WORLD, {}):
        made = init_device_mesh(device_type, shape, mesh_dim_names=names)  # makes the world, if there is none
        if dist.group.WORLD not in _meshes:
            _meshes.clear()  # of a world that was destroyed since
            forget_dtensors()
        _meshes.setdefault(dist.group.WORLD, {})[key] = made
    return _meshes[dist.group.WORLD][key]
