"""A backward that runs out of device memory and is retried gives the gradients of one backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jobs.simulated_device import SimDevice
from nnx_colossalai.backend import ColossalAIBackend
from nnx_colossalai.ledger import DeviceMemoryError
from nnx_colossalai.options import ColossalAIOptions
from nnx_core.backend import ParallelContext
from nnx_core.errors import UnsupportedError

WIDTH = 16


class Full(torch.autograd.Function):
    """Runs out of device memory in backward, once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Layers) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        asks, ctx.module.asks = ctx.module.asks, 0
        if asks:
            raise DeviceMemoryError("The device is full.", asked=asks, used=2**20, allowed=2**20)
        return gradients[0], None


class Layers(nn.Module):
    """Returns the results of its first half and of its second half."""

    def __init__(self, full_in: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.full_in, self.asks = full_in, 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layers[0](x)
        hidden = self.layers[1](Full.apply(hidden, self) if self.full_in == "first" else hidden).tanh()
        out = self.layers[2](hidden)
        return hidden, self.layers[3](Full.apply(out, self) if self.full_in == "second" else out)


def gradients(full_in: str, loss_of: Any, *, plain: bool) -> list[Tensor]:
    module, x = Layers(full_in), torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    if plain:
        loss_of(*module(x)).backward()
        return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    backend = ColossalAIBackend(ColossalAIOptions(min_num_params=10, device=SimDevice(2**20)))
    backend.setup(ParallelContext(device=torch.device("cpu"), precision="32-true", rank=0, world_size=1))
    try:
        backend.parallelize(module, no_sample)
        backend.setup_optimizers(module, [torch.optim.SGD(module.parameters(), 0.1)])
        (model,) = backend._models.values()
        module.asks = model.placing.planned.memory.device // 2
        loss = loss_of(*backend.run_step(module, module, x))
        backend.backward(module, loss)
        assert module.asks == 0, "it did not run out of memory"
        model.finish()
        return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    finally:
        backend.teardown()


def no_sample() -> Any:
    raise UnsupportedError("no sample here.")


def of_both(hidden: Tensor, out: Tensor) -> Tensor:
    return out.square().mean() + hidden.square().mean()


def of_the_last(hidden: Tensor, out: Tensor) -> Tensor:
    return out.square().mean()


@pytest.mark.parametrize("loss_of", [of_both, of_the_last])
def test_an_output_that_another_output_is_made_of_counts_once(loss_of: Any) -> None:
    expected = gradients("first", loss_of, plain=True)
    found = gradients("first", loss_of, plain=False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_only_the_outputs_of_the_loss_must_have_gradients() -> None:
    expected = gradients("second", of_the_last, plain=True)
    found = gradients("second", of_the_last, plain=False)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_backward_that_failed_before_all_outputs_had_gradients_is_not_repeated() -> None:
    with pytest.raises(DeviceMemoryError, match="before the gradients of all outputs were known"):
        gradients("second", of_both, plain=False)
