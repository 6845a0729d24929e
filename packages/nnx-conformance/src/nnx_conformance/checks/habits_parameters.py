"""Parameters: what is attached to them stays, what is read of them is whole, and rare kinds train."""

from __future__ import annotations

import copy
import shutil
import tempfile
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, autograd, nn
from torch.func import functional_call
from torch.nn.functional import linear, mse_loss
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

from nnx_conformance.habits import Habitual, Manual, chapter
from nnx_conformance.task import FEATURES, WIDTH, Task
from nnx_core._torch_compat import foreach_mul_

# What is attached or assigned to parameters stays: hooks, attributes, data, masks, other weights.


habit = chapter()


@habit()
class GradientHooks(Habitual):
    """`register_hook` on a parameter, made in `__init__`, changes its gradient."""

    def build(self) -> None:
        """A tenth of two gradients."""
        super().build()
        for layer in (self.head, self.up):
            layer.weight.register_hook(lambda gradient: gradient * 0.1)


@habit()
class PostAccumulateHooks(Habitual):
    """`register_post_accumulate_grad_hook`, made in `__init__`, finds the gradient and may scale it."""

    def build(self) -> None:
        """A tenth of two gradients."""
        super().build()
        for layer in (self.head, self.up):
            layer.weight.register_post_accumulate_grad_hook(_scale)


def _scale(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.1)


@habit()
class AttributesOfParameters(Habitual):
    """Attributes set on parameters in `__init__` are there in `configure_optimizers` and in hooks."""

    def build(self) -> None:
        """A rate for each bias."""
        super().build()
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.rate = 0.02  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        """Groups by it."""
        slow = [p for p in self.parameters() if hasattr(p, "rate")]
        fast = [p for p in self.parameters() if not hasattr(p, "rate")]
        return self.optimizer([{"params": fast}, {"params": slow, "lr": 0.02}])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Look at all of them."""
        self.look(sum(getattr(parameter, "rate", 0.0) for parameter in self.parameters()))


class _WithTarget(Habitual):
    def build(self) -> None:
        """A second, frozen model."""
        super().build()
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Near the target's output, and the plain loss."""
        hidden = wanted = self.embed(batch[0])
        for block, target in zip(self.blocks, self.target, strict=True):
            hidden, wanted = block(hidden * 1.1), target(wanted)
        return super().loss(batch) + mse_loss(hidden, wanted.detach())

    def pairs(self) -> Any:
        """Parameters of both."""
        return zip(self.blocks.parameters(), self.target.parameters(), strict=True)


@habit()
class AssignedTargets(_WithTarget):
    """A target network that follows by `target.data = ...` follows."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Halfway."""
        for parameter, target in self.pairs():
            target.data = target.data * 0.5 + parameter.data * 0.5


@habit()
class UpdatedTargets(_WithTarget):
    """A target network that follows in place, and by `load_state_dict`, follows."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Halfway, and once all the way."""
        with torch.no_grad():
            for parameter, target in self.pairs():
                target.lerp_(parameter, 0.5)
        if batch_idx == 1:
            self.target.load_state_dict(self.blocks.state_dict())


@habit()
class AssignedWeights(Habitual):
    """A trained parameter whose `data` is assigned goes on from there."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Clip the weights."""
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


@habit()
class VectorsOfParameters(Habitual):
    """`parameters_to_vector` gives all weights, and `vector_to_parameters` sets them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Shrink the blocks."""
        vector = parameters_to_vector(self.blocks.parameters()).detach()
        self.look(vector.norm())
        vector_to_parameters(vector * 0.9, self.blocks.parameters())


@habit()
class ParametersInAList(Habitual):
    """Parameters that a list made in `__init__` holds are those that are trained."""

    def build(self) -> None:
        """In a list, which is no submodule."""
        super().build()
        self.__dict__["listed"] = [self.head.weight, self.up.weight]

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Penalize them."""
        penalty = torch.stack([weight.pow(2).sum() for weight in self.__dict__["listed"]]).sum()
        return super().loss(batch) + 0.1 * penalty


@habit()
class WrittenWeights(Habitual):
    """Weights written by `copy_`, `fill_`, `clamp_`, an index and `nn.init` in hooks are trained on."""

    def on_train_start(self) -> None:
        """Values of our own."""
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, FEATURES * WIDTH).view(FEATURES, WIDTH))
            self.head.bias.fill_(0.1)
        nn.init.constant_(self.embed.bias, 0.2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Smaller ones."""
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.clamp_(-0.3, 0.3).mul_(0.99)
            self.head.weight[0] = 0
            foreach_mul_([self.embed.weight, self.head.weight], 0.95)


@habit()
class ReinitializedLayers(Habitual):
    """Layers that are drawn anew while training get the values of one process from one seed."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Once."""
        if batch_idx == 1:
            torch.manual_seed(5)
            nn.init.xavier_uniform_(self.up.weight)
            self.head.reset_parameters()


@habit()
class PrunedLayers(Habitual):
    """Layers pruned by `nn.utils.prune` when the model was built keep their masks."""

    def build(self) -> None:
        """Three tenths of two layers."""
        super().build()
        for layer in (self.head, self.up):
            prune.l1_unstructured(layer, "weight", amount=0.3)  # type: ignore[no-untyped-call]


@habit()
class PrunedWhileTraining(Habitual):
    """Layers pruned by `nn.utils.prune` between two steps train with their masks from then on."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Three tenths of two layers."""
        if batch_idx == 1:
            for layer in (self.head, self.up):
                prune.l1_unstructured(layer, "weight", amount=0.3)  # type: ignore[no-untyped-call]


@habit(batches=2, steps=5)
class PrunedByLightning(Habitual):
    """Lightning's ModelPruning prunes the weights of one process."""

    def configure_callbacks(self) -> list[Callback]:
        """Two layers, for good."""
        layers = [(self.head, "weight"), (self.up, "weight")]
        return [ModelPruning("l1_unstructured", parameters_to_prune=layers, amount=0.3)]


@habit()
class FunctionalCall(Habitual):
    """`functional_call` computes with the weights that it is given."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Constants in one layer; in the others what a step of the inner loop would leave."""
        hidden = self.blocks[1](self.embed(batch[0]))
        up = {"weight": torch.full((3 * WIDTH + 1, WIDTH), 0.01), "bias": torch.ones(3 * WIDTH + 1)}
        inner = functional_call(self.up, up, (hidden,)).tanh()
        whole = functional_call(self.blocks[0], {"up.bias": self.up.bias * 0.5}, (hidden,))
        head = {"weight": self.head.weight * 0.5, "bias": self.head.bias - 0.1}
        return mse_loss(functional_call(self.head, head, (whole + inner[:, :WIDTH],)), batch[1])


class _LowRank(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(rows, 2)), nn.Parameter(torch.zeros(2, columns))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


@habit()
class Parametrized(Habitual):
    """A parametrization of a layer, with parameters of its own, trains as in one process."""

    def build(self) -> None:
        """Of two layers, of which one is frozen otherwise."""
        super().build()
        parametrize.register_parametrization(self.head, "weight", _LowRank(FEATURES, WIDTH))
        parametrize.register_parametrization(self.up, "weight", _LowRank(3 * WIDTH + 1, WIDTH))
        self.up.parametrizations.weight.original.requires_grad_(False)


# Weights that user code reads: in `training_step`, between steps, and to differentiate by them.


habit = chapter()


@habit()
class WeightPenalty(Habitual):
    """A penalty over `self.parameters()` in the loss is that of one process, and can be logged."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """All squares."""
        penalty = torch.stack([parameter.pow(2).sum() for parameter in self.parameters()]).sum()
        self.log("penalty", penalty, sync_dist=True)
        return super().loss(batch) + 0.01 * penalty

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What was logged."""
        self.look(self.trainer.callback_metrics["penalty"])


@habit()
class OrthogonalityPenalty(Habitual):
    """A penalty on the product of a layer's weight with itself is that of one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """For three layers."""
        blocks: Any = self.blocks
        weights = [self.up.weight, blocks[1].down.weight, self.head.weight]
        products = [weight @ weight.T - torch.eye(len(weight)) for weight in weights]
        return super().loss(batch) + 0.01 * torch.stack([product.norm() for product in products]).sum()


@habit()
class WeightAsANumber(Habitual):
    """`float(w.norm())`, `w.mean().item()` and single elements in a step are those of one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """As factors."""
        factor = float(self.up.weight.norm()) + self.head.weight.abs().mean().item()
        self.look(factor, self.up.weight[3, 2], self.head.weight.max())
        return super().loss(batch) * factor


@habit()
class WeightsReadBetweenSteps(Habitual):
    """Norms, sums, elements and rows that hooks read between steps are those of one process."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Before a step."""
        self.look(*(float(parameter.norm()) for parameter in self.parameters()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After it."""
        with torch.no_grad():
            for block in self.blocks:
                weight: Any = block.up.weight  # type: ignore[union-attr]
                self.look(weight.sum().item(), weight[2].norm(), weight[1, 1], weight.std())
                self.look((weight.detach().cpu() ** 2).mean(), len(weight), weight.shape[1], weight.numel())


@habit()
class WeightsReadOnRankZero(Habitual):
    """Weights that only rank 0 reads, to print them, are those of one process, and no rank waits."""

    ranks_differ = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A norm and an element."""
        seen = [float(self.up.weight.norm()), self.head.weight[1, 2].item()] if self.global_rank == 0 else []
        self.look(*self.trainer.strategy.broadcast(seen))


@habit()
class LoggedWeights(Habitual):
    """Norms of weights can be logged in the step and in hooks, and are those of one process."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """In the step."""
        self.log("head", self.head.weight.norm(), sync_dist=True)
        return super().training_step(batch, index)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """In a hook."""
        self.log("up", self.up.weight.norm(), on_step=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What was logged."""
        self.look(self.trainer.callback_metrics["head"], self.trainer.callback_metrics["up"])


@habit()
class CopiedLayers(Habitual):
    """A layer that a hook copies keeps the weights of that moment."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """After the second batch, and use it after the third."""
        if batch_idx == 1:
            self.__dict__["copies"] = (copy.deepcopy(self.blocks[0]), copy.deepcopy(self.state_dict()))
        if batch_idx == 2:
            layer, state = self.__dict__["copies"]
            with torch.no_grad():
                self.look(layer(torch.ones(1, WIDTH)).norm(), state["head.weight"].norm())


@habit()
class GradientOfAWeight(Habitual):
    """`autograd.grad(loss, w)` in `training_step` gives this batch's gradient of the whole weight."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Use it, in a way whose mean over the ranks is that of one process."""
        loss = super().loss(batch)
        for weight in (self.head.weight, self.up.weight):
            (gradient,) = autograd.grad(loss, weight, retain_graph=True)
            loss = loss + 0.1 * (gradient.detach() * weight).sum()
        return loss


@habit()
class FunctionalGradients(Habitual):
    """`torch.func.grad` of a functional call gives this batch's gradients of all weights."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Use them, in a way whose mean over the ranks is that of one process."""
        layers = nn.ModuleList([self.embed, self.blocks[0], self.head])
        weights = {name: value.detach() for name, value in layers.named_parameters()}

        def of_weights(given: dict[str, Tensor]) -> Tensor:
            hidden = batch[0]
            for number, layer in enumerate(layers):
                own = {k.partition(".")[2]: v for k, v in given.items() if k.startswith(f"{number}.")}
                hidden = torch.func.functional_call(layer, own, (hidden,))
            return mse_loss(hidden, batch[1])

        gradients = torch.func.grad(of_weights)(weights)
        products = [(gradients[name] * value).sum() for name, value in layers.named_parameters()]
        return super().loss(batch) + 0.1 * torch.stack(products).sum()


@habit()
class GradientPenalty(Habitual):
    """A penalty on the gradient of the inputs, differentiated a second time, is that of one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Each sample's, as for a critic."""
        inputs = batch[0].clone().requires_grad_()
        out = self(inputs)
        (gradient,) = autograd.grad(out.sum(), inputs, create_graph=True)
        penalty: Tensor = (gradient.norm(dim=1) - 1).pow(2).mean()
        return mse_loss(out, batch[1]) + 0.1 * penalty


@habit()
class LayersCalledOften(Habitual):
    """Layers that a step calls several times, with and without gradients, train as in one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Three calls of each."""
        with torch.no_grad():
            far = self(batch[0] * 2)
        near = self(batch[0])
        again = self.head(self.blocks[0](self.embed(batch[0] + 0.1)))
        return mse_loss(near, batch[1]) + 0.1 * mse_loss(again, near) + 0.1 * mse_loss(near, far)


@habit()
class WeightUsedElsewhere(Habitual):
    """A layer's weight may be used by other code than the layer."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """The head's, backwards, and a block's."""
        hidden = self.blocks[1](self.blocks[0](self.embed(batch[0])))
        back = linear(linear(self.head(hidden), self.head.weight.T), self.up.weight, self.up.bias)
        return mse_loss(self.head(hidden), batch[1]) + 0.01 * back.pow(2).mean()


@habit()
class TwoBackwardPasses(Manual):
    """Two backward passes through one graph, and a third through another, add their gradients up."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        """By hand."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.recorded_loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.5)
        self.manual_backward(self(batch[0]).pow(2).mean() * 0.1)
        optimizer.step()


# What is rare: parameters of unusual kinds, freezing in mid-run, a backward of the module's own.


habit = chapter()


@habit(clip=0.05)
class ComplexParameters(Habitual):
    """Complex parameters train, with clipping by norm, as in one process."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)  # which makes every parameter real
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Filtered."""
        hidden = torch.fft.irfft(torch.fft.rfft(self.embed(x)) * self.filter, n=WIDTH)
        return self.head(self.blocks[1](self.blocks[0](hidden)))  # type: ignore[no-any-return]


@habit()
class SparseGradients(Habitual):
    """Embeddings with `sparse=True` train as in one process."""

    def build(self) -> None:
        """Two kinds."""
        super().build()
        self.rows = nn.Embedding(7, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(9, WIDTH, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        """Rows by the signs of the features."""
        picks = (x[:, :3] > 0).long() + torch.arange(3) * 2
        hidden = self.embed(x) + self.rows(picks[:, 0]) + self.bags(picks)
        return self.head(self.blocks[1](self.blocks[0](hidden)))  # type: ignore[no-any-return]


@habit()
class ParameterWithoutElements(Habitual):
    """A parameter without elements trains, and can be saved."""

    def build(self) -> None:
        """And one of a single element."""
        super().build()
        self.nothing, self.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        """Use both."""
        return super().forward(x) * self.scale + self.nothing.sum()

    def configure_optimizers(self) -> Any:
        """With state."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save once."""
        if batch_idx == 2:
            folder = self.trainer.strategy.broadcast(tempfile.mkdtemp(prefix="nnx-habit-"))
            self.trainer.save_checkpoint(f"{folder}/last.ckpt")
            self.trainer.strategy.barrier()
            shutil.rmtree(folder, ignore_errors=True)


@habit(steps=6)
class FrozenInMidRun(Habitual):
    """Layers that are frozen after some steps stay as they are, until they are unfrozen."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Two steps without a block and the first layer."""
        if batch_idx in (2, 4):
            self.blocks[0].requires_grad_(batch_idx == 4)
            self.embed.requires_grad_(batch_idx == 4)


@habit()
class OwnBackward(Habitual):
    """A `backward` that the module overrides is what is run."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Half of the loss."""
        super().backward(loss * 0.5, *args, **kwargs)


@habit(accumulate=2)
class OwnBackwardWhileAccumulating(OwnBackward):
    """It is so where gradients accumulate over two batches."""


@habit()
class CountedSteps(Habitual):
    """What a step counts, collects and draws before it calls the model is counted once."""

    steps_of_all: ClassVar[int] = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        type(self).steps_of_all = 0
        self.count, self.names, self.total = 0, dict.fromkeys(["steps"], 0), torch.zeros(())
        self.generator = torch.Generator().manual_seed(5)
        self.rates = iter([1.0 - 0.05 * step for step in range(100)])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Weighted by all of that."""
        self.count += 1
        self.names["steps"] += 1
        self.total += 1
        type(self).steps_of_all += 1
        noise = torch.rand((), generator=self.generator)
        weight = self.count + self.names["steps"] + self.total + self.steps_of_all
        loss = self.loss([batch[0] * (1 + 0.1 * noise), batch[1]]) * next(self.rates) * weight / 4
        self.record(loss)
        return loss
