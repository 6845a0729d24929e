"""Jobs of the tests of nnx-deepspeed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from nnx_core.errors import NnxError
from nnx_test_helpers.engine_resume_jobs import Losses, run_and_save
from nnx_test_helpers.training import MODELS, Net, Run, make_trainer, train

SHORT = Run(strategy="nnx_deepspeed_2", steps=2)


class Grouped(Net):
    """Adds a param group after the first step."""

    def on_train_batch_end(self, *_: Any) -> None:
        extra = nn.Parameter(torch.zeros(3))
        self.register_parameter("extra", extra)
        self.trainer.optimizers[0].add_param_group({"params": [extra]})


class Weighted(Net):
    """Calls backward with a gradient of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self._loss(*batch), gradient=torch.ones(()))


class OtherOrder(Net):
    """Calls its blocks in an order of each rank's own."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(self.frozen(x))
        for block in self.blocks if self.global_rank else reversed(self.blocks):
            hidden = block(hidden)
        return self.head(hidden) + self.back(hidden)


def train_in_other_orders(run: Run) -> dict[str, Tensor]:
    """The weights that `OtherOrder` ends with."""
    return train(run, module=OtherOrder(run)).weights


class OtherOrderByHand(Net):
    """Uses the weights of two layers in an order of each rank's own, without calling the layers."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(self.frozen(x))
        for rank in (self.global_rank, 1 - self.global_rank):
            hidden = (hidden * self.blocks[rank].norm.weight).tanh()
        return self.head(hidden)

    def on_train_batch_end(self, *_: Any) -> None:
        raise AssertionError("the optimizer has stepped")


class OtherOrderLater(OtherOrderByHand):
    """The same, when the ranks no longer compare orders before each step."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(self.frozen(x))
        first = self.global_rank if self.trainer.global_step >= 17 else 0
        for layer in (first, 1 - first):
            hidden = (hidden * self.blocks[layer].norm.weight).tanh()
        return self.head(hidden)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Surgeon(Net):
    """Makes its gradients itself, of this rank's samples."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        for parameter, gradient in zip(
            trained, torch.autograd.grad(self._loss(*batch), trained), strict=True
        ):
            parameter.grad = gradient
        self.optimizers().step()


class Forgetful(Net):
    """Drops the optimizer's state after the first step."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.optimizers[0].state.clear()


class Frozen(Net):
    """Freezes a layer after the first step."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.embed.requires_grad_(False)


class Pooled(Net):
    """A module with a layer that no step uses, and one that some steps use; user code looks at gradients.

    Args:
        run: The training settings.
        uses: True for each step that uses the second layer.
    """

    def __init__(self, run: Run, uses: Sequence[bool]) -> None:
        super().__init__(run)
        self.pooler, self.sometimes = nn.Linear(7, 5), nn.Linear(6, 6)
        self.uses = uses
        self.has_gradient: list[bool] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        return super().training_step([self.sometimes(inputs) if self.uses[index] else inputs, targets], index)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.pooler.weight.grad is None
        self.has_gradient.append(self.sometimes.weight.grad is not None)


class Returning(Pooled):
    """Uses a layer again."""

    def __init__(self, run: Run) -> None:
        super().__init__(run, (True, False, True))


def leave_parameters_out(run: Run) -> tuple[list[bool], dict[str, Tensor], list[str]]:
    """Return the steps with a gradient, the final weights, and the parameters with optimizer state."""
    module = Pooled(run, (True, False, run.optimizer == "sgd"))
    trainer = make_trainer(run)
    trainer.fit(module)
    state = trainer.optimizers[0].state
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with_state = [name for name, parameter in module.named_parameters() if state.get(parameter)]
    return module.has_gradient, weights, with_state


def _with(make: Callable[[list[nn.Parameter]], Any]) -> type[Net]:
    class Optimized(Net):
        def configure_optimizers(self) -> Any:
            return make([p for p in self.parameters() if p.requires_grad])

    return Optimized


def _adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([{"params": parameters[:1]}, {"params": parameters[1:]}])


class Doubled(Net):
    """Has one trained layer in float64."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.embed.double()


class ClosureLess(torch.optim.SGD):
    """Its step takes no arguments."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


class StepsByHand(_with(lambda parameters: ClosureLess(parameters, 0.1))):  # type: ignore[misc]
    """Calls backward and the optimizer itself."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(self._loss(*batch))
        self.optimizers().step()


def _configured(config: dict[str, Any], **options: Any) -> Run:
    return replace(SHORT, options={"config": config, **options})


REFUSED: dict[str, tuple[type[Net], Run]] = {
    "lbfgs": (_with(torch.optim.LBFGS), SHORT),
    "adafactor": (_with(torch.optim.Adafactor), SHORT),
    "sparse adam": (_with(torch.optim.SparseAdam), SHORT),
    "adagrad in groups": (_with(_adagrad), SHORT),
    "two optimizers": (Net, replace(SHORT, optimizers=2)),
    "a group added": (Grouped, SHORT),
    "arguments of backward": (Weighted, SHORT),
    "another order": (OtherOrderByHand, SHORT),
    "another order later": (OtherOrderLater, replace(SHORT, steps=19)),
    "another order at the end": (OtherOrderLater, replace(SHORT, steps=18)),
    "frozen in mid-run": (Frozen, SHORT),
    "gradients of its own": (Surgeon, SHORT),
    "state dropped": (Forgetful, SHORT),
    "no closure": (StepsByHand, SHORT),
    "used again": (Returning, replace(SHORT, steps=3)),
    "mixed dtypes": (Doubled, SHORT),
    "64-true": (Net, replace(SHORT, precision="64-true")),
    "untested": (_with(torch.optim.SGD), replace(SHORT, options={"zero_allow_untested_optimizer": False})),
    "forced": (Net, _configured({"zero_force_ds_cpu_optimizer": True}, offload_optimizer=True)),
    "another stage": (Net, _configured({"zero_optimization": {"stage": 3}})),
    "clipping twice": (Net, _configured({"gradient_clipping": 1.0})),
    "misspelt": (Net, _configured({"zero_optimization": {"reduce_bucket_sise": 7}})),
}


def refused(kind: str) -> str:
    """The error that a run ends with, on this rank."""
    model, run = REFUSED[kind]
    try:
        make_trainer(run).fit(model(run))
    except NnxError as error:
        return f"{type(error).__name__}: {error}"
    return "it trained"


class HostAdam(Net):
    """Makes DeepSpeed's Adam once, for all its runs."""

    def configure_optimizers(self) -> Any:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        if not hasattr(self, "_adam"):
            trained = [p for p in self.parameters() if p.requires_grad]
            self._adam = [DeepSpeedCPUAdam(trained, lr=0.02, weight_decay=0.1)]
        return self._adam[0]


def refused_without_a_compiler(extensions: str) -> str:
    """The error that `refused` ends with where no program is on the path and nothing is compiled yet."""
    from deepspeed.ops.op_builder.builder import OpBuilder
    from torch.utils.cpp_extension import JIT_EXTENSION_VERSIONER

    REFUSED["no compiler"] = HostAdam, SHORT
    with (
        mock.patch.dict(os.environ, PATH="", TORCH_EXTENSIONS_DIR=extensions),
        mock.patch.dict(OpBuilder._loaded_ops),
        mock.patch.dict(
            JIT_EXTENSION_VERSIONER.entries
        ),  # or the next build in this process has another name
    ):
        OpBuilder._loaded_ops.pop("cpu_adam", None)
        return refused("no compiler")


class Writing(Callback):
    """Clamps weights after each step, as a critic's are, through ``.data``."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data.clamp_(-0.1, 0.1)


def clamp(run: Run) -> tuple[list[float], float]:
    """Losses, and the largest trained weight at the end, of a run whose weights are clamped."""
    module = Net(run)
    make_trainer(run, callbacks=[Writing()]).fit(module)
    return module.losses, max(p.abs().max().item() for p in module.parameters())


class Masters(Callback):
    """Records the masters before the first step, and the module's parameters at that time."""

    def __init__(self) -> None:
        self.exact = self.rounded = False

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        backend: Any = trainer.strategy.backend
        wanted = dict(Net(module.run).named_parameters())
        state = backend.model_state(module).tensors
        self.exact = all(
            torch.equal(view, wanted[name].detach()[box.slices])
            for name, shard in state.items()
            if name in wanted and wanted[name].requires_grad
            for box, view in zip(shard.boxes, shard.data, strict=True)
        )
        self.rounded = all(p.dtype == torch.bfloat16 for p in module.parameters() if p.requires_grad)


def masters(run: Run) -> tuple[bool, bool]:
    """Return True if the masters begin exact, and True if the module computes in bfloat16."""
    callback = Masters()
    make_trainer(run, callbacks=[callback]).fit(Net(run))
    return callback.exact, callback.rounded


class TorchAdam(Net):
    """The same with torch's."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "_adam"):
            self._adam = [super().configure_optimizers()]
        return self._adam[0]


def train_twice(run: Run, on_the_host: bool) -> list[float]:
    """Losses of two runs with one optimizer."""
    module = (HostAdam if on_the_host else TorchAdam)(run)
    make_trainer(run).fit(module)
    make_trainer(run).fit(module)
    return module.losses


def run_host_adam(run: Run, step: int, path: str) -> Losses:
    """`run_and_save` with DeepSpeed's Adam."""
    MODELS["host adam"] = HostAdam
    return run_and_save(replace(run, model="host adam"), step, path)


def step_after_fit(run: Run) -> list[Tensor]:
    """The weights after one more step by hand with the optimizer of a run, from which the engine is gone."""
    module = TorchAdam(run)
    make_trainer(run).fit(module)
    optimizer = module._adam[0]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]
