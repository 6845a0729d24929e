"""The process code of both adapters: ranks, launch, groups, collectives."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.tensor import DTensor

from nnx_core.agree.collective_order import before_reduction, end_run
from nnx_core.agree.data_sharding import SharedBatches, Shares, make_shares
from nnx_core.agree.direct_calls import stop_warning, warn_of_direct_calls
from nnx_core.agree.divergence import DivergenceCheck
from nnx_core.backend import Backend, ParallelContext
from nnx_core.errors import UnsupportedError
from nnx_core.lightning.beginning import batch_facts, first_lines
from nnx_core.lightning.checkpoint import CheckpointIO
from nnx_core.lightning.compat import make_launcher, reset_seed, seed_data_workers
from nnx_core.options import CommonOptions

__all__ = [
    "ParallelProcesses",
    "leave_process_group_at_exit",
]


# The messages of nnx appear like Lightning's own.


def show_messages() -> None:
    """Print the ``nnx`` loggers' INFO messages to stderr, unless the application configured logging."""
    logger = logging.getLogger("nnx")
    if logger.handlers or logging.getLogger().handlers:
        return
    logger.addHandler(logging.StreamHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    logger.propagate = False


log = logging.getLogger("nnx.lightning")
T = TypeVar("T")

_REDUCTIONS = {
    "mean": dist.ReduceOp.SUM,  # gloo has no AVG: divided afterwards
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class ParallelProcesses(ABC):
    """Mixin for a strategy of Trainer or Fabric that runs a `Backend`.

    Lightning looks up several of these members by name. Without ``is_distributed`` a Trainer silently injects
    no sampler and ignores ``sync_dist``.

    Args:
        backend: The engine.
        name: The registered name, for messages and metadata.
        common: Options that every nnx strategy takes.
        **lightning: Arguments of Lightning's own ``ParallelStrategy``.
    """

    is_distributed: ClassVar[bool] = True
    root: ClassVar[str]
    """The root of the Lightning tree that this class is built on."""

    cluster_environment: Any
    parallel_devices: list[torch.device] | None
    accelerator: Any
    _launcher: Any
    local_rank: int
    node_rank: int

    def __init__(
        self, backend: Backend[Any], *, name: str, common: CommonOptions | None = None, **lightning: Any
    ) -> None:
        self.backend = backend
        self.name = name
        self.common = common or CommonOptions()
        backend.gather_at_end = self.common.gather_at_end
        show_messages()
        self._num_nodes = 1
        self._backend_is_set_up = False
        self._shares: Shares | None = None
        self._batches = SharedBatches(None, every=0)
        self._in_step = False
        self.divergence_check = DivergenceCheck(backend, every=self.common.check_every)
        super().__init__(**lightning)  # the tree's ParallelStrategy

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        if not self.parallel_devices:
            return torch.device("cpu")
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """The number of nodes, which Trainer sets."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """The number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The share of the data that this process reads: the backend's data-parallel rank and size.

        Raises:
            UnsupportedError: It depends on the backend's groups, which do not exist yet.
        """
        if self._backend_is_set_up:
            share: tuple[int, int] | None = self.backend.data_parallel_rank_and_size
        else:
            share = self.backend.share_before_setup(
                rank=self.global_rank,
                world_size=self.num_nodes * self.num_processes,
                local_world_size=self.num_processes,
            )
        if share is None:
            raise UnsupportedError(
                f"the share of the data that a rank reads under {self.name!r} is not known before its groups "
                "exist.",
                remedy="Build the loader in `train_dataloader` or after `fabric.launch()`, not before.",
            )
        kwargs = {"num_replicas": share[1], "rank": share[0]}
        if self.backend.data_order:
            kwargs["seed"] = int(os.environ.get("PL_GLOBAL_SEED", "0")) + self.backend.data_order
        return kwargs

    @property
    def data_rank(self) -> int:
        """The index of this rank's share of the data, from 0; several ranks may read the same share."""
        rank: int = self.distributed_sampler_kwargs["rank"]
        return rank

    @property
    def data_world_size(self) -> int:
        """The number of shares of the data, at most `world_size`."""
        size: int = self.distributed_sampler_kwargs["num_replicas"]
        return size

    @property
    def global_rank(self) -> int:
        """The rank of this process.

        Raises:
            UnsupportedError: A step reads it while several ranks compute one batch together.
        """
        self._refuse_in_step("global_rank", "data_rank")
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of processes.

        Raises:
            UnsupportedError: A step reads it while several ranks compute one batch together.
        """
        self._refuse_in_step("world_size", "data_world_size")
        size: int = super().world_size  # type: ignore[misc] # of the tree's
        return size

    @property
    def is_global_zero(self) -> bool:
        """True on rank zero."""
        return self._rank == 0

    @property
    def _rank(self) -> int:
        rank: int = super().global_rank  # type: ignore[misc] # of the tree's
        return rank

    def _refuse_in_step(self, asked: str, share: str) -> None:
        """Refuse a rank or world size in a step: it would count each share of the data several times."""
        if self._in_step and self._shares is not None:
            raise UnsupportedError(
                f"a step asks for `{asked}`, and under {self.name!r} {dist.get_world_size()} ranks read "
                f"{self._shares.size} {'share' if self._shares.size == 1 else 'shares'} of the data.",
                remedy=f"To compute with samples use `self.trainer.strategy.{share}`; for work of a single "
                "rank use `self.trainer.is_global_zero`.",
            )

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed data workers by share of the data, so that ranks that read the same samples draw alike."""
        seed_data_workers(self.root, dataloader, self.distributed_sampler_kwargs["rank"])
        return dataloader

    def set_world_ranks(self) -> None:
        """Set this process's global rank in the cluster environment."""
        if self.cluster_environment is None:
            return
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self._rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        if self.cluster_environment.creates_processes_externally:
            return
        self._launcher = make_launcher(
            self.root,
            self,
            start_method=self.common.start_method,
            num_processes=self.num_processes,
            num_nodes=self.num_nodes,
        )

    def setup_environment(self) -> None:
        """Join the process group and set the backend up. Collective."""
        self.set_world_ranks()
        if dist.is_initialized():
            self._fit_into_process_group()
        self.accelerator.setup_device(self.root_device)
        reset_seed(self.root)
        self._join_process_group()
        if not self._backend_is_set_up:
            end_run()
            stop_warning()
            self._agree_on_threads()
            self.backend.setup(self._parallel_context())
            self._backend_is_set_up = True
            self._shares = make_shares(*self.backend.data_parallel_rank_and_size)
            self._batches = SharedBatches(self._shares, every=self.common.check_every)
            if self._shares is not None:
                ranks = dist.get_world_size() // self._shares.size
                warn_of_direct_calls(self.name, ranks=ranks)

    def _log_beginning(self, module: nn.Module, batch: int | None = None, *, accumulate: int = 1) -> None:
        """Log the first lines of the run on rank zero, once a module is laid out."""
        context = self.backend.context
        if context.rank == 0:
            _, shares = self.backend.data_parallel_rank_and_size
            own, layout = self.backend.own_batch, self.backend.summary(module)
            taken = batch_facts(
                batch, ranks=context.world_size, shares=shares, accumulate=accumulate, own_batch=own
            )
            over = self.process_group_backend
            for line in first_lines(self.name, context, over=over, layout=layout, batch=taken):
                log.info(line)

    def _join_process_group(self) -> None:
        if dist.is_initialized():
            return
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        device = self.root_device
        dist.init_process_group(
            self.process_group_backend,
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self.common.timeout),
            device_id=None if device.type == "cpu" else device,
        )
        leave_process_group_at_exit()

    def _agree_on_threads(self) -> None:
        """Set the number of CPU threads to the minimum over the ranks. Collective.

        The last bits of sums depend on the number of threads, and replicated parameters must stay bitwise
        equal. Lightning's launcher gives the processes that it starts more threads than rank zero.
        """
        if self.root_device.type == "cpu" and dist.is_initialized():
            fewest = torch.tensor(torch.get_num_threads())
            all_reduce(fewest, op=dist.ReduceOp.MIN)
            if int(fewest) != torch.get_num_threads():
                torch.set_num_threads(int(fewest))

    def _fit_into_process_group(self) -> None:
        """Refuse an existing process group, such as Ray Train's, with other ranks than Lightning's."""
        seen = f"rank {self.global_rank} of {self.world_size}"
        real = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        if seen != real or self.local_rank >= self.num_processes:
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or dist.get_world_size()
            raise UnsupportedError(
                f"this process is {real} in its process group, and {seen} for Lightning, with "
                f"devices={self.num_processes} and num_nodes={self.num_nodes}.",
                remedy=f"Pass devices={local}, num_nodes={dist.get_world_size() // local}; every node must "
                "have the same number of processes.",
            )

    @property
    def process_group_backend(self) -> str:
        """The name of the torch.distributed backend."""
        default = dist.Backend.default_device_backend_map.get(self.root_device.type, "gloo")
        return self.common.process_group_backend or default

    def _parallel_context(self) -> ParallelContext:
        return ParallelContext(
            device=self.root_device,
            rank=self.global_rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            local_world_size=self.num_processes,
            num_nodes=self.num_nodes,
            precision=self._precision_name(),
        )

    @abstractmethod
    def _precision_name(self) -> str:
        """Return Lightning's precision string; Trainer and Fabric name their plugin differently."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        if not dist.is_initialized():
            return
        device = self.root_device
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src` on every rank."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    def _announce(self, what: str) -> None:
        """Announce a collective of user code, which every rank must reach."""
        before_reduction(what)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if all ranks, or any of them, decide so."""
        return bool(self._reduce(torch.tensor(int(decision)), None, "min" if all else "max"))

    def _reduce(self, value: Any, group: Any, reduce_op: Any) -> Any:
        """All-reduce a tensor; the result reaches every rank. Other values pass through.

        Over all ranks, sums and products count each share of the data once, even if several ranks read it.
        """
        if not isinstance(value, Tensor) or not dist.is_initialized():
            return value
        if isinstance(value, DTensor):
            value = value.full_tensor()
        name = reduce_op.lower() if isinstance(reduce_op, str) else None
        op = _REDUCTIONS[name] if name is not None else (reduce_op or dist.ReduceOp.SUM)
        is_mean = name in ("mean", "avg") or op == dist.ReduceOp.AVG
        if op == dist.ReduceOp.AVG:
            op = dist.ReduceOp.SUM
        device = self.root_device if value.device.type == "cpu" else value.device
        result = value.to(device, copy=True)
        if is_mean and not (result.is_floating_point() or result.is_complex()):
            result = result.float()
        neutral = {"sum": 0, "product": 1}.get(_name_of(op)) if group is None and not is_mean else None
        if neutral is not None and self._shares is not None and not self._shares.is_first:
            result.fill_(neutral)
        all_reduce(result, op=op, group=group)
        return result / dist.get_world_size(group) if is_mean else result

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack the tensors of all ranks; ranks that read the same share of the data contribute once."""
        if group in (None, dist.group.WORLD):
            self._announce("a gather over the ranks, as of self.all_gather")
        if self._shares is not None and group in (None, dist.group.WORLD):
            group = self._shares.across
            if group is None:
                return tensor.unsqueeze(0)
        gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc] # of the tree's
        return gathered

    def _evaluation_context(self) -> AbstractContextManager[Any]:
        """Turn inference mode off for engines that would store its tensors in parameters."""
        if self.backend.evaluation_without_inference_mode and torch.is_inference_mode_enabled():
            return _NormalNoGrad()
        return nullcontext()

    def _own_checkpoint_io(self) -> CheckpointIO:
        return CheckpointIO(
            state_dict_type=self.common.state_dict_type,
            opaque_objects=self.common.opaque_objects,
            async_save=self.common.async_save,
        )


class _NormalNoGrad:
    """Context manager that replaces inference mode by ``no_grad``."""

    def __enter__(self) -> None:
        self._inference = torch.inference_mode(False)
        self._no_grad = torch.no_grad()
        self._inference.__enter__()
        self._no_grad.__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        self._no_grad.__exit__(*exc_info)
        self._inference.__exit__(*exc_info)


def _name_of(op: Any) -> str:
    return next((name for name in ("sum", "product") if op == _REDUCTIONS[name]), "")


@cache
def leave_process_group_at_exit() -> None:
    """Destroy the process group at exit, before the interpreter shuts down.

    A thread of the group that needs the interpreter later is killed, and the process aborts. Torch keeps some
    destroyed groups, such as those of meshes, so their threads get a moment to free the tensors of their last
    collective.
    """
    atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    if dist.is_initialized():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would let the others wait
        dist.destroy_process_group()
        time.sleep(0.05)
