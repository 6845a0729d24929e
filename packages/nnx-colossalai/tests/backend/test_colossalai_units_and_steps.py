"""Edge cases of the backend: steps after a stray forward, odd parameters, opaque models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnx_colossalai.backend import ColossalAIBackend
from nnx_colossalai.model import refuse_cuda_graphs
from nnx_colossalai.options import ColossalAIOptions
from nnx_colossalai.plan.spec import Tier
from nnx_core.backend import ParallelContext
from nnx_core.errors import UnsupportedError

CPU = torch.device("cpu")


def no_sample() -> Any:
    raise UnsupportedError("no sample here.")


def laid_out(module: nn.Module, *, precision: str = "32-true", **options: Any) -> ColossalAIBackend:
    backend = ColossalAIBackend(ColossalAIOptions(**{"min_num_params": 10, **options}))
    backend.setup(ParallelContext(device=CPU, precision=precision))
    backend.parallelize(module, no_sample)
    return backend


def chunk_names(backend: ColossalAIBackend) -> set[str]:
    (model,) = backend._models.values()
    return {chunk.name for chunk in model.engine.chunks}


# --- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["gathered", "offloaded", "streamed"])
def test_hooks_of_a_step_see_masters_although_a_forward_came_after_the_backward(tier: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    backend = laid_out(module, precision="bf16-mixed", placement_policy=tier)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    backend.setup_optimizers(module, [optimizer])
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend((p.dtype, p.grad.dtype) for p in module.parameters() if p.grad is not None)
    )
    inputs = torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = backend.run_step(module, module, inputs).float().sum()
    backend.backward(module, loss)
    with torch.autocast("cpu", torch.bfloat16):
        backend.run_step(module, module, inputs)  # records gradients that nobody asks for
    backend.optimizer_step(optimizer, optimizer.step)
    assert seen == [(torch.float32, torch.float32)] * 4
    backend.unparallelize(module)
    backend.teardown()


class Odd(nn.Module):
    """Trains parameters that chunks cannot hold beside parameters that they can."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layers(x)
        return torch.view_as_real(hidden * self.turn).square().sum(-1)


def trained_odd(kind: type[torch.optim.Optimizer], **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Odd()
    optimizer = kind(module.parameters(), lr=0.01)  # type: ignore[call-arg] # of every class that is tried
    backend = laid_out(module, **options) if options else None
    if backend is not None:
        backend.setup_optimizers(module, [optimizer])
    for seed in range(3):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        if backend is None:
            module(inputs).mean().backward()
            optimizer.step()
        else:
            backend.backward(module, backend.run_step(module, module, inputs).mean())
            backend.optimizer_step(optimizer, optimizer.step)
    if backend is not None:
        backend.unparallelize(module)
        backend.teardown()
    return {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.mark.parametrize("overlap", ["none", "exact"])
@pytest.mark.parametrize("tier", ["gathered", "streamed"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_parameters_outside_of_chunks_are_stepped_too(
    kind: type[torch.optim.Optimizer], tier: str, overlap: str
) -> None:
    expected = trained_odd(kind)
    found = trained_odd(kind, placement_policy=tier, overlap=overlap)
    torch.manual_seed(0)
    start = Odd().turn
    assert not torch.equal(found["turn"], start), "it was never stepped"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


# --- units ----------------------------------------------------------------------------------------


class Tower(nn.Module):
    """Layers that repeat between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 50)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def test_embeddings_and_heads_stay_with_the_root_where_nobody_could_look(said: list[str]) -> None:
    backend = laid_out(Tower())
    assert chunk_names(backend) == {"layers.0", "layers.1", "layers.2", ""}
    assert [line for line in said if "no sample here" in line] == ["The plan: no sample here."]
    backend.teardown()


def test_they_are_chunks_where_the_sample_shows_that_only_they_use_their_weights() -> None:
    module = Tower()
    backend = ColossalAIBackend(ColossalAIOptions(min_num_params=10))
    backend.setup(ParallelContext(device=CPU, precision="32-true"))
    backend.parallelize(module, lambda: ((torch.zeros(2, 3, dtype=torch.long),), {}))
    assert {"embed", "head"} < chunk_names(backend)
    backend.teardown()


class Unheard(torch.optim.Optimizer):
    """Of a class that nobody knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


def test_state_that_is_guessed_is_said_once(said: list[str]) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    backend = laid_out(module, device_memory="1MiB")
    for _ in range(2):
        backend.setup_optimizers(module, [Unheard(module.parameters())])
    assert len([line for line in said if "the state of Unheard is not known" in line]) == 1
    backend.teardown()


# --- compiled layers ------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", Tier, ids=lambda tier: tier.value)
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "default"])
@pytest.mark.parametrize("in_place", [True, False])
def test_cuda_graphs_are_refused_where_weights_come_from_host_memory(
    mode: str, tier: Tier, in_place: bool
) -> None:
    layer = nn.Linear(8, 8)
    if in_place:
        layer.compile(mode=mode)
    module = nn.Sequential(nn.Linear(8, 8), layer if in_place else torch.compile(layer, mode=mode))
    records = mode in ("reduce-overhead", "max-autotune")
    tiers = [Tier.GATHERED, tier]
    if not (records and tier in (Tier.OFFLOADED, Tier.STREAMED)):
        refuse_cuda_graphs(module, tiers)
        return
    with pytest.raises(
        UnsupportedError, match=rf"^1: compiled to CUDA graphs.*\({tier.value}\).*no-cudagraphs"
    ):
        refuse_cuda_graphs(module, tiers)
