"""The same arithmetic as a Lightning strategy, with handwritten code for everything that nnx-core adds.

In return nothing is between the class and Trainer. Fabric would need a second class.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from nnx_tiny.averaging import average_gradients, take_from_rank_zero

__all__ = ["TinyStrategy"]

T = TypeVar("T")


class TinyStrategy(ParallelStrategy):
    """Data parallelism: the model is replicated; after each backward the gradients are averaged."""

    is_distributed = True  # without it Trainer injects no sampler and ignores `sync_dist`

    def __init__(self, *, bucket_megabytes: float = 25.0, **lightning: Any) -> None:
        super().__init__(**lightning)
        self.num_nodes = 1  # Trainer sets it
        self._bucket_megabytes = bucket_megabytes
        self._averaging = True

    @property
    def root_device(self) -> torch.device:
        """Return the device of this process."""
        return self.parallel_devices[self.local_rank] if self.parallel_devices else torch.device("cpu")

    @property
    def num_processes(self) -> int:
        """Return the number of processes on this node."""
        return len(self.parallel_devices or ())

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the share of the data for this process; Lightning's default ignores the nodes."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Set the global rank that Lightning's logs and `rank_zero_only` read."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        if (environment := self.cluster_environment) is not None:
            self._launcher = _SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Join the process group."""
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        environment, device = self.cluster_environment, self.root_device
        if environment is not None and not dist.is_initialized():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=f"tcp://{environment.main_address}:{environment.main_port}",
                rank=self.global_rank,
                world_size=self.world_size,
            )

    def setup(self, trainer: Trainer) -> None:
        """Replace the layers that `sync_batchnorm` synchronizes."""
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.apply(self.model)
        super().setup(trainer)

    def teardown(self) -> None:
        """Restore the user's layers."""
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.revert(self.model)
        super().teardown()

    def model_to_device(self) -> None:
        """Move the module, and start all ranks from rank 0's values."""
        if self.model is not None:
            self.model.to(self.root_device)
            take_from_rank_zero((*self.model.parameters(), *self.model.buffers()))

    def _share_buffers(self) -> None:
        if self.model is not None:
            take_from_rank_zero(self.model.buffers())

    on_validation_start = on_test_start = on_predict_start = _share_buffers

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the gradients."""
        if self._averaging and self.world_size > 1 and self.model is not None:
            average_gradients(self.model, bucket_megabytes=self._bucket_megabytes)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the next backward averages the sum."""
        self._averaging = False
        try:
            yield
        finally:
            self._averaging = True

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src` on every rank."""
        box = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; return other values unchanged."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        name = str(reduce_op or "sum").rpartition(".")[2].lower()
        is_mean = name in ("mean", "avg")
        result = tensor.to(self.root_device, copy=True)
        if is_mean and not result.is_floating_point():
            result = result.float()
        dist.all_reduce(result, op=getattr(dist.ReduceOp, "SUM" if is_mean else name.upper()), group=group)
        return result / dist.get_world_size(group) if is_mean else result
