"""Steps over masters that are DTensors, by the optimizer itself and by the stepper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from jobs.colossalai_layers import Layer
from nnx_colossalai.stepper import Stepper

_SHAPES = ((5, 4), (1, 3), (6,), (4, 2, 2))
_STEPS = 4

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw_default": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, fused=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p),
}


def train(name: str, overlap: str) -> dict[str, Any]:
    """Run four steps over two chunks with the stepper.

    Returns:
        This rank's values, their layouts, and True if the background thread was used.
    """
    modules = _modules()
    chunks = [Layer(index, module) for index, module in enumerate(modules)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = OPTIMIZERS[name](parameters)
    stepper = Stepper(chunks, overlap=overlap)  # type: ignore[arg-type]
    stepper.setup_optimizers([optimizer])
    for step in range(_STEPS):
        _give_gradients(parameters, step)
        stepper.step(optimizer, optimizer.step)
        for chunk in chunks:
            chunk.use()
        optimizer.zero_grad()
    seen = _seen(parameters, [optimizer])
    stepper.close()
    seen["in_background"] = any("nnx" in thread for chunk in chunks for thread in chunk.refreshed_in)
    return seen


def train_alone(name: str, *, local: bool) -> dict[str, Any]:
    """The same with the optimizer's own step; `local` over this rank's parts, each with its own optimizer.

    Which is because torch's fused SGD cannot have momentum for some parameters only.
    """
    parameters = [parameter for module in _modules() for parameter in module.parameters()]
    if local:
        parameters = [nn.Parameter(parameter.to_local().detach()) for parameter in parameters]  # type: ignore[attr-defined]
    groups = [[parameter] for parameter in parameters] if local else [parameters]
    optimizers = [OPTIMIZERS[name](group) for group in groups]
    for step in range(_STEPS):
        _give_gradients(parameters, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _seen(parameters, optimizers)


def _modules() -> list[nn.ParameterList]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return [nn.ParameterList(_sharded(torch.randn(shape), mesh) for shape in _SHAPES) for _ in range(2)]


def _give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    for index, parameter in enumerate(parameters):
        if step or index != 1:  # which gets its first gradient later
            parameter.grad = torch.sin(parameter.detach() * (step + 1))


def _seen(parameters: list[nn.Parameter], optimizers: list[Any]) -> dict[str, Any]:
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    return {
        "values": [_described(parameter) for parameter in parameters],
        "state": [
            {
                index: {key: _described(value) for key, value in entries.items()}
                for index, entries in state.items()
            }
            for state in states
        ],
    }


def _sharded(value: Tensor, mesh: Any) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))


def _described(value: Any) -> Any:
    """Return values exactly, with their sharding, as text, which compares the bits."""
    if not isinstance(value, Tensor):
        return repr(value)
    local = value.detach().to_local() if isinstance(value, DTensor) else value.detach()
    layout = (value.placements, tuple(value.shape), value.stride()) if isinstance(value, DTensor) else "plain"
    return repr(layout), local.numpy().tobytes().hex(), str(local.dtype)
