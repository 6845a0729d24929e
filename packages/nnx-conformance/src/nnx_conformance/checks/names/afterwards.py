"""The user's module after training: plain, its own class, and free of whatever the engine put on it."""

from __future__ import annotations

import copy
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nnx_conformance.check import TOLERANCE, Bench, check, expect, expect_equal_weights
from nnx_conformance.subject import REFERENCE, Subject
from nnx_conformance.task import Outcome, Plain, Task, dataset
from nnx_conformance.training import fit

_TASK = Task(steps=2)
_TOLERANCE = TOLERANCE["float32"]


@check()
def classes_after_training(bench: Bench) -> None:
    """When training has ended the module and each submodule have exactly the classes that they had."""
    for rank, left in enumerate(bench.run_once(_fit_and_look)):
        expect(not left.classes, f"rank {rank}: after training other classes than before: {left.classes}.")


@check()
def plain_parameters_after_training(bench: Bench) -> None:
    """When training has ended parameters are complete, plain `nn.Parameter` in host memory that can train."""
    for rank, left in enumerate(bench.run_once(_fit_and_look)):
        expect(not left.parameters, f"rank {rank}: after training {left.parameters}.")


@check()
def nothing_left_on_the_module(bench: Bench) -> None:
    """When training has ended no attribute, hook or method is on the module that was not there before."""
    usual = bench.alone(_fit_and_look).attributes  # what Lightning itself leaves
    for rank, left in enumerate(bench.run_once(_fit_and_look)):
        new = [name for name in left.attributes if name not in usual]
        expect(not new, f"rank {rank}: left on the module after training: {new}.")


@check()
def deepcopy_after_training(bench: Bench) -> None:
    """A trained module can be deep-copied; the copy has its weights, shares none and computes the same."""
    alone = bench.train_alone(_TASK)
    for rank, copied in enumerate(bench.run(_fit_and_deepcopy)):
        where = f"rank {rank}, deep copy"
        expect_equal_weights(copied.weights, alone.weights, tolerance=_TOLERANCE, where=where)
        expect(not copied.shared, f"{where}: it shares the memory of {copied.shared}.")
        expect(copied.difference == 0, f"{where}: its output differs by {copied.difference:.3g}.")


@check()
def pickle_after_training(bench: Bench) -> None:
    """A trained module can be pickled and comes back with its weights."""
    alone = bench.train_alone(_TASK)
    for rank, weights in enumerate(bench.run(_fit_and_pickle)):
        where = f"rank {rank}, unpickled"
        expect_equal_weights(weights, alone.weights, tolerance=_TOLERANCE, where=where)


@check()
def state_dict_after_training(bench: Bench) -> None:
    """`torch.save(module.state_dict())` after training loads in a plain process, with `weights_only=True`."""
    alone = bench.train_alone(_TASK)
    folder = str(bench.directory)
    ranks = len(bench.run(_fit_and_save, folder))
    for rank, weights in enumerate(
        bench.run(_load_plainly, folder, ranks, world_size=1, subject=REFERENCE)[0]
    ):
        where = f"rank {rank}'s file, loaded by a plain process"
        expect_equal_weights(weights, alone.weights, tolerance=_TOLERANCE, where=where)


@check()
def module_after_training_trains_plainly(bench: Bench) -> None:
    """A module that the strategy has trained goes on training in plain PyTorch like any other."""
    alone = bench.alone(_fit_and_step)
    for rank, outcome in enumerate(bench.run(_fit_and_step)):
        where = f"rank {rank}, after a plain step"
        expect_equal_weights(outcome.weights, alone.weights, tolerance=_TOLERANCE, where=where)


# ---- what follows runs in the workers ----------------------------------------------------------------


@dataclass(frozen=True)
class _Left:
    """What is not as before training, in words."""

    classes: list[str]
    parameters: list[str]
    attributes: list[str]


@dataclass(frozen=True)
class _Copied:
    weights: dict[str, Tensor]
    shared: list[str]
    difference: float


def _fit_and_look(subject: Subject) -> _Left:
    module = _TASK.module()
    module(_inputs())  # whatever the first forward leaves on a module is no fault
    classes = {name: type(part) for name, part in module.named_modules()}
    attributes = {name: _attributes(part) for name, part in module.named_modules()}
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    fit(subject, _TASK, module=module)
    now = dict(module.named_modules())
    return _Left(
        [
            f"{name or 'the module'}: {type(now[name])}"
            for name, own in classes.items()
            if type(now[name]) is not own
        ],
        [
            f"{name} is {wrong}"
            for name, parameter in module.named_parameters()
            if (wrong := _not_plain(parameter, shapes[name]))
        ],
        [
            f"{name + '.' if name else ''}{attribute}"
            for name, before in attributes.items()
            for attribute in sorted(_attributes(now[name]) - before)
        ],
    )


def _not_plain(parameter: nn.Parameter, shape: torch.Size) -> str:
    """What is not plain about a parameter, if anything."""
    if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        return f"a {type(parameter.data).__name__}"
    if parameter.shape != shape:
        return f"of shape {tuple(parameter.shape)} instead of {tuple(shape)}"
    if parameter.device.type != "cpu":
        return f"on {parameter.device}"
    if not (parameter.requires_grad and parameter.is_leaf):
        return "not trainable"
    return ""


def _attributes(module: nn.Module) -> set[str]:
    """What hangs on a module: the number of hooks of each kind, and attributes.

    A method of its own class, put onto the object, changes nothing and does not count.
    """
    own = {name for name, value in vars(module).items() if callable(value) and value == _method(module, name)}
    hooks = {
        f"{kind}: {len(registered)}"
        for kind, registered in vars(module).items()
        if kind.endswith("_hooks") and isinstance(registered, dict)
    }
    return (set(vars(module)) - own) | hooks


def _method(module: nn.Module, name: str) -> Any:
    function = getattr(type(module), name, None)
    return MethodType(function, module) if isinstance(function, FunctionType) else None


def _fit_and_deepcopy(subject: Subject) -> _Copied:
    module = _TASK.module()
    fit(subject, _TASK, module=module)
    copied = copy.deepcopy(module)
    originals = module.state_dict()
    return _Copied(
        copied.state_dict(),
        [n for n, value in copied.state_dict().items() if value.data_ptr() == originals[n].data_ptr()],
        float((copied(_inputs()) - module(_inputs())).abs().max()),
    )


def _fit_and_pickle(subject: Subject) -> dict[str, Tensor]:
    module = _TASK.module()
    fit(subject, _TASK, module=module)
    unpickled: Plain = pickle.loads(pickle.dumps(module))
    return unpickled.state_dict()


def _fit_and_save(subject: Subject, folder: str) -> None:
    module = _TASK.module()
    fit(subject, _TASK, module=module)
    torch.save(module.state_dict(), Path(folder) / f"{os.environ['RANK']}.pt")


def _load_plainly(_: Subject, folder: str, files: int) -> list[dict[str, Tensor]]:
    loaded = []
    for rank in range(files):
        module = Task(seed=8).module()
        module.load_state_dict(torch.load(Path(folder) / f"{rank}.pt", weights_only=True))
        loaded.append(module.state_dict())
    return loaded


def _fit_and_step(subject: Subject) -> Outcome:
    module = _TASK.module()
    outcome = fit(subject, _TASK, module=module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.zero_grad()
    module(_inputs()).square().mean().backward()
    optimizer.step()
    outcome.weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return outcome


def _inputs() -> Tensor:
    inputs: Tensor = dataset(_TASK).tensors[0][:4]
    return inputs
