"""Minimal chunks, and a model over them, for tests of the stepper alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nnx_colossalai.chunks.chunk import Chunk
from nnx_colossalai.plan.spec import Tier


class Layer(Chunk):
    """The least chunk there can be: masters, and bfloat16 copies of them that a forward reads."""

    def __init__(self, index: int, module: nn.Module, delays: random.Random | None = None) -> None:
        self.index, self.name, self.tier = index, f"layers.{index}", Tier.OFFLOADED
        self.masters: Mapping[str, nn.Parameter] = {
            f"{self.name}.{name}": parameter for name, parameter in module.named_parameters()
        }
        self.working = {name: master.detach().bfloat16() for name, master in self.masters.items()}
        self.delays = delays
        self.pending: Callable[[], None] | None = None
        self.refreshed_in: list[str] = []

    def refresh(self) -> None:
        if self.delays is not None:
            time.sleep(self.delays.random() * 0.003)
        for name, master in self.masters.items():
            self.working[name].copy_(master.detach())
        self.refreshed_in.append(threading.current_thread().name)

    def set_pending(self, wait: Callable[[], None] | None) -> None:
        self.pending = wait

    def use(self) -> None:
        """Wait for the pending step, as a forward does before it reads the working weights."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()


class Model:
    """Four layers, computed with their working weights; gradients go to the masters in float32."""

    def __init__(self, kind: Callable[[int, nn.Module], Layer] = Layer) -> None:
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.chunks = [kind(index, layer) for index, layer in enumerate(self.layers)]

    def loss_and_backward(self, step: int) -> Tensor:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        used = []
        for chunk in self.chunks:
            chunk.use()
            weight, bias = (w.clone().requires_grad_() for w in chunk.working.values())
            x = torch.tanh(nn.functional.linear(x.bfloat16(), weight, bias))
            used.append((weight, bias))
        loss = x.float().square().mean()
        loss.backward()
        for chunk, working in zip(self.chunks, used, strict=True):
            for master, weight in zip(chunk.masters.values(), working, strict=True):
                grad = weight.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
        return loss.detach()

    def parameters(self) -> list[nn.Parameter]:
        return list(self.layers.parameters())
