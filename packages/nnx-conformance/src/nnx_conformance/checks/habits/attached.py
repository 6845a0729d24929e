"""What is attached or assigned to parameters stays: hooks, attributes, data, masks, other weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

from nnx_conformance.habits import Habitual, habit
from nnx_conformance.task import FEATURES, WIDTH


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
            torch._foreach_mul_([self.embed.weight, self.head.weight], 0.95)


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
