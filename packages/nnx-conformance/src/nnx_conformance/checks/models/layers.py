"""Parameters and layers of every kind, batches, hooks and dropout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data import default_collate as collate

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_equal_losses, expect_same_run, trains
from nnx_conformance.subject import Subject
from nnx_conformance.task import (
    BLOCKS,
    FEATURES,
    WIDTH,
    Block,
    ConsecutiveSampler,
    Outcome,
    Plain,
    Task,
    dataset,
    share_of,
)
from nnx_conformance.training import fit, make_trainer


@check()
def uneven_dimensions(bench: Bench) -> None:
    """Dimensions may be prime, one, or smaller than the number of ranks."""
    alone = bench.train_alone(Task(model=Uneven))
    for world_size in (2, 3):
        ranks = bench.train(Task(model=Uneven), world_size=world_size)
        expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"], what=f"{world_size} ranks")


@check()
def scalar_parameters(bench: Bench) -> None:
    """Parameters may have no dimension or one element, and belong to the root itself."""
    trains(bench, Scalars)


@check()
def empty_parameters(bench: Bench) -> None:
    """Parameters may have no elements."""
    trains(bench, Empty)


@check()
def non_contiguous_parameters(bench: Bench) -> None:
    """Parameters may have another memory order, such as channels last."""
    trains(bench, Strided)


@check("mixed_dtypes")
def mixed_dtypes(bench: Bench) -> None:
    """Trained parameters may have different dtypes."""
    trains(bench, MixedDtypes)


@check()
def quantized_parameters(bench: Bench) -> None:
    """Frozen parameters may be integers, or have less precision than the trained ones."""
    trains(bench, Quantized)


@check()
def large_layers(bench: Bench) -> None:
    """Repeated layers of a hundred thousand parameters train like small ones."""
    trains(bench, Large, steps=2)


@check()
def tied_parameters(bench: Bench) -> None:
    """A parameter that two layers share gets one update, from both."""
    trains(bench, Tied)


@check()
def tied_repeated_layers(bench: Bench) -> None:
    """Repeated layers may share a parameter."""
    trains(bench, TiedBlocks)


@check()
def ties_survive_training(bench: Bench) -> None:
    """Tied parameters are still one object after training."""
    for rank, report in enumerate(bench.run(fit_tied, Task(steps=1))):
        broken = [what for what, holds in report.items() if not holds]
        expect(
            not broken, f"rank {rank}: after training, tied parameters are no longer one object: {broken}."
        )


@check()
def frozen_parameters(bench: Bench) -> None:
    """Parameters without `requires_grad` stay bitwise unchanged, even with weight decay."""
    for rank, report in enumerate(bench.run(freeze, Task(model=Frozen))):
        expect(
            not report["changed"], f"rank {rank}: training changed frozen parameters: {report['changed']}."
        )
        expect(
            report["frozen after"] == report["frozen before"],
            f"rank {rank}: {report['frozen before']} were frozen before training, {report['frozen after']} "
            "are after it.",
        )
        kept = sorted({*report["with state"], *report["with gradients"]})
        expect(not kept, f"rank {rank}: frozen parameters have gradients or optimizer state: {kept}.")


@check()
def partly_frozen_layers(bench: Bench) -> None:
    """Trained parameters beside frozen ones get the updates of one process."""
    trains(bench, Frozen)


@check("unused_parameters")
def unused_parameters(bench: Bench) -> None:
    """Unused parameters stay unchanged, and the other parameters train."""
    trains(bench, Unused)


@check("unused_parameters")
def parameters_used_sometimes(bench: Bench) -> None:
    """Steps may use a parameter or leave it unused."""
    trains(bench, Alternating)


@check()
def layers_called_twice(bench: Bench) -> None:
    """A layer may be called several times in one forward."""
    trains(bench, Reusing)


@check()
def nested_containers(bench: Bench) -> None:
    """Lists and dicts of parameters and modules may be nested."""
    trains(bench, Nested)


@check()
def embeddings_and_convolutions(bench: Bench) -> None:
    """Embeddings, convolutions and group norms train."""
    trains(bench, Convolving)


@check()
def recurrent_layers(bench: Bench) -> None:
    """Recurrent layers train, although they keep a second list of their weights."""
    trains(bench, Recurrent)


@check()
def attention_layers(bench: Bench) -> None:
    """Attention trains, although it uses the weight of a layer that it never calls."""
    trains(bench, Attending)


@check()
def parametrized_layers(bench: Bench) -> None:
    """Layers with a weight from `torch.nn.utils.parametrizations` train."""
    trains(bench, Parametrized)


@check()
def generic_lightning_module(bench: Bench) -> None:
    """The root class may be generic, like `class Model(Generic[T], LightningModule)`."""
    trains(bench, GenericRoot)


@check()
def activation_checkpointing(bench: Bench) -> None:
    """User-defined activation checkpointing gives the same losses as without it, even with dropout."""
    task = Task()
    recomputed = bench.run(fit_recomputing, task, True)
    kept = bench.run(fit_recomputing, task, False)
    for rank, (outcome, wanted) in enumerate(zip(recomputed, kept, strict=True)):
        where = f"recomputed, rank {rank}"
        expect_equal_losses(outcome.losses, wanted.losses, tolerance=TOLERANCE["float32"], where=where)


@check()
def nested_batches(bench: Bench) -> None:
    """Batches, keyword arguments and outputs of forward may be nested dicts, lists and tuples."""
    trains(bench, StructuredBatches)


@check("submodule_hooks")
def user_hooks(bench: Bench) -> None:
    """User hooks on layers run with the same effect as in one process, and persist after training."""
    alone: Outcome = bench.alone(fit_hooked, Task())
    ranks: list[Outcome] = bench.run(fit_hooked, Task())
    for rank, outcome in enumerate(ranks):
        for when in ("in training", "in all"):
            seen, expected = outcome.notes[when], alone.notes[when]
            expect(seen == expected, f"rank {rank}: hooks called {when}: {seen}; in one process {expected}.")
    expect_same_run(ranks, alone, tolerance=TOLERANCE["float32"])


@check()
def dropout_differs_by_rank(bench: Bench) -> None:
    """Ranks with different seeds have different dropout masks, and each step has a new mask."""
    ranks = bench.run(draw_masks, Task())
    masks = {share: drawn for share, drawn, _ in ranks}
    drawn = [(f"share {share}, step {i}", m) for share, ms in masks.items() for i, m in enumerate(ms)]
    for index, (where, mask) in enumerate(drawn):
        same = [other for other, mask_there in drawn[:index] if torch.equal(mask, mask_there)]
        expect(not same, f"dropout of {where} drops the same elements as that of {same}.")


@check()
def dropout_is_reproducible(bench: Bench) -> None:
    """The same seeds give the same masks and losses."""
    first, second = (bench.run(draw_masks, Task()) for _ in range(2))
    for rank, ((_, masks, losses), (_, again, losses_again)) in enumerate(zip(first, second, strict=True)):
        expect(
            losses == losses_again and all(map(torch.equal, masks, again)),
            f"rank {rank}: with one seed the losses are {losses}, and then {losses_again}.",
        )


# Models below that are compared with one process use no random numbers and no per-batch statistics.


class Uneven(Plain):
    """Has prime dimensions, and some smaller than any world size."""

    def build(self) -> None:
        widths = (FEATURES, 7, 13, 1, 5, FEATURES)
        self.layers = nn.ModuleList(
            nn.Linear(before, after, bias=after != 13) for before, after in pairwise(widths)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) if layer is not self.layers[-1] else layer(x)
        return x


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Scalars(Plain):
    """Has parameters without dimensions and of one element, on the root and below it."""

    def build(self) -> None:
        super().build()
        self.factor = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.full((1,), 0.25))
        self.scaled = _Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scaled(x)) * self.factor + self.offset


class Empty(Plain):
    """Has a parameter without elements, like an optional layer of width zero."""

    def build(self) -> None:
        super().build()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Include the parameter in a sum."""
        return super().forward(x) + (x[:, :0] @ self.nothing).sum()


class Strided(Plain):
    """Has parameters with non-contiguous memory, as after ``.to(memory_format=torch.channels_last)``."""

    def build(self) -> None:
        """Add a channels-last convolution and a transposed matrix."""
        super().build()
        self.convolution = nn.Conv2d(3, 4, kernel_size=2)
        self.convolution.weight.data = self.convolution.weight.data.to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(FEATURES, 5).t() / 3)

    def forward(self, x: Tensor) -> Tensor:
        """Treat the inputs as a small image, and spread the convolution's output."""
        image = x.reshape(len(x), 3, 1, 2).expand(-1, -1, 2, -1)
        pixels = self.convolution(image).flatten(1).mean(1, keepdim=True)
        return super().forward(x + pixels) + torch.tanh(x @ self.turned.t()) @ self.turned


class MixedDtypes(Plain):
    """Has trained parameters of two dtypes."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.head.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the head in float64."""
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.double()).float()  # type: ignore[no-any-return]


class Quantized(Plain):
    """Has frozen int8 and bfloat16 matrices beside a trained layer."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        levels = torch.arange(FEATURES * WIDTH).reshape(WIDTH, FEATURES) % 11 - 5
        self.levels = nn.Parameter(levels.to(torch.int8), requires_grad=False)
        self.halves = nn.Parameter((levels / 7).to(torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the frozen matrices to the embedding's weight."""
        frozen = self.levels.to(x.dtype) / 9 + self.halves.to(x.dtype)
        hidden = self.embed(x) + x @ frozen.t()
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class Large(Plain):
    """Has repeated layers that are large enough for automatic wrapping."""

    width = 136

    def build(self) -> None:
        self.embed = nn.Linear(FEATURES, self.width)
        self.blocks = nn.ModuleList(Block(self.width) for _ in range(BLOCKS))
        self.head = nn.Linear(self.width, FEATURES)


class Tied(Plain):
    """Has two layers that share a weight, each with its own bias."""

    def build(self) -> None:
        """Let `again` share the weight of `embed`."""
        super().build()
        self.again = nn.Linear(FEATURES, WIDTH)
        self.again.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(torch.tanh(self.again(x)))  # type: ignore[no-any-return]


class TiedBlocks(Plain):
    """Has two repeated layers that share a weight."""

    def build(self) -> None:
        super().build()
        first, second = (block.up for block in self.blocks if isinstance(block, Block))
        second.weight = first.weight


class Frozen(Plain):
    """Freezes a layer and half a block, which the optimizer has and decays."""

    def build(self) -> None:
        super().build()
        self.embed.requires_grad_(False)
        self.get_submodule("blocks.0.up").requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), weight_decay=0.1)


class Unused(Plain):
    """Has a layer that no step uses."""

    def build(self) -> None:
        super().build()
        self.spare = nn.Linear(WIDTH, 3)


class Alternating(Plain):
    """Has a layer that only every second step uses."""

    def build(self) -> None:
        super().build()
        self.sometimes = nn.Linear(FEATURES, FEATURES)
        self.odd = False

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.odd = index % 2 == 1
        return super().training_step(batch, index)

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs + self.sometimes(x) if self.odd else outputs


class Reusing(Plain):
    """Applies the same layers twice in a forward."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply every block twice, and the head to its own output."""
        hidden = self.embed(x)
        for block in (*self.blocks, *self.blocks):
            hidden = block(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs + self.head(torch.tanh(self.embed(outputs)))  # type: ignore[no-any-return]


class Nested(Plain):
    """Has nested containers of modules and parameters."""

    def build(self) -> None:
        self.containers = nn.ModuleDict(
            {
                "enter": nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ModuleList([nn.Tanh()])[0]),
                "middle": nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()])}),
            }
        )
        self.weights = nn.ParameterList([torch.randn(WIDTH, FEATURES) / 3, torch.zeros(FEATURES)])
        self.scales = nn.ParameterDict({"inner": torch.ones(WIDTH), "outer": torch.ones(FEATURES)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.containers["enter"](x)
        middle: Any = self.containers["middle"]
        for block in middle["blocks"]:
            hidden = block(hidden * self.scales["inner"])
        matrix, bias = self.weights
        return (hidden @ matrix + bias) * self.scales["outer"]  # type: ignore[no-any-return]


class Convolving(Plain):
    """Has an embedding, a convolution and a group norm."""

    def build(self) -> None:
        self.tokens = nn.Embedding(9, WIDTH, padding_idx=0)
        self.convolution = nn.Conv1d(WIDTH, 2 * WIDTH, kernel_size=3, padding=1)
        self.norm = nn.GroupNorm(4, 2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Round the inputs to nine tokens."""
        tokens = (x.detach() * 2).round().clamp(-4, 4).long() + 4
        hidden = torch.tanh(self.norm(self.convolution(self.tokens(tokens).transpose(1, 2))))
        return self.head(hidden.transpose(1, 2)).squeeze(-1)  # type: ignore[no-any-return]


class Recurrent(Plain):
    """Has a recurrent layer, which keeps a list of its weights beside the parameters."""

    def build(self) -> None:
        self.cells = nn.LSTM(1, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Treat the features as a sequence."""
        hidden, _ = self.cells(x.unsqueeze(-1))
        return self.head(hidden).squeeze(-1)  # type: ignore[no-any-return]


class Attending(Plain):
    """Has a transformer encoder layer, which uses its output projection's weight without calling it."""

    def build(self) -> None:
        self.embed = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Treat the features as a sequence."""
        return self.head(self.layer(self.embed(x.unsqueeze(-1)))).squeeze(-1)  # type: ignore[no-any-return]


class Parametrized(Plain):
    """Has a weight that `torch.nn.utils.parametrizations` computes from two others."""

    def build(self) -> None:
        super().build()
        nn.utils.parametrizations.weight_norm(self.get_submodule("blocks.0.up"))


class Recomputing(Plain):
    """Recomputes its blocks in backward, by user code.

    Their dropout must drop the same elements in the recomputation.

    """

    recompute = True

    def build(self) -> None:
        super().build()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            layer = nn.Sequential(block, self.dropout)
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class StructuredBatches(Plain):
    """Has nested dict batches, a forward with keyword arguments, and a dict as output."""

    def train_dataloader(self) -> DataLoader[Any]:
        """Collate into a nested structure."""
        data = dataset(self.task)
        sampler = ConsecutiveSampler(len(data), **share_of(self.trainer))
        return DataLoader(data, batch_sampler=sampler, collate_fn=_structured)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def dummy_forward_args_fn(self, batch: Any) -> dict[str, Any]:
        """Return arguments for engines that trace the forward."""
        return {"inputs": batch["inputs"], "scale": 2.0}

    def forward(self, *, inputs: Mapping[str, Any], scale: float = 1.0) -> dict[str, Any]:  # type: ignore[override]
        left, right = inputs["halves"]
        outputs = super().forward(torch.cat([left, right], dim=1) * scale)
        return {"outputs": outputs, "slices": (outputs[:, :2], [outputs[:, 2:]])}

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of both outputs."""
        outputs = self(inputs=batch["inputs"], scale=2.0)
        first, (second,) = outputs["slices"]
        return mse_loss(torch.cat([first, second], dim=1), batch["targets"])


def _structured(samples: list[Any]) -> dict[str, Any]:
    inputs, targets = collate(samples)
    return {"inputs": {"halves": (inputs[:, :4], inputs[:, 4:])}, "targets": targets, "note": "as text"}


T = TypeVar("T")


class GenericRoot(Generic[T], Plain):
    """A root whose class has an unusual memory layout."""


class Hooked(Plain):
    """Computes with user hooks on its layers.

    Attributes:
        calls: The number of calls of each hook.

    """

    def build(self) -> None:
        """Register hooks before and after forward, and in backward."""
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


class _Masks(Plain):
    """Draws a dropout mask in every step, with a different seed for each data rank."""

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


class _Keeping(Recomputing):
    recompute = False


def freeze(subject: Subject, task: Task) -> dict[str, Any]:
    """Train and return the state of the frozen parameters."""
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
    """Return by criterion if tied parameters are still one: object, names, state dict."""
    module = Tied(task)
    before = [name for name, _ in module.named_parameters()]
    fit(subject, task, module=module)
    return {
        "one": module.again.weight is module.embed.weight,
        "names": [name for name, _ in module.named_parameters()] == before,
        "both in the state dict": {"again.weight", "embed.weight"} <= set(module.state_dict()),
    }


def fit_hooked(subject: Subject, task: Task) -> Outcome:
    """Train with hooks; return their number of calls in training, and in the plain module afterwards."""
    module = Hooked(task)
    outcome = fit(subject, task, module=module)
    outcome.notes["in training"] = dict(module.calls)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module(torch.ones(2, FEATURES)).sum().backward()
    outcome.notes["in all"] = dict(module.calls)
    return outcome


def draw_masks(subject: Subject, task: Task) -> tuple[int, list[Tensor], list[float]]:
    """Return this rank's share of the data, its masks by step, and its losses."""
    module = _Masks(task)
    fit(subject, task, module=module)
    return module.share, module.masks, module.losses


def fit_recomputing(subject: Subject, task: Task, recompute: bool) -> Outcome:
    """Train with dropout in blocks, with or without recomputation."""
    module = Recomputing(task) if recompute else _Keeping(task)
    torch.manual_seed(31)
    return fit(subject, task, module=module)
