"""Parameters keep their hooks, attributes and assigned data, read as unsharded, and train in rare forms."""

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
from torch.nn.functional import embedding, linear, mse_loss
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

from nnx_conformance.patterns import ManualPattern, UserPattern, shared_job
from nnx_conformance.task import FEATURES, WIDTH, Task
from nnx_core._torch_compat import foreach_mul_

# Hooks, attributes, assigned data, masks and copies of parameters persist.


pattern = shared_job()


@pattern()
class GradientHooks(UserPattern):
    """A `register_hook` hook set on a parameter in `__init__` changes its gradient."""

    def build(self) -> None:
        super().build()
        for layer in (self.head, self.up):
            layer.weight.register_hook(lambda gradient: gradient * 0.1)


@pattern()
class PostAccumulateGradHooks(UserPattern):
    """A `register_post_accumulate_grad_hook` hook set in `__init__` sees the gradient and may scale it."""

    def build(self) -> None:
        super().build()
        for layer in (self.head, self.up):
            layer.weight.register_post_accumulate_grad_hook(_scale)


def _scale(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.1)


@pattern()
class ParameterAttributes(UserPattern):
    """Attributes set on parameters in `__init__` exist in `configure_optimizers` and in hooks."""

    def build(self) -> None:
        """Give each bias its own learning rate."""
        super().build()
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.rate = 0.02  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        """Group the parameters by their learning rate."""
        slow = [p for p in self.parameters() if hasattr(p, "rate")]
        fast = [p for p in self.parameters() if not hasattr(p, "rate")]
        return self.optimizer([{"params": fast}, {"params": slow, "lr": 0.02}])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.observe(sum(getattr(parameter, "rate", 0.0) for parameter in self.parameters()))


class _WithTarget(UserPattern):
    def build(self) -> None:
        """Copy the blocks into a second, frozen model."""
        super().build()
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Add the distance from the target's output to the plain loss."""
        hidden = wanted = self.embed(batch[0])
        for block, target in zip(self.blocks, self.target, strict=True):
            hidden, wanted = block(hidden * 1.1), target(wanted)
        return super().loss(batch) + mse_loss(hidden, wanted.detach())

    def pairs(self) -> Any:
        """Return pairs of a parameter and its target."""
        return zip(self.blocks.parameters(), self.target.parameters(), strict=True)


@pattern()
class TargetNetworkAssigned(_WithTarget):
    """A target network follows by `target.data = ...`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter, target in self.pairs():
            target.data = target.data * 0.5 + parameter.data * 0.5


@pattern()
class TargetNetworkUpdatedInPlace(_WithTarget):
    """A target network follows by in-place updates and by `load_state_dict`."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the target halfway, and once copy all weights."""
        with torch.no_grad():
            for parameter, target in self.pairs():
                target.lerp_(parameter, 0.5)
        if batch_idx == 1:
            self.target.load_state_dict(self.blocks.state_dict())


@pattern()
class WeightDataAssigned(UserPattern):
    """Training continues from data assigned to a trained parameter."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data = parameter.data.clamp(-0.2, 0.2)


@pattern()
class ParametersToVector(UserPattern):
    """`parameters_to_vector` returns all weights, and `vector_to_parameters` sets them."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        vector = parameters_to_vector(self.blocks.parameters()).detach()
        self.observe(vector.norm())
        vector_to_parameters(vector * 0.9, self.blocks.parameters())


@pattern()
class ParametersKeptInList(UserPattern):
    """Parameters kept in a list since `__init__` are the trained ones."""

    def build(self) -> None:
        """Keep two weights in a list, which is no submodule."""
        super().build()
        self.__dict__["listed"] = [self.head.weight, self.up.weight]

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Penalize the listed weights."""
        penalty = torch.stack([weight.pow(2).sum() for weight in self.__dict__["listed"]]).sum()
        return super().loss(batch) + 0.1 * penalty


@pattern()
class WeightsWrittenInHooks(UserPattern):
    """Training continues from weights that hooks write by `copy_`, `clamp_`, an index or `nn.init`."""

    def on_train_start(self) -> None:
        with torch.no_grad():
            self.head.weight.copy_(torch.linspace(-1, 1, FEATURES * WIDTH).view(FEATURES, WIDTH))
            self.head.bias.fill_(0.1)
        nn.init.constant_(self.embed.bias, 0.2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.clamp_(-0.3, 0.3).mul_(0.99)
            self.head.weight[0] = 0
            foreach_mul_([self.embed.weight, self.head.weight], 0.95)


@pattern()
class ReinitializedLayers(UserPattern):
    """Layers reinitialized during training get the values of one process with the same seed."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            torch.manual_seed(5)
            nn.init.xavier_uniform_(self.up.weight)
            self.head.reset_parameters()


@pattern()
class PrunedLayers(UserPattern):
    """Layers pruned by `nn.utils.prune` in `__init__` keep their masks."""

    def build(self) -> None:
        super().build()
        for layer in (self.head, self.up):
            prune.l1_unstructured(layer, "weight", amount=0.3)  # type: ignore[no-untyped-call]


@pattern()
class PrunedWhileTraining(UserPattern):
    """Layers pruned by `nn.utils.prune` between two steps train with their masks from then on."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for layer in (self.head, self.up):
                prune.l1_unstructured(layer, "weight", amount=0.3)  # type: ignore[no-untyped-call]


@pattern(batches=2, steps=5)
class ModelPruningCallback(UserPattern):
    """Lightning's ModelPruning prunes the same weights as in one process."""

    def configure_callbacks(self) -> list[Callback]:
        layers = [(self.head, "weight"), (self.up, "weight")]
        return [ModelPruning("l1_unstructured", parameters_to_prune=layers, amount=0.3)]


@pattern()
class FunctionalCall(UserPattern):
    """`functional_call` computes with the given weights."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Call one layer with constants, and the others with weights as after an inner step."""
        hidden = self.blocks[1](self.embed(batch[0]))
        up = {"weight": torch.full((3 * WIDTH + 1, WIDTH), 0.01), "bias": torch.ones(3 * WIDTH + 1)}
        inner = functional_call(self.up, up, (hidden,)).tanh()
        shifted = functional_call(self.blocks[0], {"up.bias": self.up.bias * 0.5}, (hidden,))
        head = {"weight": self.head.weight * 0.5, "bias": self.head.bias - 0.1}
        return mse_loss(functional_call(self.head, head, (shifted + inner[:, :WIDTH],)), batch[1])


class _LowRank(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(rows, 2)), nn.Parameter(torch.zeros(2, columns))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


@pattern()
class ParametrizationWithParameters(UserPattern):
    """A parametrization of a layer, with parameters of its own, trains as in one process."""

    def build(self) -> None:
        """Parametrize two layers, and freeze one of them otherwise."""
        super().build()
        parametrize.register_parametrization(self.head, "weight", _LowRank(FEATURES, WIDTH))
        parametrize.register_parametrization(self.up, "weight", _LowRank(3 * WIDTH + 1, WIDTH))
        self.up.parametrizations.weight.original.requires_grad_(False)


# User code reads weights in `training_step` and between steps, and differentiates by them.


pattern = shared_job()


@pattern()
class WeightPenalty(UserPattern):
    """A penalty over `self.parameters()` in the loss equals that of one process, and can be logged."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        penalty = torch.stack([parameter.pow(2).sum() for parameter in self.parameters()]).sum()
        self.log("penalty", penalty, sync_dist=True)
        return super().loss(batch) + 0.01 * penalty

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.observe(self.trainer.callback_metrics["penalty"])


@pattern()
class OrthogonalityPenalty(UserPattern):
    """A penalty on the product of a layer's weight with itself equals that of one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        blocks: Any = self.blocks
        weights = [self.up.weight, blocks[1].down.weight, self.head.weight]
        products = [weight @ weight.T - torch.eye(len(weight)) for weight in weights]
        return super().loss(batch) + 0.01 * torch.stack([product.norm() for product in products]).sum()


@pattern()
class WeightAsPythonNumber(UserPattern):
    """`float(w.norm())`, `w.mean().item()` and single elements read in a step are those of one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        factor = float(self.up.weight.norm()) + self.head.weight.abs().mean().item()
        self.observe(factor, self.up.weight[3, 2], self.head.weight.max())
        return super().loss(batch) * factor


@pattern()
class WeightsReadBetweenSteps(UserPattern):
    """Norms, sums, elements and rows that hooks read between steps are those of one process."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.observe(*(float(parameter.norm()) for parameter in self.parameters()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for block in self.blocks:
                weight: Any = block.up.weight  # type: ignore[union-attr]
                self.observe(weight.sum().item(), weight[2].norm(), weight[1, 1], weight.std())
                self.observe(
                    (weight.detach().cpu() ** 2).mean(), len(weight), weight.shape[1], weight.numel()
                )


@pattern()
class WeightsReadOnRankZero(UserPattern):
    """Weights that only rank 0 reads, to print them, are those of one process, and no rank hangs."""

    ranks_differ = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen = [float(self.up.weight.norm()), self.head.weight[1, 2].item()] if self.global_rank == 0 else []
        self.observe(*self.trainer.strategy.broadcast(seen))


@pattern()
class WeightNormsLogged(UserPattern):
    """Norms of weights logged in the step and in hooks are those of one process."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.log("head", self.head.weight.norm(), sync_dist=True)
        return super().training_step(batch, index)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("up", self.up.weight.norm(), on_step=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.observe(self.trainer.callback_metrics["head"], self.trainer.callback_metrics["up"])


@pattern()
class DeepcopiedLayers(UserPattern):
    """A layer that a hook copies keeps the weights of that moment."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Copy after the second batch, and use the copies after the third."""
        if batch_idx == 1:
            self.__dict__["copies"] = (copy.deepcopy(self.blocks[0]), copy.deepcopy(self.state_dict()))
        if batch_idx == 2:
            layer, state = self.__dict__["copies"]
            with torch.no_grad():
                self.observe(layer(torch.ones(1, WIDTH)).norm(), state["head.weight"].norm())


@pattern()
class AutogradGradOfWeight(UserPattern):
    """`autograd.grad(loss, w)` in `training_step` returns this batch's gradient of the full weight."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Use the gradient linearly, so that the mean over the ranks equals one process."""
        loss = super().loss(batch)
        for weight in (self.head.weight, self.up.weight):
            (gradient,) = autograd.grad(loss, weight, retain_graph=True)
            loss = loss + 0.1 * (gradient.detach() * weight).sum()
        return loss


@pattern()
class TorchFuncGrad(UserPattern):
    """`torch.func.grad` of a functional call returns this batch's gradients of all weights."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Use the gradients linearly, so that the mean over the ranks equals one process."""
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


@pattern()
class GradientPenalty(UserPattern):
    """A gradient penalty on the inputs, differentiated twice, equals that of one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Penalize each sample, as for a critic."""
        inputs = batch[0].clone().requires_grad_()
        out = self(inputs)
        (gradient,) = autograd.grad(out.sum(), inputs, create_graph=True)
        penalty: Tensor = (gradient.norm(dim=1) - 1).pow(2).mean()
        return mse_loss(out, batch[1]) + 0.1 * penalty


@pattern()
class LayersCalledRepeatedly(UserPattern):
    """Layers that a step calls several times, with and without gradients, train as in one process."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            far = self(batch[0] * 2)
        near = self(batch[0])
        again = self.head(self.blocks[0](self.embed(batch[0] + 0.1)))
        return mse_loss(near, batch[1]) + 0.1 * mse_loss(again, near) + 0.1 * mse_loss(near, far)


@pattern()
class WeightUsedOutsideItsLayer(UserPattern):
    """Code outside a layer may use the layer's weight."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Use the head's weight transposed, and a block's weight."""
        hidden = self.blocks[1](self.blocks[0](self.embed(batch[0])))
        back = linear(linear(self.head(hidden), self.head.weight.T), self.up.weight, self.up.bias)
        return mse_loss(self.head(hidden), batch[1]) + 0.01 * back.pow(2).mean()


@pattern()
class TwoBackwardPasses(ManualPattern):
    """Two backward passes through one graph, and a third through another, accumulate their gradients."""

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.recorded_loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 0.5)
        self.manual_backward(self(batch[0]).pow(2).mean() * 0.1)
        optimizer.step()


# Rare cases: unusual parameters, freezing mid-run, an overridden backward.


pattern = shared_job()


@pattern(clip=0.05)
class ComplexParameters(UserPattern):
    """Complex parameters train, with clipping by norm, as in one process."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)  # which makes every parameter real
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.fft.irfft(torch.fft.rfft(self.embed(x)) * self.filter, n=WIDTH)
        return self.head(self.blocks[1](self.blocks[0](hidden)))  # type: ignore[no-any-return]


@pattern()
class SparseGradients(UserPattern):
    """Embeddings with `sparse=True` train as in one process."""

    def build(self) -> None:
        super().build()
        self.rows = nn.Embedding(7, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(9, WIDTH, sparse=True, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        """Look up rows by the signs of the features."""
        picks = (x[:, :3] > 0).long() + torch.arange(3) * 2
        hidden = self.embed(x) + self.rows(picks[:, 0]) + self.bags(picks)
        return self.head(self.blocks[1](self.blocks[0](hidden)))  # type: ignore[no-any-return]


@pattern()
class SparseGradientsOfAFunction(SparseGradients):
    """`torch.nn.functional.embedding(..., sparse=True)` trains as in one process."""

    def build(self) -> None:
        super().build()
        self.rows = nn.Embedding(7, WIDTH)
        del self.bags

    def forward(self, x: Tensor) -> Tensor:
        picks = (x[:, 0] > 0).long()
        hidden = self.embed(x) + embedding(picks, self.rows.weight, sparse=True)
        return self.head(self.blocks[1](self.blocks[0](hidden)))  # type: ignore[no-any-return]


@pattern()
class EmptyParameter(UserPattern):
    """A parameter without elements trains, and can be saved."""

    def build(self) -> None:
        """Add an empty parameter and one of a single element."""
        super().build()
        self.nothing, self.scale = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.nothing.sum()

    def configure_optimizers(self) -> Any:
        """Choose an optimizer with state."""
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            folder = self.trainer.strategy.broadcast(tempfile.mkdtemp(prefix="nnx-pattern-"))
            self.trainer.save_checkpoint(f"{folder}/last.ckpt")
            self.trainer.strategy.barrier()
            shutil.rmtree(folder, ignore_errors=True)


@pattern(steps=6)
class FrozenMidRun(UserPattern):
    """Layers frozen after some steps stay unchanged until they are unfrozen."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Freeze a block and the first layer for two steps."""
        if batch_idx in (2, 4):
            self.blocks[0].requires_grad_(batch_idx == 4)
            self.embed.requires_grad_(batch_idx == 4)


@pattern()
class BackwardOverride(UserPattern):
    """Lightning runs the module's own `backward`."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss * 0.5, *args, **kwargs)


@pattern(accumulate=2)
class BackwardOverrideWhileAccumulating(BackwardOverride):
    """Lightning runs the module's own `backward` while gradients accumulate over two batches."""


@pattern()
class SideEffectsRunOnce(UserPattern):
    """Side effects of a step before it calls the model (counters, lists, random draws) happen once."""

    steps_of_all: ClassVar[int] = 0

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        type(self).steps_of_all = 0
        self.count, self.names, self.total = 0, dict.fromkeys(["steps"], 0), torch.zeros(())
        self.generator = torch.Generator().manual_seed(5)
        self.rates = iter([1.0 - 0.05 * step for step in range(100)])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Weight the loss by all side effects."""
        self.count += 1
        self.names["steps"] += 1
        self.total += 1
        type(self).steps_of_all += 1
        noise = torch.rand((), generator=self.generator)
        weight = self.count + self.names["steps"] + self.total + self.steps_of_all
        loss = self.loss([batch[0] * (1 + 0.1 * noise), batch[1]]) * next(self.rates) * weight / 4
        self.record(loss)
        return loss
