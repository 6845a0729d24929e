"""Jobs that look inside a model while FSDP shards it."""

from __future__ import annotations

import copy
from typing import Any, Generic, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import DTensor

from nnx_core._torch_compat import state_of
from nnx_fsdp._torch_compat import param_groups
from nnx_test_helpers.training import MODELS, Block, Net, Outcome, Run, digest_of, make_trainer, train

T = TypeVar("T")


class Look(Callback):
    """Records the layout of the model in the middle of training."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}
        self.gathered: list[str] = []

    def on_before_backward(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.gathered = [
            name
            for name, part in module.named_modules()
            if isinstance(part, FSDPModule) and any(g.is_unsharded for g in param_groups(state_of(part)))
        ]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.seen = {"gathered": self.gathered, **describe(module)}
        self.seen["state_devices"] = {
            value.device.type
            for optimizer in trainer.optimizers
            for entries in optimizer.state.values()
            for value in entries.values()
        }


def describe(module: nn.Module) -> dict[str, Any]:
    """Names of units, and which parameters are sharded over which mesh."""
    sharded = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
    return {
        "units": [name for name, part in module.named_modules() if isinstance(part, FSDPModule)],
        "names": [name for name, _ in module.named_parameters()],
        "plain": [name for name, _ in module.named_parameters() if name not in sharded],
        "mesh": {tuple(p.device_mesh.shape) for p in sharded.values()},
        "local": sum(p.to_local().numel() for p in sharded.values()),
        "total": sum(p.numel() for p in sharded.values()),
    }


def train_and_look(run: Run) -> tuple[Outcome, dict[str, Any]]:
    """Train as described, and return the outcome and the model's layout."""
    look = Look()
    return train(run, module=MODELS[run.model](run), callbacks=[look]), look.seen


class Copies(Callback):
    """Copies the module after each batch, and notes the norms of the copy's parameters."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        copied = copy.deepcopy(module)
        assert not any(isinstance(p, DTensor) for p in copied.parameters())
        self.norms.append(sum(float(p.norm()) for p in copied.parameters()))


def norms_of_copies(run: Run) -> list[float]:
    """Train as described, and copy the module while it trains."""
    copies = Copies()
    train(run, module=MODELS[run.model](run), callbacks=[copies])
    return copies.norms


class Sharded(Net):
    """Built in the older hook, in the seed's way: the model is composed of wrapped layers."""

    def configure_sharded_model(self) -> None:
        for index, block in enumerate(self.blocks):
            self.blocks[index] = wrap(block)
        self.model = nn.Sequential(self.embed, nn.Tanh(), self.blocks[0])


class GenericNet(Generic[T], Net):
    """FSDP2 cannot extend a class with this memory layout."""


class ScalarNet(Net):
    """Owns a 0-d parameter, which FSDP2 refuses to shard."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.temperature


class EmptyNet(Net):
    """Owns a parameter without elements, which FSDP2 cannot reduce the gradient of."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum()


class MixedNet(Net):
    """Trains a layer in float64 beside others, and a weight whose elements lie transposed."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.turned = nn.Parameter(torch.linspace(-0.1, 0.1, 36).reshape(6, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (super().forward(x @ self.turned + x).double() * self.scale).float()


class LateNet(Net):
    """Builds its layers in `configure_model`, on the meta device."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.blocks = nn.ModuleList()

    def configure_model(self) -> None:
        if len(self.blocks):
            return
        with torch.device("meta"):
            self.blocks = nn.ModuleList(wrap(Block(10)) for _ in range(3))


class Counting(Net):
    """Counts how often its blocks run forward."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.calls = [0]
        for block in self.blocks:
            block.up.register_forward_hook(lambda *_: self.calls.__setitem__(0, self.calls[0] + 1))


class WrappedTied(Net):
    """Wraps a layer whose weight another layer shares."""

    def configure_model(self) -> None:
        wrap(self.head)


MODELS |= {
    "wrapped_tied": WrappedTied,
    "sharded": Sharded,
    "generic": GenericNet,
    "scalar": ScalarNet,
    "empty": EmptyNet,
    "mixed": MixedNet,
    "late": LateNet,
    "counting": Counting,
}


def count_calls(run: Run) -> tuple[Outcome, int]:
    """Return the outcome of a run, and the number of its block forwards."""
    module = Counting(run)
    return train(run, module=module), module.calls[0]


def train_twice(run: Run) -> dict[str, Any]:
    """Fit, look at the plain module, copy it, fit again with a new Trainer."""
    module = Net(run)
    before = dict(module.named_parameters())
    first = train(run, module=module)
    plain = {name: type(value) for name, value in module.named_parameters()}
    report = {
        "class": type(module) is Net and type(module.blocks[0]) is Block,
        "plain": all(kind is nn.Parameter for kind in plain.values()),
        "same objects": all(before[name] is p for name, p in module.named_parameters()),
        "copy": digest_of(dict(copy.deepcopy(module).state_dict())) == first.digest,
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()),
        "first": list(first.losses),
    }
    module.losses.clear()
    report["second"] = list(train(run, module=module).losses)
    report["digest"] = digest_of(dict(module.state_dict()))
    return report


def init_differently(run: Run, rank_seeds: bool) -> str:
    """Train a step from weights that differ on every rank; the result must be rank 0's everywhere."""
    import os

    module = Net(run)
    if rank_seeds:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(int(os.environ["RANK"]))
    return train(run, module=module).digest


def fit_error(run: Run) -> str:
    """The message of the error a run ends with."""
    try:
        train(run, module=MODELS[run.model](run))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def evaluate_everything(run: Run) -> dict[str, Any]:
    """Validate, test and predict before, between and after two fits."""
    module = Net(run)
    trainer = make_trainer(run)
    report: dict[str, Any] = {"before": trainer.validate(module, verbose=False)[0]["val_loss"]}
    trainer = make_trainer(run)
    trainer.fit(module)
    report["losses"] = list(module.losses)
    report["after"] = trainer.validate(module, verbose=False)[0]["val_loss"]
    report["test"] = trainer.test(module, verbose=False)[0]["test_loss"]
    report["predict"] = torch.cat(trainer.predict(module)).double().sum().item()
    return report


compilations: list[int] = []


def counting_compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """A backend of torch.compile that counts the graphs it is given and runs them as they are."""
    compilations.append(len(inputs))
    return graph.forward


def count_compilations(run: Run) -> tuple[Outcome, int]:
    """Return the outcome of a run, and the number of compiled graphs."""
    compilations.clear()
    torch._dynamo.reset()
    return train(run), len(compilations)
