"""What the ranks do for the checks of `structure`: modules that watch their buffers, hooks and masks."""

from __future__ import annotations

import os
import warnings
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor

from nnx_checkpoint.collective import is_distributed
from nnx_conformance.checks.stages import Watched
from nnx_conformance.structure_models import Recomputing, Tied
from nnx_conformance.subject import Subject
from nnx_conformance.task import BLOCKS, FEATURES, GLOBAL_BATCH, WIDTH, Block, Outcome, Plain, Task, share_of
from nnx_conformance.training import fit, make_trainer, outcome_of

# --- models that are built in other ways ----------------------------------------------------------
# The modules of the group `structure` that are built in unusual ways, or at unusual times.


T = TypeVar("T")


class BuiltLate(Plain):
    """Is built in `configure_model`, guarded as Lightning asks for.

    Attributes:
        calls: The number of calls of the hook.
    """

    def __init__(self, task: Task) -> None:
        self.calls = 0
        super().__init__(task)

    def build(self) -> None:
        """Nothing yet."""

    def configure_model(self) -> None:
        """The plain layers, with the same weights as ever."""
        self.calls += 1
        if hasattr(self, "head"):
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.task.seed)
            self.build_late()

    def build_late(self) -> None:
        """Create the layers."""
        super().build()


class BuiltLateSharded(BuiltLate):
    """Is built in `configure_sharded_model`, the hook's older name."""

    configure_sharded_model = BuiltLate.configure_model
    configure_model = Plain.configure_model


class Wrapped(BuiltLate):
    """Wraps its blocks with `wrap()`, which means something to some strategies and nothing to others."""

    def build_late(self) -> None:
        """The same layers as the plain module, in the same order."""
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(wrap(Block()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, FEATURES)


class _Fixed(nn.Module):
    """A layer whose weights are known without chance, and a buffer that it computes with."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(after, before))
        self.bias = nn.Parameter(torch.empty(after))
        self.scale: Tensor
        self.register_buffer("scale", torch.empty(after))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for tensor, step in ((self.weight, 0.37), (self.bias, 0.11), (self.scale, 0.05)):
                values = torch.arange(tensor.numel(), device=tensor.device) * step
                tensor.copy_(torch.cos(values).reshape(tensor.shape) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) * self.scale


class Reset(Plain):
    """Layers that `reset_parameters` fills with the same values every time, also when built on `meta`."""

    def build(self) -> None:
        """Two layers and a norm."""
        self.enter = _Fixed(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.leave = _Fixed(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        return self.leave(torch.tanh(self.norm(self.enter(x))))  # type: ignore[no-any-return]


class BuiltLateOnMeta(Reset):
    """Is built on the meta device in `configure_model`; it is the strategy's to give it values."""

    def build(self) -> None:
        """Nothing yet."""

    def configure_model(self) -> None:
        """The layers, without values."""
        if not hasattr(self, "leave"):
            with torch.device("meta"):
                super().build()


class Unseeded(Plain):
    """Starts from other weights and buffers on each rank, as where nobody called `seed_everything`."""

    def build(self) -> None:
        """The plain layers, and an offset that is not trained."""
        torch.manual_seed(self.task.seed + int(os.environ.get("RANK", "0")))
        super().build()
        self.offset: Tensor
        self.register_buffer("offset", torch.randn(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        """The plain output, with the offset."""
        return super().forward(x) + self.offset


class EarlyOptimizer(Plain):
    """Makes its optimizer before anything is distributed."""

    def build(self) -> None:
        """The plain layers, and an optimizer over them."""
        super().build()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    def configure_optimizers(self) -> Any:
        """That one."""
        return self.early


class GenericRoot(Generic[T], Plain):
    """A root whose class has another memory layout than most."""


# --- jobs -----------------------------------------------------------------------------------------


# --- parameters ---------------------------------------------------------------------------------------


def freeze(subject: Subject, task: Task) -> dict[str, Any]:
    """What becomes of the parameters that are not trained."""
    module = task.module()
    before = {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}
    trainer = make_trainer(subject, task)
    trainer.fit(module)
    after = dict(module.named_parameters())
    return {
        "changed": [name for name, value in before.items() if not torch.equal(value, after[name])],
        "frozen before": sorted(before),
        "frozen after": sorted(name for name, p in after.items() if not p.requires_grad),
        "with state": sorted(n for n in before for o in trainer.optimizers if o.state.get(after[n])),
        "with gradients": sorted(name for name in before if after[name].grad is not None),
    }


def fit_tied(subject: Subject, task: Task) -> dict[str, Any]:
    """Whether tied parameters are one afterwards, by name as well as by object."""
    module = Tied(task)
    before = [name for name, _ in module.named_parameters()]
    fit(subject, task, module=module)
    return {
        "one": module.again.weight is module.embed.weight,
        "names": [name for name, _ in module.named_parameters()] == before,
        "both in the state dict": {"again.weight", "embed.weight"} <= set(module.state_dict()),
    }


def fit_twice(subject: Subject, task: Task) -> Outcome:
    """Train, and train again with a new Trainer."""
    module = task.module()
    fit(subject, task, module=module)
    return fit(subject, task, module=module)


# --- buffers ------------------------------------------------------------------------------------------


class Counting(Watched):
    """Adds its training inputs up in buffers, so that their values tell which rank they come from.

    Attributes:
        own: The same sums of this rank's own inputs alone.
        seen: The buffers and `own` in each step of evaluation, by stage.
    """

    def build(self) -> None:
        """Buffers of many kinds."""
        super().build()
        self.total: Tensor
        self.steps: Tensor
        self.unsaved: Tensor
        self.register_buffer("total", torch.zeros(FEATURES))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unsaved", torch.zeros(FEATURES), persistent=False)
        self.own = torch.zeros(FEATURES)
        self.seen: dict[str, list[dict[str, Tensor]]] = {}

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        # Not in `build`: conversion to the task's dtype would make it real.
        self.register_buffer("wave", torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("missing", None)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Update by replacing and in place."""
        inputs = batch[0].detach().sum(0)
        self.total += inputs
        self.unsaved = self.unsaved + inputs
        self.steps += 1
        self.own += inputs.cpu()
        return super().training_step(batch, index)

    def evaluate(self, stage: str) -> None:
        """Note what the buffers hold."""
        buffers = {name: value.detach().cpu().clone() for name, value in self.named_buffers()}
        self.seen.setdefault(stage, []).append({**buffers, "own": self.own.clone()})

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Look."""
        self.evaluate("validate")

    def test_step(self, batch: list[Tensor], index: int) -> None:
        """Look."""
        self.evaluate("test")


class Normalizing(Counting):
    """Normalises its inputs over the batch; what the running statistics must be follows from the data.

    Attributes:
        wrong: Largest difference between the output in evaluation and the one by the running statistics.
    """

    def build(self) -> None:
        """The norm comes first, so that its statistics do not depend on the weights."""
        super().build()
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)
        self.own_mean, self.own_var = torch.zeros(FEATURES), torch.ones(FEATURES)
        self.wrong = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, then as ever."""
        normal = self.norm(x)
        mean, var = self.norm.running_mean, self.norm.running_var
        assert mean is not None, "it tracks"
        assert var is not None, "it tracks"
        if not self.training:
            expected = (x - mean) / torch.sqrt(var + self.norm.eps)
            self.wrong = max(self.wrong, (normal - expected).abs().max().item())
        return super().forward(normal)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Track the statistics by hand."""
        inputs = batch[0].detach().cpu()
        self.own_mean += 0.1 * (inputs.mean(0) - self.own_mean)
        self.own_var += 0.1 * (inputs.var(0) - self.own_var)
        return super().training_step(batch, index)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Look, and compute."""
        super().validation_step(batch, index)
        self.seen["validate"][-1].update(own_mean=self.own_mean.clone(), own_var=self.own_var.clone())
        self(batch[0])


def watch_buffers(subject: Subject, task: Task, validate: bool) -> dict[str, Any]:
    """Train, validate after each batch if asked for, and test; the buffers in evaluation and at the end."""
    module = task.module()
    assert isinstance(module, Counting), "the tasks of these checks train counting modules"
    make_trainer(subject, task, limit_val_batches=int(validate), val_check_interval=1).fit(module)
    module.evaluate("end")
    make_trainer(subject, task, limit_test_batches=1).test(module, verbose=False)
    return {**module.seen, "wrong": getattr(module, "wrong", 0.0)}


class _SynchronizedNorm(nn.BatchNorm1d):
    """Normalises over the batches of all ranks; torch's own needs a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and is_distributed()):
            return super().forward(input)
        size = dist.get_world_size()
        mean = all_reduce(input.mean(0)) / size  # type: ignore[no-untyped-call]
        var = all_reduce((input - mean).square().mean(0)) / size  # type: ignore[no-untyped-call]
        assert self.running_mean is not None, "it tracks"
        assert self.running_var is not None, "it tracks"
        assert self.num_batches_tracked is not None, "it tracks"
        with torch.no_grad():
            unbiased = GLOBAL_BATCH / (GLOBAL_BATCH - 1)
            self.running_mean += 0.1 * (mean - self.running_mean)
            self.running_var += 0.1 * (var * unbiased - self.running_var)
            self.num_batches_tracked += 1
        outputs: Tensor = (input - mean) / torch.sqrt(var + self.eps) * self.weight + self.bias
        return outputs


class _Synchronize(LayerSync):
    """Puts the norm above in the place of every `BatchNorm1d`."""

    def apply(self, model: nn.Module) -> nn.Module:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.BatchNorm1d:
                    setattr(parent, name, _moved(child, _SynchronizedNorm(child.num_features)))
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is _SynchronizedNorm:
                    setattr(parent, name, _moved(child, nn.BatchNorm1d(child.num_features)))
        return model


def _moved(source: nn.Module, target: nn.Module) -> nn.Module:
    target._parameters, target._buffers = source._parameters, source._buffers
    return target.train(source.training)


class _NormalizingInside(Plain):
    """A norm over the batch after the first layer."""

    def build(self) -> None:
        super().build()
        self.embed = nn.Sequential(self.embed, nn.BatchNorm1d(self.embed.out_features))  # type: ignore[assignment]


def fit_synchronized(subject: Subject, task: Task) -> Outcome:
    """Train with `sync_batchnorm=True`, or with a plugin that does the same on a CPU."""
    module = _NormalizingInside(task)
    on_cpu = subject.accelerator == "cpu"
    settings: dict[str, Any] = {"plugins": [_Synchronize()]} if on_cpu else {"sync_batchnorm": True}
    outcome = fit(subject, task, module=module, **settings)
    outcome.notes["layers"] = [type(part).__name__ for part in module.modules()]
    return outcome


# --- how it is built ----------------------------------------------------------------------------------


def count_calls(subject: Subject, task: Task) -> dict[str, Any]:
    """How often `configure_model` is called in one run and in a second one."""
    module: Any = task.module()
    fit(subject, task, module=module)
    once = module.calls
    fit(subject, task, module=module)
    return {"first run": once, "second run": module.calls - once}


def fit_in_init_module(subject: Subject, task: Task, empty_init: bool) -> Outcome:
    """Build the module under `Trainer.init_module`, and train it."""
    trainer = make_trainer(subject, task)
    with trainer.init_module(empty_init=empty_init):
        module = task.module()
    with_values = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    trainer.fit(module)
    outcome = outcome_of(trainer, module)
    outcome.notes["with values"] = with_values
    return outcome


class _MeasuredWrapping(Wrapped):
    """Counts, as soon as its blocks are wrapped, how much of them this rank holds."""

    def build_late(self) -> None:
        super().build_late()
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in self.blocks.parameters()]
        self.held = sum(shard.numel() for shard in shards)


def local_share(subject: Subject, task: Task) -> tuple[int, int]:
    """How many elements of the blocks this rank holds once they are wrapped, and how many there are."""
    module = _MeasuredWrapping(task)
    fit(subject, task, module=module)
    return module.held, sum(p.numel() for p in module.blocks.parameters())


# --- hooks and chance ---------------------------------------------------------------------------------


class Hooked(Plain):
    """Computes with hooks that a user registered on its layers.

    Attributes:
        calls: The number of calls of each hook.
    """

    def build(self) -> None:
        """Hooks before and after forward, and in backward."""
        super().build()
        self.calls = {"before": 0, "after": 0, "backward": 0}
        self.blocks[0].register_forward_pre_hook(self._before)
        self.blocks[0].register_forward_hook(self._after)
        self.head.register_full_backward_hook(self._backward)

    def _before(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.calls["before"] += 1
        return (args[0] * 0.5,)

    def _after(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.calls["after"] += 1
        return output + 1.0

    def _backward(self, module: nn.Module, *gradients: Any) -> None:
        self.calls["backward"] += 1


def fit_hooked(subject: Subject, task: Task) -> Outcome:
    """Train with hooks; the notes say how often they were called, then and by the module alone afterwards."""
    module = Hooked(task)
    outcome = fit(subject, task, module=module)
    outcome.notes["in training"] = dict(module.calls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module(torch.ones(2, FEATURES)).sum().backward()
    outcome.notes["in all"] = dict(module.calls)
    return outcome


class _Masks(Plain):
    """Draws a mask of dropout in every step, with a seed for each share of the data."""

    def build(self) -> None:
        super().build()
        self.dropout = nn.Dropout(0.5)
        self.masks: list[Tensor] = []
        self.share = 0

    def on_train_start(self) -> None:
        self.share = share_of(self.trainer)["rank"]
        torch.manual_seed(100 + self.share)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = self.dropout(block(hidden))
        self.masks.append(self.dropout(torch.ones(64)).bool())
        return self.head(hidden)  # type: ignore[no-any-return]


def draw_masks(subject: Subject, task: Task) -> tuple[int, list[Tensor], list[float]]:
    """This rank's share of the data, its masks step by step, and its losses."""
    module = _Masks(task)
    fit(subject, task, module=module)
    return module.share, module.masks, module.losses


class _Keeping(Recomputing):
    recompute = False


def fit_recomputing(subject: Subject, task: Task, recompute: bool) -> Outcome:
    """Train with dropout in blocks whose activations are recomputed, or kept."""
    module = Recomputing(task) if recompute else _Keeping(task)
    torch.manual_seed(31)
    return fit(subject, task, module=module)
