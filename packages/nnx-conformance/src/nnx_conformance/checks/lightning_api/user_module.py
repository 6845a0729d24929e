"""The user's module keeps its names, classes and objects, in training and afterwards."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nnx_conformance.check import Bench, check, expect
from nnx_conformance.comparing import TOLERANCE, expect_equal_weights
from nnx_conformance.subject import REFERENCE, Subject
from nnx_conformance.task import WIDTH, Outcome, Plain, Task, dataset
from nnx_conformance.training import fit, make_trainer

_STEPS = 4


@check()
def names_during_training(bench: Bench) -> None:
    """Parameters, buffers, modules and state dict entries keep their names and order, in every hook."""
    for rank, watched in enumerate(bench.run_once(_watched_fit)):
        for moment, seen in watched.during.items():
            _expect_names(seen, watched.before, where=f"rank {rank}, {moment}")


@check()
def names_after_training(bench: Bench) -> None:
    """All names and their order are the same before and after training."""
    for rank, watched in enumerate(bench.run_once(_watched_fit)):
        _expect_names(watched.after, watched.before, where=f"rank {rank}, after training")


@check()
def classes_during_training(bench: Bench) -> None:
    """In training, the module and each submodule are instances of the user's classes."""
    for rank, watched in enumerate(bench.run_once(_watched_fit)):
        for moment, wrong in watched.of_another_class.items():
            expect(not wrong, f"rank {rank}, {moment}: {wrong} are no instances of the user's classes.")


@check()
def submodules_keep_identity(bench: Bench) -> None:
    """Submodules are the user's own objects in every hook, so that references to them stay valid."""
    for rank, watched in enumerate(bench.run_once(_watched_fit)):
        for moment, wrong in watched.other_modules.items():
            expect(not wrong, f"rank {rank}, {moment}: {wrong} are other objects than before training.")


@check()
def parameters_keep_identity(bench: Bench) -> None:
    """A name belongs to one parameter object in every hook, from start to end of training."""
    for rank, watched in enumerate(bench.run_once(_watched_fit)):
        for moment, wrong in watched.other_parameters.items():
            expect(not wrong, f"rank {rank}, {moment}: {wrong} are other objects than when training started.")


@check("submodule_hooks")
def hooks_on_submodules(bench: Bench) -> None:
    """User hooks on submodules, set before training, see each forward and backward once."""
    for rank, calls in enumerate(bench.run(_hooked_fit)):
        for kind, count in calls.items():
            expect(
                count == _STEPS,
                f"rank {rank}: the {kind} hook on blocks.1 was called {count} times in {_STEPS} steps.",
            )


@check(of_adapter=True)
def trainer_returns_user_module(bench: Bench) -> None:
    """`trainer.lightning_module` is the user's module, `trainer.model` contains it, and it has both."""
    for rank, facts in enumerate(bench.run(_who_is_who)):
        for what, is_so in facts.items():
            expect(is_so, f"rank {rank}: {what} does not hold in training.")


def _expect_names(seen: _Names, expected: _Names, *, where: str) -> None:
    for field in fields(expected):
        names, wanted = getattr(seen, field.name), getattr(expected, field.name)
        what = field.name.replace("_", " ")
        extra, missing = [n for n in names if n not in wanted], [n for n in wanted if n not in names]
        expect(
            not extra and not missing, f"{where}: the {what} have {extra}, which is new, and lack {missing}."
        )
        expect(names == wanted, f"{where}: the {what} come in another order: {names}, expected {wanted}.")


# Workers run the functions below.


@dataclass(frozen=True)
class _Names:
    parameters: list[str]
    buffers: list[str]
    modules: list[str]
    state_dict_entries: list[str]


@dataclass(frozen=True)
class _Watched:
    """Observations of a module: names before, by hook, and after; by hook, the names of violations."""

    before: _Names
    during: dict[str, _Names]
    after: _Names
    of_another_class: dict[str, list[str]]
    other_modules: dict[str, list[str]]
    other_parameters: dict[str, list[str]]


def _names(module: nn.Module) -> _Names:
    return _Names(
        [name for name, _ in module.named_parameters()],
        [name for name, _ in module.named_buffers()],
        [name for name, _ in module.named_modules()],
        list(module.state_dict()),
    )


class _Watcher(Plain):
    """Inspects itself in each of its hooks."""

    def build(self) -> None:
        super().build()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.during: dict[str, _Names] = {}
        self.of_another_class: dict[str, list[str]] = {}
        self.other_modules: dict[str, list[str]] = {}
        self.other_parameters: dict[str, list[str]] = {}

    def remember(self) -> None:
        """Remember everything that must persist, hidden from torch's search for submodules."""
        self.own_modules = dict(self.named_modules())
        self.own_classes = {name: type(module) for name, module in self.own_modules.items()}

    def inspect(self, moment: str) -> None:
        now = dict(self.named_modules())
        self.during[moment] = _names(self)
        classes, modules = self.own_classes.items(), self.own_modules.items()
        self.of_another_class[moment] = [n for n, own in classes if n in now and not isinstance(now[n], own)]
        self.other_modules[moment] = [n for n, own in modules if n in now and now[n] is not own]

    def inspect_parameters(self, moment: str) -> None:
        """Check parameters between the steps only: within a step an engine may show gathered parameters."""
        now = dict(self.named_parameters())
        if moment == "on_train_start":
            self.own_parameters = now
        own = self.own_parameters.items()
        self.other_parameters[moment] = [n for n, p in own if n in now and now[n] is not p]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]

    def on_train_start(self) -> None:
        self.inspect("on_train_start")
        self.inspect_parameters("on_train_start")

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.inspect("on_train_batch_start")
        self.inspect_parameters("on_train_batch_start")

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.inspect("training_step")
        return super().training_step(batch, index)

    def on_before_backward(self, loss: Tensor) -> None:
        self.inspect("on_before_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.inspect("on_before_optimizer_step")
        self.inspect_parameters("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.inspect("on_train_batch_end")
        self.inspect_parameters("on_train_batch_end")

    def on_validation_start(self) -> None:
        self.inspect("on_validation_start")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.inspect("validation_step")
        super().validation_step(batch, index)

    def on_validation_end(self) -> None:
        self.inspect("on_validation_end")
        self.inspect_parameters("on_validation_end")

    def on_train_end(self) -> None:
        self.inspect("on_train_end")
        self.inspect_parameters("on_train_end")


def _watched_fit(subject: Subject) -> _Watched:
    task = Task(model=_Watcher, steps=3)
    module = _Watcher(task)
    module.remember()
    before = _names(module)
    make_trainer(subject, task, limit_val_batches=1, val_check_interval=2).fit(module)
    return _Watched(
        before,
        module.during,
        _names(module),
        module.of_another_class,
        module.other_modules,
        module.other_parameters,
    )


def _hooked_fit(subject: Subject) -> dict[str, int]:
    task = Task(steps=_STEPS)
    module = task.module()
    hooked = module.blocks[1]
    calls = {"forward": 0, "forward pre-": 0, "backward": 0}

    def count(kind: str, owner: nn.Module) -> None:
        calls[kind] += owner is hooked

    hooked.register_forward_pre_hook(lambda owner, inputs: count("forward pre-", owner))
    hooked.register_forward_hook(lambda owner, inputs, output: count("forward", owner))
    hooked.register_full_backward_hook(lambda owner, inputs, outputs: count("backward", owner))
    make_trainer(subject, task).fit(module)
    return calls


class _Introducing(Plain):
    facts: dict[str, bool]

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        trainer = self.trainer
        models: Sequence[nn.Module] = list(trainer.model.modules()) if trainer.model is not None else []
        self.facts = {
            "`trainer.lightning_module is module`": trainer.lightning_module is self,
            "`trainer.strategy.lightning_module is module`": trainer.strategy.lightning_module is self,
            "that `trainer.model` is or contains the module": any(model is self for model in models),
            "`module.trainer.training`": trainer.training,
            "`module.training`": self.training,
            "`module.device == trainer.strategy.root_device`": self.device == trainer.strategy.root_device,
        }


def _who_is_who(subject: Subject) -> dict[str, bool]:
    task = Task(model=_Introducing, steps=1)
    module = _Introducing(task)
    trainer = make_trainer(subject, task)
    trainer.fit(module)
    return {
        **module.facts,
        "`trainer.lightning_module is module` after training": trainer.lightning_module is module,
    }


# After training, the user's module is plain, of its own class, and free of leftovers of the engine.


_TASK = Task(steps=2)
_TOLERANCE = TOLERANCE["float32"]


@check()
def classes_after_training(bench: Bench) -> None:
    """After training, the module and each submodule have exactly their original classes."""
    for rank, left in enumerate(bench.run_once(_fit_and_look)):
        expect(not left.classes, f"rank {rank}: training changed the classes of {left.classes}.")


@check()
def plain_parameters_after_training(bench: Bench) -> None:
    """After training, parameters are complete, trainable, plain `nn.Parameter` in host memory."""
    for rank, left in enumerate(bench.run_once(_fit_and_look)):
        expect(not left.parameters, f"rank {rank}: after training {left.parameters}.")


@check()
def no_leftover_attributes(bench: Bench) -> None:
    """After training, the module has no additional attribute, hook or method."""
    usual = bench.alone(_fit_and_look).attributes  # Lightning itself leaves these
    for rank, left in enumerate(bench.run_once(_fit_and_look)):
        new = [name for name in left.attributes if name not in usual]
        expect(not new, f"rank {rank}: training left {new} on the module.")


@check()
def deepcopy_after_training(bench: Bench) -> None:
    """A deep copy of a trained module has its weights, shares no memory and computes the same."""
    alone = bench.train_alone(_TASK)
    for rank, copied in enumerate(bench.run(_fit_and_deepcopy)):
        where = f"rank {rank}, deep copy"
        expect_equal_weights(copied.weights, alone.weights, tolerance=_TOLERANCE, where=where)
        expect(not copied.shared, f"{where}: the copy shares the memory of {copied.shared}.")
        expect(copied.difference == 0, f"{where}: the output differs by {copied.difference:.3g}.")


@check()
def pickle_after_training(bench: Bench) -> None:
    """A trained module can be pickled and unpickled with its weights."""
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
def plain_pytorch_after_training(bench: Bench) -> None:
    """A trained module continues to train in plain PyTorch like any other."""
    alone = bench.alone(_fit_and_step)
    for rank, outcome in enumerate(bench.run(_fit_and_step)):
        where = f"rank {rank}, after a plain step"
        expect_equal_weights(outcome.weights, alone.weights, tolerance=_TOLERANCE, where=where)


# Workers run the functions below.


@dataclass(frozen=True)
class _Left:
    """The differences from the module before training, in words."""

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
    module(_inputs())  # attributes that the first forward leaves are no fault
    classes = {name: type(each) for name, each in module.named_modules()}
    attributes = {name: _attributes(each) for name, each in module.named_modules()}
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
    """Describe how a parameter is not plain; empty if it is."""
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
    """Return the number of hooks of each kind and the attributes of a module.

    A method of its own class, assigned to the object, changes nothing and does not count.

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
