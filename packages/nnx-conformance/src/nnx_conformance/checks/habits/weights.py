"""Weights that user code reads: in `training_step`, between steps, and to differentiate by them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, autograd, nn
from torch.nn.functional import linear, mse_loss

from nnx_conformance.habits import Habitual, Manual, habit
from nnx_conformance.task import WIDTH


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
