"""Models, buffers and optimizers are built at different times and places."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor

from nnx_base.ranks import is_distributed
from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_same_run, trains
from nnx_conformance.subject import Subject
from nnx_conformance.task import BLOCKS, FEATURES, GLOBAL_BATCH, WIDTH, Block, Outcome, Plain, Task
from nnx_conformance.training import Watched, fit, make_trainer, outcome_of

# Buffers, and batch norms, which keep statistics in buffers.


def _expect_buffers(seen: dict[str, Tensor], expected: dict[str, Tensor], *, where: str) -> None:
    for name, wanted in expected.items():
        found = seen[name]
        expect(
            found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=1e-4, atol=1e-4),
            f"{where}: the buffer {name!r} is {found.tolist()}, rank 0's data give {wanted.tolist()}.",
        )


def _counts(seen: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    return {"total": seen["own"], "unsaved": seen["own"], "steps": torch.tensor(steps)}


@check()
def buffers_keep_updates(bench: Bench) -> None:
    """Buffers keep the values that training writes, and their names and dtypes."""
    rank_zero, *_ = bench.run(watch_buffers, Task(model=Counting), True)
    (after,) = rank_zero["end"]
    expected = {
        **_counts(after, 3),
        "wave": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64),
        "mask": torch.tensor([True, False, True]),
    }
    _expect_buffers(after, expected, where="rank 0, after training")


@check()
def buffers_in_validation(bench: Bench) -> None:
    """Validation within fit uses rank 0's buffers on every rank."""
    ranks = bench.run(watch_buffers, Task(model=Counting), True)
    for step, first in enumerate(ranks[0]["validate"]):
        for rank, report in enumerate(ranks):
            where = f"validation after step {step}, rank {rank}"
            _expect_buffers(report["validate"][step], _counts(first, step + 1), where=where)


@check()
def buffers_in_test_after_fit(bench: Bench) -> None:
    """A test after fit uses rank 0's buffers on every rank."""
    ranks = bench.run(watch_buffers, Task(model=Counting), False)
    for rank, report in enumerate(ranks):
        expected = _counts(ranks[0]["test"][0], 3)
        _expect_buffers(report["test"][0], expected, where=f"test after fit, rank {rank}")


@check()
def batch_norm(bench: Bench) -> None:
    """Running statistics are those of rank 0's data, and every rank validates with them."""
    ranks = bench.run(watch_buffers, Task(model=Normalizing), True)
    for step, first in enumerate(ranks[0]["validate"]):
        expected = {
            "norm.running_mean": first["own_mean"],
            "norm.running_var": first["own_var"],
            "norm.num_batches_tracked": torch.tensor(step + 1),
        }
        for rank, report in enumerate(ranks):
            _expect_buffers(report["validate"][step], expected, where=f"validation {step}, rank {rank}")
    worst = max(report["wrong"] for report in ranks)
    expect(
        worst < 1e-4, f"outputs in validation differ by {worst:.3g} from those by the expected statistics."
    )


@check("sync_batchnorm")
def synchronized_batch_norm(bench: Bench) -> None:
    """With `sync_batchnorm` the statistics are those of the global batch, and the user's layers return."""
    alone: Outcome = bench.alone(fit_synchronized, Task())
    for world_size in bench.world_sizes:
        ranks: list[Outcome] = bench.run(fit_synchronized, Task(), world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])
        for rank, outcome in enumerate(ranks):
            changed = sorted(set(outcome.notes["layers"]) - set(alone.notes["layers"]))
            expect(not changed, f"rank {rank}: after training the module has layers of class {changed}.")


@check()
def unseeded_ranks_start_equal(bench: Bench) -> None:
    """All ranks start from rank 0's weights and buffers, even with different seeds."""
    trains(bench, Unseeded)


@check()
def built_in_configure_model(bench: Bench) -> None:
    """A model built in `configure_model` trains like one built in `__init__`."""
    trains(bench, BuiltLate, like=Plain)


@check(of_adapter=True)
def configure_model_is_called_once(bench: Bench) -> None:
    """`configure_model` is called once in every run."""
    for rank, calls in enumerate(bench.run(count_calls, Task(model=BuiltLate, steps=1))):
        for run, count in calls.items():
            expect(count == 1, f"rank {rank}: {count} calls of configure_model in the {run}, expected 1.")


@check(of_adapter=True)
def built_in_configure_sharded_model(bench: Bench) -> None:
    """A model built in `configure_sharded_model`, the hook's older name, trains."""
    trains(bench, BuiltLateSharded, like=Plain)


@check(of_adapter=True)
def built_in_init_module(bench: Bench) -> None:
    """A model built under `Trainer.init_module()` trains."""
    alone = bench.train_alone(Task(model=Reset))
    ranks = bench.run(fit_in_init_module, Task(model=Reset), False)
    expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check("meta_initialization")
def empty_init(bench: Bench) -> None:
    """`Trainer.init_module(empty_init=True)` allocates nothing; `reset_parameters` sets the values later."""
    alone = bench.train_alone(Task(model=Reset))
    ranks = bench.run(fit_in_init_module, Task(model=Reset), True)
    for rank, outcome in enumerate(ranks):
        made = outcome.notes["with values"]
        expect(not made, f"rank {rank}: building the model allocated memory for {made}.")
    expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check("meta_initialization")
def built_on_meta_in_configure_model(bench: Bench) -> None:
    """Layers built on the meta device in `configure_model` get their values from `reset_parameters`."""
    trains(bench, BuiltLateOnMeta, like=Reset)


@check()
def optimizer_created_in_init(bench: Bench) -> None:
    """An optimizer created in `__init__` trains the parameters, in the first run and in the next."""
    task = Task(model=EarlyOptimizer, steps=2)
    alone = bench.alone(fit_twice, task)
    for world_size in bench.world_sizes:
        ranks = bench.run(fit_twice, task, world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check()
def wrap_in_configure_model(bench: Bench) -> None:
    """`wrap()` in `configure_model` changes no number, even if the strategy ignores it."""
    trains(bench, Wrapped, like=Plain)


@check("manual_wrap")
def wrap_shards_layers(bench: Bench) -> None:
    """`wrap()` shards a layer at once, so that a model can be built layer by layer."""
    for rank, (held, total) in enumerate(bench.run(local_share, Task(steps=1))):
        expect(held < total, f"rank {rank} holds {held} of the {total} elements of the wrapped layers.")


class BuiltLate(Plain):
    """Is built in `configure_model`, with the guard that Lightning recommends.

    Attributes:
        calls: The number of calls of the hook.

    """

    def __init__(self, task: Task) -> None:
        self.calls = 0
        super().__init__(task)

    def build(self) -> None:
        """Build nothing here."""

    def configure_model(self) -> None:
        """Build the plain layers, with the same initial weights."""
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
    """Wraps its blocks with `wrap()`, which some strategies ignore."""

    def build_late(self) -> None:
        """Build the layers of the plain module, in the same order."""
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(wrap(Block()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, FEATURES)


class _MeasuredWrapping(Wrapped):
    """Counts this rank's elements of the blocks right after `wrap()`."""

    def build_late(self) -> None:
        super().build_late()
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in self.blocks.parameters()]
        self.held = sum(shard.numel() for shard in shards)


class _Fixed(nn.Module):
    """A layer with deterministic weights and a buffer that it computes with."""

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
    """Has layers that `reset_parameters` always fills with the same values, even on `meta`."""

    def build(self) -> None:
        self.enter = _Fixed(FEATURES, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.leave = _Fixed(WIDTH, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x))))  # type: ignore[no-any-return]


class BuiltLateOnMeta(Reset):
    """Is built on the meta device in `configure_model`, so that the strategy must set the values."""

    def build(self) -> None:
        """Build nothing here."""

    def configure_model(self) -> None:
        """Build the layers on the meta device."""
        if not hasattr(self, "leave"):
            with torch.device("meta"):
                super().build()


class Unseeded(Plain):
    """Starts from different weights and buffers on each rank, like code without `seed_everything`."""

    def build(self) -> None:
        """Add a frozen offset to the plain layers."""
        torch.manual_seed(self.task.seed + int(os.environ.get("RANK", "0")))
        super().build()
        self.offset: Tensor
        self.register_buffer("offset", torch.randn(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset


class EarlyOptimizer(Plain):
    """Creates its optimizer in `__init__`, before anything is distributed."""

    def build(self) -> None:
        super().build()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)

    def configure_optimizers(self) -> Any:
        return self.early


class Counting(Watched):
    """Sums its training inputs in buffers, so that their values reveal their rank.

    Attributes:
        own: The sums of this rank's own inputs.
        seen: The buffers and `own` in each step of evaluation, by stage.

    """

    def build(self) -> None:
        """Register buffers of many kinds."""
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
        # `build` would convert the complex buffer to the task's real dtype.
        self.register_buffer("wave", torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("missing", None)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Update buffers by assignment and in place."""
        inputs = batch[0].detach().sum(0)
        self.total += inputs
        self.unsaved = self.unsaved + inputs
        self.steps += 1
        self.own += inputs.cpu()
        return super().training_step(batch, index)

    def evaluate(self, stage: str) -> None:
        """Record the buffers."""
        buffers = {name: value.detach().cpu().clone() for name, value in self.named_buffers()}
        self.seen.setdefault(stage, []).append({**buffers, "own": self.own.clone()})

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.evaluate("validate")

    def test_step(self, batch: list[Tensor], index: int) -> None:
        self.evaluate("test")


class Normalizing(Counting):
    """Has a batch norm on its inputs, whose running statistics follow from the data alone.

    Attributes:
        wrong: Largest difference between an output in evaluation and the output by the expected statistics.

    """

    def build(self) -> None:
        """Put the norm first, so that its statistics do not depend on the weights."""
        super().build()
        self.norm = nn.BatchNorm1d(FEATURES, affine=False)
        self.own_mean, self.own_var = torch.zeros(FEATURES), torch.ones(FEATURES)
        self.wrong = 0.0

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        mean, var = self.norm.running_mean, self.norm.running_var
        assert mean is not None, "it tracks"
        assert var is not None, "it tracks"
        if not self.training:
            expected = (x - mean) / torch.sqrt(var + self.norm.eps)
            self.wrong = max(self.wrong, (normal - expected).abs().max().item())
        return super().forward(normal)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Track the expected statistics."""
        inputs = batch[0].detach().cpu()
        self.own_mean += 0.1 * (inputs.mean(0) - self.own_mean)
        self.own_var += 0.1 * (inputs.var(0) - self.own_var)
        return super().training_step(batch, index)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Record the output, and validate."""
        super().validation_step(batch, index)
        self.seen["validate"][-1].update(own_mean=self.own_mean.clone(), own_var=self.own_var.clone())
        self(batch[0])


class _NormalizingInside(Plain):
    """Has a batch norm after the first layer."""

    def build(self) -> None:
        super().build()
        self.embed = nn.Sequential(self.embed, nn.BatchNorm1d(self.embed.out_features))  # type: ignore[assignment]


class _SynchronizedNorm(nn.BatchNorm1d):
    """Normalizes over the batches of all ranks; torch's own synchronized norm needs a GPU."""

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
    """Replaces every `BatchNorm1d` by the norm above."""

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


def watch_buffers(subject: Subject, task: Task, validate: bool) -> dict[str, Any]:
    """Train, optionally validate after each batch, and test; return the buffers."""
    module = task.module()
    assert isinstance(module, Counting), "the tasks of these checks train counting modules"
    make_trainer(subject, task, limit_val_batches=int(validate), val_check_interval=1).fit(module)
    module.evaluate("end")
    make_trainer(subject, task, limit_test_batches=1).test(module, verbose=False)
    return {**module.seen, "wrong": getattr(module, "wrong", 0.0)}


def fit_synchronized(subject: Subject, task: Task) -> Outcome:
    """Train with `sync_batchnorm=True`, or with a plugin that does the same on a CPU."""
    module = _NormalizingInside(task)
    on_cpu = subject.accelerator == "cpu"
    settings: dict[str, Any] = {"plugins": [_Synchronize()]} if on_cpu else {"sync_batchnorm": True}
    outcome = fit(subject, task, module=module, **settings)
    outcome.notes["layers"] = [type(each).__name__ for each in module.modules()]
    return outcome


def count_calls(subject: Subject, task: Task) -> dict[str, Any]:
    """Return the number of calls of `configure_model` in a first and in a second run."""
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


def fit_twice(subject: Subject, task: Task) -> Outcome:
    """Train, and train again with a new Trainer."""
    module = task.module()
    fit(subject, task, module=module)
    return fit(subject, task, module=module)


def local_share(subject: Subject, task: Task) -> tuple[int, int]:
    """Return this rank's number of elements of the wrapped blocks, and the full number."""
    module = _MeasuredWrapping(task)
    fit(subject, task, module=module)
    return module.held, sum(p.numel() for p in module.blocks.parameters())
