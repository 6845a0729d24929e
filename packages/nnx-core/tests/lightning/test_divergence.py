"""The divergence check names the first value that differs over the ranks, and the rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nnx
from nnx_conformance.pool import JobError, WorkerPool
from nnx_core.agree.divergence import DivergenceCheck, checksum
from nnx_core.backend import Backend, NoOptions
from nnx_core.lightning.callbacks import _AsItIs

FAULTY_RANK = 2


class Net(LightningModule):
    """A model with all values that the divergence check compares, and statistics that may differ."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("own", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x))
        return output

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters()}, {"params": self.head.parameters(), "lr": 0.02}]
        optimizer = torch.optim.Adam(groups, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self) -> Any:
        data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=4)


class Fault(Callback):
    """Changes something on one rank before the third step."""

    def __init__(self, what: str) -> None:
        self.what = what

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        if index != 2 or trainer.global_rank != FAULTY_RANK:
            return
        if self.what == "buffer":
            module.scale[1] += 0.5
        elif self.what == "weight":
            module.head.weight.view(-1)[3] += 0.25
        elif self.what == "rate":
            trainer.optimizers[0].param_groups[1]["lr"] = 0.5
        elif self.what == "counter":
            trainer.optimizers[0].state[module.head.bias]["step"] += 1
        module.own += trainer.global_rank


def fit(strategy: str, fault: str, check_every: int | None) -> list[int]:
    options: dict[str, Any] = {"callbacks": [Fault(fault)]}
    if strategy == "ddp":
        options["callbacks"].append(nnx.compare_ranks(every=check_every or 0))
    else:
        options["strategy"] = nnx.strategy(strategy, check_every=check_every)
    trainer = Trainer(
        **{"strategy": strategy, **options},
        accelerator="cpu",
        devices=3,
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net())
    return [trainer.global_step]


FAULTS = {
    "buffer": "the buffer 'scale': rank 2 differs from rank 0 (1 of 3 elements differ, by up to",
    "weight": "the parameter 'head.weight': rank 2 differs from rank 0",
    "rate": "'lr' of param group 1 of optimizer 0: rank 2 differs from rank 0",
    "counter": "'step' of 'head.bias' of optimizer 0: rank 2 differs from rank 0 (",
}


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_rank_changed_is_named_with_the_rank(pool: WorkerPool, fault: str) -> None:
    strategy = "fsdp_auto" if fault == "buffer" else "ddp"
    with pytest.raises(JobError) as raised:
        pool.run(fit, strategy, fault, 4, world_size=3, timeout=60)
    assert len(raised.value.failures) == 3
    for text in raised.value.failures.values():
        said = "nnx_base.errors.DisagreementError: after step 4 of this run the ranks differ in "
        assert said + FAULTS[fault] in text


@pytest.mark.full
def test_what_may_differ_is_left_alone(pool: WorkerPool) -> None:
    assert pool.run(fit, "fsdp_auto", "", 1, world_size=3, timeout=60) == [[6]] * 3
    assert pool.run(fit, "ddp", "", 1, world_size=3, timeout=60) == [[6]] * 3


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("check_every", [None, 0])
def test_beyond_the_first_steps_ranks_are_compared_only_on_request(
    pool: WorkerPool, check_every: int | None
) -> None:
    assert pool.run(fit, "fsdp_auto", "buffer", check_every, world_size=3, timeout=60) == [[6]] * 3


def step_under_fabric() -> str:
    fabric = Fabric(
        strategy=nnx.strategy("fsdp_auto", namespace="lightning.fabric"), accelerator="cpu", devices=2
    )
    fabric.launch()
    model = nn.Linear(4, 4)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer.param_groups[0]["momentum"] = 0.9 + fabric.global_rank
    fabric.backward(wrapped(torch.ones(2, 4)).sum())
    try:
        optimizer.step()
    except nnx.NnxError as error:
        return str(error)
    return ""


def test_fabric_compares_its_first_steps_too(pool: WorkerPool) -> None:
    for said in pool.run(step_under_fabric, world_size=2):
        assert (
            "after step 1 of this run the ranks differ in 'momentum' of param group 0 of optimizer 0" in said
        )
        assert "rank 1 differs from rank 0 (1.9 for 0.9)" in said


class Decided(_AsItIs):
    """Made other decisions on every rank."""

    def decisions(self, module: nn.Module) -> str:
        return f"plan {torch.distributed.get_rank()}"


def compare(backend: type[Backend[NoOptions]], used: str) -> str:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model[used if torch.distributed.get_rank() == 1 else "a"](torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        DivergenceCheck(backend(NoOptions()), every=1).after_step(model, lambda: [optimizer])
    except nnx.NnxError as error:
        return str(error)
    return ""


@pytest.mark.full
def test_decisions_and_the_set_of_used_parameters_are_compared(pool: WorkerPool) -> None:
    said = pool.run(compare, Decided, "a", world_size=2, init="gloo")
    assert all("the ranks differ in the engine's decisions" in text for text in said)
    said = pool.run(compare, _AsItIs, "b", world_size=2, init="gloo")
    assert all("differ in whether there is a gradient of 'a.weight': rank 1" in text for text in said)
    assert pool.run(compare, _AsItIs, "a", world_size=2, init="gloo") == ["", ""]


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 3)])
def test_a_checksum_ignores_the_strides_of_single_elements(shape: tuple[int, ...]) -> None:
    value = torch.arange(60.0)
    odd = value.as_strided(shape, (29, *(1 for _ in shape[1:])))  # as a row of one element under ZeRO
    assert checksum(odd) == checksum(odd.clone(memory_format=torch.contiguous_format))


def test_a_checksum_tells_the_same_change_in_other_places() -> None:
    first, second = torch.zeros(40, 6), torch.zeros(40, 6)
    first[[13, 17, 18, 23, 28, 29]] = 0.5
    second[[7, 20, 21, 24, 27, 29]] = 0.5  # the numbers of the rows have the same sum
    assert checksum(first) != checksum(second)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5000.0).reshape(50, 100).t(),
        torch.randn(9).bfloat16()[1:],
        torch.randn(7, dtype=torch.complex64),
        torch.tensor([True, False, True]),
        torch.eye(4).to_sparse(),
        torch.zeros(()),
    ],
    ids=["transposed", "unaligned", "complex", "bool", "sparse", "scalar"],
)
def test_a_checksum_depends_on_every_element_and_on_its_place(tensor: Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.clone())
    other = tensor.clone()
    dense = other.values() if tensor.is_sparse else other.view(-1) if other.is_contiguous() else other[0]
    dense[-1] = ~dense[-1] if tensor.dtype == torch.bool else dense[-1] + 1
    assert checksum(tensor) != checksum(other)
    if tensor.numel() > 3 and not tensor.is_sparse:
        assert checksum(tensor) != checksum(tensor.flip(0))
