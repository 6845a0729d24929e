"""The same under Fabric: names, collectives and samplers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.subject import Subject
from nnx_conformance.task import Block, Task, dataset, share_of
from nnx_conformance.training import world_size

_SAMPLES = 12


@check("fabric")
def fabric_names(bench: Bench) -> None:
    """After `fabric.setup` and after steps the user's module and its state dict have their own names."""
    for rank, seen in enumerate(bench.run_once(_set_up)):
        for moment, names in seen.names.items():
            expect(
                names == seen.before,
                f"rank {rank}, {moment}: the names are {names}, they were {seen.before}.",
            )


@check("fabric")
def fabric_module(bench: Bench) -> None:
    """`fabric.setup` hands the user's own module out again, with attributes and methods of its own."""
    for rank, seen in enumerate(bench.run_once(_set_up)):
        for what, is_so in seen.facts.items():
            expect(is_so, f"rank {rank}: {what} does not hold after `fabric.setup`.")


@check("fabric", of_adapter=True)
def fabric_collectives(bench: Bench) -> None:
    """`fabric.all_gather`, `all_reduce`, `broadcast` and `barrier` reach every rank."""
    expected = {
        "all_reduce to the mean": 0.5,
        "all_reduce to the sum": 1.0,
        "broadcast from rank 1": "from 1",
    }
    for rank, (shares, seen) in enumerate(bench.run(_talk, world_size=2)):
        gathered = [float(share) for share in range(shares)]  # what each share of the data has, once
        for what, wanted in {"all_gather": gathered, **expected}.items():
            expect(seen[what] == wanted, f"rank {rank}: {what} gives {seen[what]}, expected {wanted}.")


@check("fabric", of_adapter=True)
def fabric_samplers(bench: Bench) -> None:
    """A loader of `fabric.setup_dataloaders` deals the data out over the ranks, each sample once."""
    ranks = bench.run(_load)
    shares = {tuple(samples) for samples in ranks}
    seen = sorted(sample for share in shares for sample in share)
    expect(
        seen == list(range(_SAMPLES)),
        f"the ranks read {ranks}, which is not each of {_SAMPLES} samples once.",
    )


# ---- what follows runs in the workers ----------------------------------------------------------------


class _Net(nn.Module):
    """A plain module with a buffer and an attribute."""

    answer = 42

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(6, 10)
        self.block = Block()
        self.register_buffer("scale", torch.ones(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, 6]`` to ``[batch, 10]``."""
        return self.block(self.embed(x)) * self.scale  # type: ignore[no-any-return]

    def dummy_forward_args_fn(self, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """For engines that trace the forward."""
        return {"x": batch[0]}

    @property
    def example_input_array(self) -> torch.Tensor:
        """The same, for those that have no batch yet."""
        return torch.zeros(2, 6)


@dataclass(frozen=True)
class _SetUp:
    before: list[str]
    names: dict[str, list[str]]
    facts: dict[str, bool]


def _launch(subject: Subject) -> Fabric:
    fabric = Fabric(
        strategy=subject.flag("lightning.fabric"), accelerator=subject.accelerator, devices=world_size()
    )
    fabric.launch()
    return fabric


def _names(module: nn.Module) -> list[str]:
    return [*(f"parameter {name}" for name, _ in module.named_parameters()), *module.state_dict()]


def _set_up(subject: Subject) -> _SetUp:
    fabric = _launch(subject)
    module = _Net()
    before = _names(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = fabric.setup(module, optimizer)
    names = {"after setup": _names(module)}
    for _ in range(2):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(2, 6)).square().mean())
        optimizer.step()
    names["after steps"] = _names(module)
    facts = {
        "`model.module is module`": model.module is module,
        "`model.answer`": model.answer == 42,
        "`isinstance(module, Net)`": isinstance(module, _Net),
        "that `model.state_dict()` has the names of `module.state_dict()`": list(model.state_dict())
        == list(module.state_dict()),
    }
    return _SetUp(before, names, facts)


def _talk(subject: Subject) -> tuple[int, dict[str, Any]]:
    fabric = _launch(subject)
    own = torch.tensor(float(dist.get_rank()), device=fabric.device)
    share = share_of(fabric)
    gathered: Any = fabric.all_gather(torch.tensor(float(share["rank"]), device=fabric.device))
    mean: Any = fabric.all_reduce(own.clone(), reduce_op="mean")
    total: Any = fabric.all_reduce(own.clone(), reduce_op="sum")
    fabric.barrier()
    return share["num_replicas"], {
        "all_gather": gathered.tolist(),
        "all_reduce to the mean": mean.item(),
        "all_reduce to the sum": total.item(),
        "broadcast from rank 1": fabric.broadcast(f"from {fabric.global_rank}", src=1),
    }


def _load(subject: Subject) -> list[int]:
    fabric = _launch(subject)
    fabric.setup(_Net())
    numbered = TensorDataset(torch.arange(_SAMPLES), dataset(Task()).tensors[0][:_SAMPLES])
    loader: Any = fabric.setup_dataloaders(DataLoader(numbered, batch_size=2))
    return [number for numbers, _ in loader for number in numbers.tolist()]
