"""The sample inputs of tracing engines: declared inputs, or the call from the running stage's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from nnx_core.backend import Call, first_call
from nnx_core.errors import UnsupportedError
from nnx_core.lightning.sample import TrainerSample


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.net(x) * scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self(x, scale=2.0), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class CallsForward(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.forward(batch[0]), batch[1])


class CallsPart(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])


class FailsBefore(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.optimizers[0]  # which do not exist yet while setting up
        return super().training_step(batch, batch_idx)


class WritesBefore(Model):
    """Clamps, scales and swaps weights and counts before it calls the model, in every way that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        first, last = self.net[0], self.net[2]
        with torch.no_grad():
            first.weight.mul_(0.5)
            first.bias.data.add_(1.0)
            last.weight.data = last.weight.data * 2
            nn.init.zeros_(last.bias)
            torch._foreach_mul_(list(self.net.parameters()), 3.0)
            torch.add(first.bias, 1.0, out=first.bias)
            first.weight[0] = 7.0
        return super().training_step(batch, batch_idx)


class Declares(Model):
    @property
    def dummy_forward_args(self) -> dict[str, Any]:
        return {"x": torch.zeros(2, 4)}


class Converts(Model):
    def dummy_forward_args_fn(self, batch: Any) -> dict[str, Any]:
        return {"x": batch[0], "scale": 3.0}


class Counts(Model):
    """Counts in its step, and where its data comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.loaders, self.data = 0, 0, CountedData()

    def train_dataloader(self) -> Any:
        self.loaders += 1
        return DataLoader(self.data, batch_size=3, shuffle=True, generator=self.data.generator)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


class CountedData(Dataset[Any]):
    def __init__(self) -> None:
        self.generator, self.read = torch.Generator(), []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return torch.ones(4) * index, torch.zeros(1)


class GoesOn(Model):
    """Draws from a generator of Python before it calls the model."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = (1.0 / step for step in range(1, 9))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        next(self.rates)
        return super().training_step(batch, batch_idx)


class Look(Callback):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        before = torch.get_rng_state()
        weights = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
        self.call = first_call(pl_module, TrainerSample(trainer, pl_module))
        assert torch.equal(before, torch.get_rng_state())
        assert all(torch.equal(weights[name], now) for name, now in pl_module.state_dict().items())


def call_of(model: Model) -> Call:
    look = Look()
    data = DataLoader(TensorDataset(torch.arange(24.0).view(6, 4), torch.zeros(6, 1)), batch_size=3)
    data = None if isinstance(model, Counts) else data
    trainer = Trainer(
        accelerator="cpu", max_steps=1, callbacks=look, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    return look.call


@pytest.mark.parametrize("kind", [Model, CallsForward, WritesBefore])
def test_the_inputs_are_those_that_the_step_passes(kind: type[Model]) -> None:
    model = kind()
    call = call_of(model)
    assert call.module is model
    assert torch.equal(call.args[0], torch.arange(12.0).view(3, 4))
    assert call.kwargs == ({} if kind is CallsForward else {"scale": 2.0})


def test_a_step_that_calls_a_part_instead_names_it() -> None:
    model = CallsPart()
    call = call_of(model)
    assert call.module is model.net
    assert call.args[0].shape == (3, 4)


def test_a_step_that_fails_before_leaves_the_batch_itself() -> None:
    model = FailsBefore()
    call = call_of(model)
    assert call.module is model
    assert [tuple(leaf.shape) for leaf in call.args[0]] == [(3, 4), (3, 1)]


def test_declared_inputs_come_first() -> None:
    call = call_of(Declares())
    assert list(call.kwargs) == ["x"] and call.kwargs["x"].shape == (2, 4)
    assert call_of(Converts()).kwargs["scale"] == 3.0


def test_the_module_is_left_as_it_was() -> None:
    model = Model()
    call_of(model)
    assert "forward" not in model.__dict__
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_what_the_step_and_the_data_count_is_counted_once() -> None:
    model, alone = Counts(), Counts()
    call = call_of(model)
    x, _ = next(iter(alone.train_dataloader()))
    assert (model.steps, model.loaders, len(model.data.read)) == (1, 1, 3)
    assert torch.equal(call.args[0], x) and model.data.read == alone.data.read
    assert torch.equal(model.data.generator.get_state(), alone.data.generator.get_state())


def test_a_generator_that_went_on_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="advanced 'rates', a generator that cannot be rewound"):
        call_of(GoesOn())


def test_a_plain_sample_yields_inputs_of_the_root() -> None:
    module = nn.Linear(2, 2)
    call = first_call(module, lambda: ((torch.zeros(1, 2),), {}))
    assert call.module is module and len(call.args) == 1
