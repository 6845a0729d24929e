"""Several models under one strategy with Fabric: a GAN against plain PyTorch, and refused combinations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import nnx
from jobs.simulated_device import SimDevice
from nnx_colossalai.backend import ColossalAIBackend
from nnx_colossalai.options import ColossalAIOptions
from nnx_conformance.pool import WorkerPool
from nnx_core.backend import ParallelContext
from nnx_core.errors import PlanError, UnsupportedError

UNITS = {"min_num_params": 10}
MIXED = {**UNITS, "offload_fraction": 0.6, "stream_fraction": 0.3}


def layers(seed: int, *, out: int = 16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, out))


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    return layers(1), layers(2, out=1)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)


def batch(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return this rank's share of the real data and of the noise."""
    made = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(step))
    real, noise = made[:, rank::world_size]
    return real, noise


def play(generator: Any, critic: Any, optimizers: Any, shares: tuple[int, int], backward: Any) -> list[float]:
    """Rounds of a GAN: the critic learns, then the generator by way of the critic."""
    losses, (first, second) = [], optimizers
    for step in range(4):
        real, noise = batch(step, *shares)
        lost = (critic(real) - 1).square().mean() + critic(generator(noise).detach()).square().mean()
        second.zero_grad()
        backward(lost)
        second.step()
        fooled = (critic(generator(noise)) - 1).square().mean()
        first.zero_grad()
        backward(fooled)
        first.step()
        losses += [lost.item(), fooled.item()]
    return losses


def weights_of(*modules: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for module in modules for value in module.state_dict().values()]


def gan_in_fabric(options: dict[str, Any], devices: int, *, together: bool) -> tuple[list[float], list[Any]]:
    strategy: Any = nnx.strategy("colossalai", namespace="lightning.fabric", **options)
    fabric: Any = Fabric(strategy=strategy, accelerator="cpu", devices=devices)
    fabric.launch()
    modules = pair()
    models: Any
    optimizers: Any
    if together:
        made = [fabric.setup(module, optimizer_of(module)) for module in modules]
        models, optimizers = zip(*made, strict=True)
    else:
        models = tuple(fabric.setup_module(module) for module in modules)
        optimizers = fabric.setup_optimizers(*(optimizer_of(model) for model in models))
    losses = play(*models, optimizers, (fabric.global_rank, devices), fabric.backward)
    means = [float(fabric.all_reduce(torch.tensor(loss, dtype=torch.float64))) for loss in losses]
    backend = fabric.strategy.backend
    tiers = [{chunk.tier for chunk in model.engine.chunks} for model in backend._models.values()]
    assert min(map(len, tiers)) > 1, tiers
    for module in modules:
        backend.unparallelize(module)
    return means, [weight.tolist() for weight in weights_of(*modules)]


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("together", [True, False], ids=["with optimizers", "modules first"])
@pytest.mark.parametrize("devices", [1, 2])
def test_two_models_with_an_optimizer_each_train_as_in_plain_pytorch(
    pool: WorkerPool, devices: int, together: bool
) -> None:
    modules = pair()
    expected = play(
        *modules, [optimizer_of(module) for module in modules], (0, 1), lambda loss: loss.backward()
    )
    for losses, weights in pool.run(gan_of, devices, together, world_size=devices):
        assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
        for found, wanted in zip(weights, weights_of(*modules), strict=True):
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-5, atol=1e-6)


def gan_of(devices: int, together: bool) -> tuple[list[float], list[Any]]:
    return gan_in_fabric(MIXED, devices, together=together)


# --- plain backends in this process -------------------------------------------------------------------


def backend_of(**options: Any) -> ColossalAIBackend:
    backend = ColossalAIBackend(ColossalAIOptions(**{**UNITS, **options}))
    backend.setup(ParallelContext(device=torch.device("cpu"), precision="32-true"))
    return backend


def no_sample() -> Any:
    raise UnsupportedError("no sample here.")


def test_an_optimizer_over_two_models_is_refused_whichever_comes_first() -> None:
    backend, (one, other) = backend_of(), pair()
    both = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    words = r"SGD holds parameters of several models .*an optimizer for each model, or set up one module"
    backend.parallelize(one, no_sample)
    backend.setup_optimizers(one, [both])
    with pytest.raises(UnsupportedError, match=words):
        backend.parallelize(other, no_sample)
    backend.unparallelize(one)
    backend.parallelize(one, no_sample)
    backend.parallelize(other, no_sample)
    with pytest.raises(UnsupportedError, match=words):
        backend.setup_optimizers(one, [both])
    backend.teardown()


def test_models_that_share_parameters_are_refused() -> None:
    backend, (one, other) = backend_of(), pair()
    other[0].weight = one[0].weight
    backend.parallelize(one, no_sample)
    with pytest.raises(UnsupportedError, match=r"Sequential and Sequential, .*share parameters.*holds both"):
        backend.parallelize(other, no_sample)
    with pytest.raises(UnsupportedError, match=r"Linear and Sequential"):
        backend.parallelize(one[0], no_sample)
    backend.teardown()


def test_a_second_model_gets_what_the_plan_of_the_first_leaves(said: list[str]) -> None:
    size = 16 * sum(one.numel() for one in layers(1).parameters())  # masters, gradients and Adam's state
    device = SimDevice(3 * size // 2, delays=None)
    backend, one, other = backend_of(device=device), layers(1), layers(2)
    for module in (one, other):
        backend.parallelize(module, no_sample)
    first, second = (model.placing for model in backend._models.values())
    assert first.planned.memory.device + second.planned.memory.device <= device.capacity
    assert not any(tier.steps_on_host for tier in first.planned.placement.tiers.values())
    assert any(tier.steps_on_host for tier in second.planned.placement.tiers.values())
    assert any("of device memory are planned for models set up before" in line for line in said)
    backend.teardown()


def test_a_second_model_that_does_not_fit_beside_the_first_is_refused_with_bytes_and_knob() -> None:
    size = 16 * sum(one.numel() for one in layers(1).parameters())
    backend = backend_of(device=SimDevice(size + 64, delays=None))
    backend.parallelize(layers(1), no_sample)
    with pytest.raises(PlanError, match=r"device_memory"):
        backend.parallelize(layers(2), no_sample)
    backend.teardown()
