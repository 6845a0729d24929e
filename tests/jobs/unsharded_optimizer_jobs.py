"""Training with optimizers that read more than one element: each rank's results and the bytes it sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 4


class Lamb(Optimizer):
    """Trust ratios of whole parameters; its constructor makes state, and it counts steps in Python."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": 0, "average": torch.zeros_like(p, requires_grad=False)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] += 1
                    state["average"].lerp_(p.grad, 0.5)
                    ratio = (p.norm() + 1e-3) / (state["average"].norm() + 1e-6)
                    p.sub_(state["average"] * ratio, alpha=group["lr"] / state["step"])
        return loss


class Soap(Optimizer):
    """Preconditions matrices of at least 16 rows on both sides; its state has lists of tensors."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.ndim == 2 and p.shape[0] >= 16:
                    sides = self.state[p].setdefault("GG", [torch.eye(n, device=p.device) for n in p.shape])
                    sides[0].add_(p.grad @ p.grad.T)
                    sides[1].add_(p.grad.T @ p.grad)
                    update = torch.linalg.solve(sides[0], p.grad) @ torch.linalg.inv(sides[1])
                p.sub_(update, alpha=group["lr"])
        return loss


class MuonWithAuxiliary(Optimizer):
    """Momentum made orthogonal in groups with a flag, Adam in the others, as the reference has it."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 0.02, "use_muon": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 0.5)
                if group["use_muon"]:
                    x = average / (average.norm() + 1e-7)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.T @ x
                    p.sub_(x, alpha=group["lr"])
                else:
                    p.sub_(average, alpha=group["lr"])
        return loss


class NormOfAll(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.sub_(p.grad / norm, alpha=0.1)
        return loss


class Sam(Optimizer):
    """Holds another optimizer over its groups, which steps with the gradient of a point nearby."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            self.state[p]["before"] = p.clone()
            p.add_(p.grad, alpha=0.3 / float(norm))
        evaluate()
        for p in parameters:
            p.data = self.state[p].pop("before")
        self.inner.step()
        return loss


class FailsOnRank1(Lamb):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ZeroDivisionError("of rank 1")


def _with_flags(module: nn.Module, kind: Any) -> Any:
    named = dict(module.named_parameters())
    matrices = [p for name, p in named.items() if p.requires_grad and p.ndim == 2]
    rest = [p for name, p in named.items() if p.requires_grad and p.ndim != 2]
    return kind([{"params": rest, "lr": 0.1}, {"params": matrices, "use_muon": True}])


def _torch_muon(module: nn.Module) -> list[Optimizer]:
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim == 2]
    rest = [p for p in module.parameters() if p.requires_grad and p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def _over_all(kind: Any, **options: Any) -> Any:
    return lambda module: kind([p for p in module.parameters() if p.requires_grad], **options)


OPTIMIZERS: dict[str, Any] = {
    "lamb": _over_all(Lamb),
    "soap": _over_all(Soap),
    "adafactor": _over_all(torch.optim.Adafactor, lr=0.05),
    "muon groups": lambda module: _with_flags(module, MuonWithAuxiliary),
    "norm of all": _over_all(NormOfAll),
    "sam": _over_all(Sam),
    "lbfgs": _over_all(torch.optim.LBFGS, lr=1.0, max_iter=3, line_search_fn="strong_wolfe"),
    "fails on rank 1": _over_all(FailsOnRank1),
    "adamw": _over_all(torch.optim.AdamW, lr=0.01),
    "muon": _torch_muon,
}


@dataclass(frozen=True)
class Steps:
    """The settings of a training.

    Attributes:
        optimizer: One of `OPTIMIZERS`.
        strategy: The name of the strategy, or "auto".
        options: The options of the strategy.
        devices: The number of processes.
        trainer: Further arguments of the Trainer.
        save: The path to save to after two steps.
        resume: The checkpoint to resume from.
        save_resumed: The path to save to before the first step of a resumed run.
        batch: The number of samples that all ranks together see in a step.
    """

    optimizer: str
    strategy: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    trainer: dict[str, Any] = field(default_factory=dict)
    save: str | None = None
    resume: str | None = None
    save_resumed: str | None = None
    batch: int = 8


@dataclass(frozen=True)
class Result:
    """The results of a training: global losses, the weights, and the bytes that this rank sent for owners."""

    losses: list[float]
    weights: dict[str, Tensor]
    bytes_sent: int


class Net(LightningModule):
    """Linear layers, a convolution, a tied pair and a frozen layer. Manual where there are two optimizers."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.steps = steps
        self.example_input_array = torch.zeros(1, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(8, 36), nn.LayerNorm(36), nn.Tanh(), nn.Linear(36, 32), nn.Tanh())
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.head, self.tied = nn.Linear(32, 4, bias=False), nn.Linear(32, 4, bias=False)
        self.tied.weight = self.head.weight
        self.automatic_optimization = steps.optimizer != "muon"
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.frozen(x))
        seen = self.conv(hidden.reshape(-1, 2, 4, 4)).flatten(1)
        return self.head(seen) + self.tied(hidden)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        mean = loss.detach().clone().double()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.losses.append(float(mean))
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def on_train_start(self) -> None:
        if self.steps.save_resumed:
            self.trainer.save_checkpoint(self.steps.save_resumed)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.steps.save and self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.steps.save)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.steps.optimizer](self)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(48, 8, generator=torch.Generator().manual_seed(3))
        data = TensorDataset(x, x[:, :4].argmax(1))
        where = getattr(self.trainer, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(data, shuffle=False, **where)
        return DataLoader(data, batch_size=self.steps.batch // where["num_replicas"], sampler=sampler)


def train(steps: Steps) -> Result:
    """Train a few steps."""
    import nnx

    plain = steps.strategy == "auto"
    strategy = steps.strategy if plain else nnx.strategy(steps.strategy, timeout=60.0, **steps.options)
    given = {"max_steps": STEPS, **steps.trainer}
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=steps.devices, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        plugins=[nnx.CheckpointIO()] if plain else None, **given,
    )  # fmt: skip
    module = Net(steps)
    trainer.fit(module, ckpt_path=steps.resume)
    owners = None if plain else strategy.backend._owner_ranks
    sent = owners.bytes_sent if owners else 0
    return Result(module.losses, {n: p.detach().clone() for n, p in module.named_parameters()}, sent)


def train_all(many: list[Steps]) -> list[Result]:
    """Train one after the other."""
    return [train(steps) for steps in many]


@dataclass(frozen=True)
class Stepped:
    """Weights after steps of Muon on given gradients, and the bytes that all ranks sent."""

    weights: list[Tensor]
    bytes_sent: int


def step_muon_on_given_gradients(shards: bool) -> Stepped:
    """Run three steps of torch's Muon, on unsharded parameters or on shards of FSDP2 through owner ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from nnx_base.shard import shard_of
    from nnx_core.optimizers.unsharded_optimizer import OwnerRanks

    generator = torch.Generator().manual_seed(5)
    shapes = [(48, 64), (33, 20), (5, 7), (1, 9)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    if shards:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parameters = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in parameters]
    optimizer = torch.optim.Muon(parameters, lr=0.1, weight_decay=0.1)
    owners = OwnerRanks(lambda tensor, parameter=None: shard_of(tensor), torch.device("cpu"))
    if shards:
        owners.setup([optimizer])
    for _ in range(3):
        for parameter, shape in zip(parameters, shapes, strict=True):
            gradient = torch.randn(shape, generator=generator)
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if shards else gradient
        owners.step(optimizer, optimizer.step) if shards else optimizer.step()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    sent = torch.tensor(owners.bytes_sent)
    if shards:
        dist.all_reduce(sent)
    return Stepped([weight.detach() for weight in weights], int(sent))


def saved_tensors(path: str) -> dict[str, Tensor]:
    """Return the unsharded tensors of a checkpoint."""
    import nnx_checkpoint

    saved = nnx_checkpoint.open_checkpoint(Path(path))
    return {key: saved.read(key) for key in saved.tensors}
