"""Run training steps whose backward runs inside the pipeline."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from nnx_core._torch_compat import tree_leaves, tree_map
from nnx_core.errors import UnsupportedError
from nnx_nnscaler.compile.compiler import FixedLayout, ModelCall
from nnx_nnscaler.compile.programs import Programs
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.pipeline.outline import prepare
from nnx_nnscaler.pipeline.program import PipelineForm, PipelineProgram
from nnx_nnscaler.trace.effects import refuse_effects
from nnx_nnscaler.trace.guard import replaced
from nnx_nnscaler.trace.structure import Refusal, is_constant

_UNSEEN = ...
"""Replaces, in the arguments of a program, a value that the step must not read."""


_REDUCTIONS = {getattr(torch, name): name for name in ("mean", "sum", "max", "min")}


# During a trace, calls of ``self.log`` become outputs of the graph. After each run they are repeated with the
# values of the complete batch. A program cannot repeat a read of the Trainer, an append to a list, or a
# print: then the step falls back to eager, and the log says why.


class TrainingStep(nn.Module):
    """A module whose forward is another module's ``training_step``; it is only traced.

    Args:
        module: A LightningModule.
        forwards: The replacements of forwards that it calls.
    """

    def __init__(self, module: nn.Module, forwards: Programs) -> None:
        super().__init__()
        self.module = module
        self._forwards = forwards

    def forward(self, *batch: Any) -> dict[str, Any]:
        """Return the loss, the result of the step, and its logged values."""
        module: Any = self.module
        refuse_effects(self, of=type(module))
        logged: list[dict[str, Any]] = []
        given = tree_map(lambda leaf: _Unseen() if leaf is _UNSEEN else leaf, batch)
        with ExitStack() as stack:
            stack.enter_context(self._forwards.own_forward())
            stack.enter_context(replaced(module, {"log": _recorder(module, logged)}))
            stack.enter_context(replaced(torch.autograd, {"grad": _refusing("takes gradients itself")}))
            stack.enter_context(replaced(builtins, {"print": _refusing("prints")}))
            returned = module.training_step(*given)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor) or loss.ndim:
            raise Refusal("it returns no loss")
        if not all(isinstance(leaf, Tensor) or leaf is None for leaf in tree_leaves(returned)):
            raise Refusal("it returns other results than tensors")
        return {"loss": loss, "returned": returned, "logged": logged}


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise Refusal(f"it {what}")

    return refuse


def _recorder(module: Any, logged: list[dict[str, Any]]) -> Callable[..., None]:
    """Return the replacement of ``self.log`` in a trace."""
    signature = inspect.signature(module.log)
    if not type(module).log.__module__.startswith(("lightning.", "pytorch_lightning.")):
        raise Refusal("it has a `log` of its own")

    def log(*args: Any, **kwargs: Any) -> None:
        options = dict(signature.bind(*args, **kwargs).arguments)
        name, value = options.pop("name"), options.pop("value")
        if not all(isinstance(leaf, (Tensor, torch.SymInt)) for leaf in tree_leaves(value)):
            raise Refusal(f"it logs {name!r}, which is no tensor")
        if "reduce_fx" in options:
            options["reduce_fx"] = _REDUCTIONS.get(options["reduce_fx"], options["reduce_fx"])
        for option, given in options.items():
            if not (is_constant(given) or isinstance(given, torch.SymInt)):
                raise Refusal(f"it logs {name!r} with {option}={given!r}, which a program cannot keep")
        logged.append({"name": name, "value": value, "options": options})

    return log


_refuse_to_look = _refusing("reads its batch index, or a number or text in its batch: these change")


_LOOKS = (
    *("bool", "int", "float", "complex", "index", "str", "repr", "format", "hash", "len", "iter"),
    *("eq", "ne", "lt", "le", "gt", "ge", "contains", "getitem", "getattr", "call"),
    *("neg", "pos", "abs", "invert", "round"),
    *(f"{side}{name}" for side in ("", "r") for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")),
    *(f"{side}{name}" for side in ("", "r") for name in ("divmod", "pow", "and", "or", "xor", "lshift")),
)


_Unseen: Any = type(
    "_Unseen",
    (),
    {f"__{name}__": _refuse_to_look for name in _LOOKS} | {"__class__": property(_refuse_to_look)},
)
"""Replaces a number or a text that changes from step to step, because a program does not change."""


@dataclass(frozen=True)
class StepForm(PipelineForm):
    """Makes pipelines of steps whose microbatches can be interleaved."""

    def plan(self, graph: Graph, layout: FixedLayout | None) -> Any:  # noqa: D102 # as in the base class
        plan = super().plan(graph, layout)
        hindrance = prepare(graph).cut.hindrance
        if hindrance or not plan.loss:
            raise UnsupportedError(
                f"{hindrance or 'its loss is not one number that sums over all samples'}.",
                remedy="Use pipeline_scheduler='gpipe', which computes the loss for the complete batch.",
            )
        return plan


def layout_for(root: TrainingStep, forwards: Programs) -> tuple[str, FixedLayout]:
    """Return the prefix of submodule names in a step, and the layouts of parameters by their names there."""
    prefix = next(name for name, module in root.named_modules() if module is forwards.root)
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    own = dict(forwards.root.named_parameters(remove_duplicate=False))
    renamed = {name: names[id(parameter)] for name, parameter in own.items()}
    layout = forwards.layout
    homes = {renamed[name]: home for name, home in (layout.homes or {}).items()}
    stored = {renamed[name]: placement for name, placement in layout.stored.items()}
    return f"{prefix}.", FixedLayout(stored, frozenset(map(renamed.__getitem__, layout.synchronized)), homes)


class Steps:
    """The programs of a module's ``training_step``.

    Args:
        programs: The programs, whose root is a `TrainingStep`.
    """

    def __init__(self, programs: Programs) -> None:
        self.programs = programs

    def run(self, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a step, by its program if possible, and return its result."""
        root = self.programs.root
        module: Any = root.module
        own = getattr(step, "__func__", None) is getattr(type(module), "training_step", _UNSEEN)
        optimizes = getattr(module, "automatic_optimization", False)
        if not (own and optimizes and torch.is_grad_enabled()):
            return step(*args)
        root.training = module.training
        given = tree_map(lambda leaf: _UNSEEN if _changes(leaf) else leaf, args)
        found = self.programs.run(ModelCall(given, {}), lambda: None)
        if found is None:
            return step(*args)
        for one in found["logged"]:
            module.log(one["name"], one["value"], **one["options"])
        return found["returned"]


def _changes(leaf: Any) -> bool:
    """Return True if an item of a batch is likely to change in the next batch."""
    return isinstance(leaf, (str, int, float, complex)) and not isinstance(leaf, bool)


def goes_in_turns(program: Any) -> bool:
    """Return True if a forward's program leaves interleaving to the step, and the step may be cut."""
    is_left = isinstance(program, PipelineProgram) and program.plan.schedule != "gpipe"
    return is_left and not program.plan.loss and not program.cut.hindrance
