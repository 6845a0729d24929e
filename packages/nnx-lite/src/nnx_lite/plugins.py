"""Translate cluster environments and checkpoint IO of any copy of Lightning to the Fabric in use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nnx_core.errors import OptionError
from nnx_core.lightning.checkpoint import CheckpointIO
from nnx_lite.copies import FABRIC_ROOT, fabric_module, root_of
from nnx_lite.precision import fabric_precision, is_precision, precision_root

__all__ = ["choose_plugins", "fabric_checkpoint_io", "fabric_cluster_environment"]


def choose_plugins(plugins: Any) -> list[Any]:
    """Return Fabric's plugins for the user's value: None, one, or several.

    Raises:
        OptionError: A plugin is of a kind that only Trainer, or only LightningLite, supports.
    """
    if plugins is None:
        return []
    several = isinstance(plugins, Iterable) and not isinstance(plugins, str)
    return [_translate(plugin) for plugin in (plugins if several else [plugins])]


def _translate(plugin: Any) -> Any:
    if is_precision(plugin):
        return plugin if precision_root(plugin) == FABRIC_ROOT else fabric_precision(plugin)
    if root_of(plugin, "plugins.environments", "ClusterEnvironment") is not None:
        return fabric_cluster_environment(plugin)
    if isinstance(plugin, CheckpointIO) or root_of(plugin, "plugins.io", "CheckpointIO") is not None:
        return fabric_checkpoint_io(plugin)
    raise _refused(plugin)


def fabric_cluster_environment(environment: Any) -> Any:
    """Return the same environment, or a wrapper of it for the Fabric in use."""
    ours = fabric_module("plugins.environments").ClusterEnvironment
    return environment if isinstance(environment, ours) else _ForeignEnvironment(environment)


def fabric_checkpoint_io(io: Any) -> Any:
    """Return the same checkpoint IO, or a wrapper of it for the Fabric in use.

    Raises:
        OptionError: The checkpoint IO wraps another, and has none.
    """
    if getattr(io, "checkpoint_io", io) is None:
        raise OptionError(
            f"plugins={type(io).__name__}() wraps the checkpoint IO of Trainer, and has none here.",
            remedy="Pass `nnx.CheckpointIO(async_save=True)`, which saves in the background.",
        )
    if isinstance(io, (CheckpointIO, fabric_module("plugins.io").CheckpointIO)):
        return io
    return _ForeignIO(io)


def _refused(plugin: Any) -> OptionError:
    kind = plugin if isinstance(plugin, str) else type(plugin).__name__
    if isinstance(plugin, str) or root_of(plugin, "strategies", "Strategy") is not None:
        return OptionError(
            f"plugins={kind!r} is a strategy, which the first LightningLite accepted as a plugin.",
            remedy="Pass it as `strategy=`.",
        )
    if root_of(plugin, "plugins.layer_sync", "LayerSync") is not None:
        return OptionError(
            f"plugins={kind!r} changes the layers of a LightningModule, and Lite has plain modules.",
            remedy="Call `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `self.setup`.",
        )
    return OptionError(
        f"plugins={kind!r} is not a kind that Lite knows.",
        remedy=f"Pass a ClusterEnvironment, a CheckpointIO or a Precision of {FABRIC_ROOT}.plugins.",
    )


class _ForeignEnvironment(fabric_module("plugins.environments").ClusterEnvironment):  # type: ignore[misc]
    """A wrapper that forwards every call to a cluster environment of another copy of Lightning."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    @property
    def creates_processes_externally(self) -> bool:
        return bool(self.inner.creates_processes_externally)

    @property
    def main_address(self) -> str:
        return str(self.inner.main_address)

    @property
    def main_port(self) -> int:
        return int(self.inner.main_port)

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return int(self.inner.world_size())

    def set_world_size(self, size: int) -> None:
        self.inner.set_world_size(size)

    def global_rank(self) -> int:
        return int(self.inner.global_rank())

    def set_global_rank(self, rank: int) -> None:
        self.inner.set_global_rank(rank)

    def local_rank(self) -> int:
        return int(self.inner.local_rank())

    def node_rank(self) -> int:
        return int(self.inner.node_rank())

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.inner.validate_settings(num_devices, num_nodes)

    def teardown(self) -> None:
        self.inner.teardown()


class _ForeignIO(fabric_module("plugins.io").CheckpointIO):  # type: ignore[misc]
    """A wrapper that forwards every call to a checkpoint IO of another copy of Lightning."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        return self.inner.load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        self.inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self.inner.teardown()
