"""What a strategy that shards really holds: bytes behind its tensors, compared with one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nnx_checkpoint.shard import Shard
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.subject import Subject
from nnx_conformance.task import Task
from nnx_conformance.training import fit

_SLACK = 1.25
"""How much more than its fair share a rank may hold, for padding, uneven dimensions and step counters."""


@check("shards_parameters")
def shards_parameters(bench: Bench) -> None:
    """Between steps a rank holds about its share of the parameters."""
    _expect_shares(bench, "parameters")


@check("shards_gradients")
def shards_gradients(bench: Bench) -> None:
    """When the optimizer steps, a rank holds about its share of the gradients."""
    _expect_shares(bench, "gradients")


@check("shards_optimizer")
def shards_optimizer(bench: Bench) -> None:
    """A rank holds about its share of the optimizer's state."""
    _expect_shares(bench, "optimizer state")


def _expect_shares(bench: Bench, what: str) -> None:
    task = Task(optimizer="adamw", steps=2, clip=1.0)
    alone = bench.alone(_measure, task)[what]
    for world_size in bench.world_sizes:
        held = [found[what] for found in bench.run(_measure, task, world_size=world_size)]
        for rank, size in enumerate(held):
            expect(
                size <= _SLACK * alone / world_size,
                f"rank {rank} of {world_size} holds {size} bytes of {what}; the share of one of "
                f"{world_size} ranks in the {alone} bytes of one process is {alone // world_size}.",
            )
        expect(
            sum(held) * _SLACK >= alone,
            f"{world_size} ranks hold {held} bytes of {what}, together less than the {alone} bytes of "
            "one process: what was measured is not all.",
        )


def _measure(subject: Subject, task: Task) -> dict[str, int]:
    measure = _Measure()
    fit(subject, task, callbacks=[measure])
    return measure.held


class _Measure(Callback):
    """Counts the bytes behind the tensors that a rank holds.

    It overrides no hook that may look at gradients: an engine would put whole ones there.
    """

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count gradients when they are clipped, because they are complete then."""
        backend = getattr(trainer.strategy, "backend", None)
        if backend is None:
            trainer.optimizers[0].register_step_post_hook(lambda optimizer, *_: self._count(pl_module, ()))
            return
        clip = backend.clip_grad_norm

        def clip_grad_norm(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Tensor:
            self._count(pl_module, (gradient.local for gradient in backend.gradients(optimizer)))
            norm: Tensor = clip(optimizer, *args, **kwargs)
            return norm

        backend.clip_grad_norm = clip_grad_norm

    def _count(self, module: LightningModule, gradients: Iterable[Tensor]) -> None:
        """Gradients of the module, and the engine's own."""
        found = [p.grad for p in module.parameters() if p.grad is not None]
        self.held["gradients"] = _bytes_behind([*found, *gradients])

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Between two steps."""
        # Parameters first: an engine may let go of what it gathered when it is asked for handles.
        self.held["parameters"] = _bytes_behind(pl_module.parameters())
        self.held["optimizer state"] = _bytes_behind(_state_tensors(trainer, pl_module))


def _state_tensors(trainer: Trainer, module: LightningModule) -> Iterable[Tensor]:
    backend = getattr(trainer.strategy, "backend", None)
    for optimizer in trainer.optimizers:
        state = backend.optimizer_state(module, optimizer)["state"] if backend else optimizer.state
        for values in state.values():
            for value in values.values():
                if isinstance(value, Shard):
                    yield from value.data
                elif isinstance(value, Tensor):
                    yield value


def _bytes_behind(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages: views on one buffer count it once, a freed one counts nothing."""
    sizes = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
