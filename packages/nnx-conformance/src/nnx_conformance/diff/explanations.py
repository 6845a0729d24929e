"""Compute in a float64 run what typical faults would give for one tensor, to compare a faulty run with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from nnx_conformance.diff.job import Job, share_of
from nnx_conformance.diff.recorder import Recorder, tensors_in


class Explainer:
    """Records candidates for a tensor of one step, before the step is computed.

    Gradients: the gradient of each share of the batch, and that of the whole batch at the weights of the step
    before. Outputs of a module: with its weights of the step before, with a transposed weight, in evaluation,
    and the part of a linear layer's output that each slice of its inputs gives.

    Args:
        job: The job, with `explain`.
        trainer: The Trainer of a run in which this rank holds the whole model.
        module: The module.
    """

    def __init__(self, job: Job, trainer: Any, module: Any) -> None:
        assert job.explain is not None
        self._step, self._kind, self._name, self._shares = job.explain
        self._job, self._trainer, self._module = job, trainer, module
        self._before: dict[str, Tensor] = {}

    def before_step(self, recorder: Recorder) -> None:
        """Keep the weights of the step before, or record the candidates."""
        if recorder.step == self._step - 1:
            self._before = {n: p.detach().clone() for n, p in self._module.named_parameters()}
        if recorder.step == self._step:
            for label, tensor in self._candidates():
                recorder.add_whole((self._step, f"candidate:{label}", self._name), tensor)

    def _candidates(self) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(self._module.named_parameters())
        with self._undone():
            if self._kind == "output":
                yield from self._outputs(self._name.partition(" ")[0].partition("[")[0])
            elif self._name in parameters:
                yield from self._gradients(parameters[self._name])

    def _gradients(self, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
        for index in range(self._shares):
            gradient = self._gradient(parameter, index, self._shares)
            if gradient is not None:
                yield f"share {index}", gradient / self._shares
        if self._before:
            with self._weights(self._before):
                gradient = self._gradient(parameter, 0, 1)
            if gradient is not None:
                yield "stale", gradient

    def _gradient(self, parameter: nn.Parameter, index: int, count: int) -> Tensor | None:
        """Return the gradient of one share of the step's batches."""
        found: list[Tensor] = []
        accumulate = self._job.data.accumulate
        for number in range(accumulate):
            with torch.enable_grad():
                loss = self._loss(number, index, count)
                (gradient,) = torch.autograd.grad(loss, [parameter], allow_unused=True)
            if gradient is not None:
                found.append(gradient / accumulate)
        return torch.stack(found).sum(0) if found else None

    def _loss(self, number: int, index: int, count: int) -> Tensor:
        captured = self._job.data
        place = (self._step * captured.accumulate + number) % len(captured.batches)
        batch = share_of(captured.batches[place], index, count)
        trainer, module = self._trainer, self._module
        batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch), module.device)
        with trainer.precision_plugin.train_step_context():
            takes_index = len(inspect.signature(module.training_step).parameters) > 1
            returned = module.training_step(batch, *([0] if takes_index else []))
        loss: Tensor = returned["loss"] if isinstance(returned, Mapping) else returned
        return loss

    def _outputs(self, name: str) -> Iterator[tuple[str, Tensor]]:
        target: nn.Module = self._module.get_submodule(name)
        own = {n: p for n, p in self._before.items() if n.startswith(f"{name}.")}
        if own:
            with self._weights(own):
                yield from self._labelled("stale", target)
        for key, parameter in own.items() if len(own) > 1 else ():
            with self._weights({key: parameter}):
                yield from self._labelled(f"stale {key}", target)
        for key, parameter in list(target.named_parameters(name)):
            if parameter.dim() > 1 and parameter.shape[0] == parameter.shape[1]:
                with self._weights({key: parameter.detach().transpose(0, 1).clone()}):
                    yield from self._labelled("transposed", target)
        target.eval()
        yield from self._labelled("evaluation", target)
        target.train()
        if isinstance(target, nn.Linear) and target.in_features % self._shares == 0:
            width = target.in_features // self._shares
            for index in range(self._shares):
                part = torch.zeros_like(target.weight)
                columns = slice(index * width, (index + 1) * width)
                part[:, columns] = target.weight.detach()[:, columns]
                with self._weights({f"{name}.weight": part}):
                    yield from self._labelled(f"slice {index}", target)

    def _labelled(self, label: str, target: nn.Module) -> Iterator[tuple[str, Tensor]]:
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            seen.extend(tensor.detach() for _, tensor in tensors_in(output))

        hook = target.register_forward_hook(keep)
        with torch.no_grad():
            self._loss(0, 0, 1)
        hook.remove()
        if seen:
            yield label, seen[0]

    @contextmanager
    def _weights(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute with other weights for a while."""
        parameters = dict(self._module.named_parameters())
        kept = {name: parameters[name].detach().clone() for name in values}
        self._write(values)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        parameters = dict(self._module.named_parameters())
        for name, value in values.items():
            parameters[name].copy_(value)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Undo changes of random state and buffers, and log nothing."""
        silent: Callable[..., None] = lambda *args, **kwargs: None  # noqa: E731
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            for method in ("log", "log_dict"):
                stack.enter_context(mock.patch.object(self._module, method, silent))
            yield
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
