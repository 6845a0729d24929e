"""Example inputs of a module's forward, for engines that trace it; computed on request.

If the module declares none, its first step runs ahead of training up to the first call of the model, and its
side effects are undone. Tracing at the first real call of `forward` is too late for nnscaler:

- Pipelines run generated code in place of the step, and plan rank and stage of each parameter before it.
- The sanity check calls `forward` first, with a validation batch in evaluation mode.
- Modules on the meta device are materialized parameter by parameter, by their layout.
- Resume fills weights into the layout in `setup`, and the saved optimizer state after it.
- `configure_optimizers` follows the layout, which decides owner ranks and FP32 master weights.
- A step may use parameters before it calls the model; its autograd graph would hold the unsharded tensors.
- Compilation is collective, and a step may call the model on some ranks only.

These reasons follow from the code of `setup`, `make_programs` and `LaidOut`; the alternative was not tried.
colossalai plans in `setup` with measured activations, see `nnx_colossalai.plan.kept`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nnx_core.backend import Call
from nnx_core.errors import UnsupportedError
from nnx_core.lightning.compat import running_stage_loader, running_stage_source
from nnx_core.random_state import host_state_kept
from nnx_core.view.side_effects import IteratorAdvancedError, PythonState, has_values
from nnx_core.view.torch_functions import Sees, what_it_sees

__all__ = ["TrainerSample", "example_inputs"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_STEPS = {
    "fit": ("training_step", "train_step_context"),
    "validate": ("validation_step", "val_step_context"),
    "test": ("test_step", "test_step_context"),
    "predict": ("predict_step", "predict_step_context"),
}
"""The name of each step, and of its context in the precision plugin."""


def example_inputs(module: nn.Module) -> Inputs:
    """Return the example inputs that a module declares: ``dummy_forward_args`` or ``example_input_array``.

    Returns:
        Positional and keyword arguments.

    Raises:
        UnsupportedError: The module has neither.
    """
    inputs = _declared(module)
    if inputs is None:
        raise UnsupportedError(
            f"{type(module).__name__} has no example inputs to trace its forward with.",
            remedy="Set `self.example_input_array`, or a dict `dummy_forward_args`, in its `__init__`.",
        )
    return inputs


class TrainerSample:
    """The example inputs that the module declares, or the first batch of the running stage's loader.

    A call returns inputs of the module's forward: the declared ones, the keyword arguments that
    ``dummy_forward_args_fn(batch)`` returns, or the batch itself. The random state does not change.

    Args:
        trainer: The Trainer, whose running stage selects the loader and the step.
        module: The LightningModule.
    """

    def __init__(self, trainer: Any, module: nn.Module) -> None:
        self._trainer = trainer
        self._module = module

    def __call__(self) -> Inputs:
        """Return inputs of the module's forward.

        Raises:
            UnsupportedError: There are neither declared inputs nor a batch.
        """
        declared = _declared(self._module)
        if declared is not None:
            converted: Inputs = self._converted(declared)
            return converted
        with self._looking_ahead():
            return self._of_batch(self._first_batch())

    def first_batch(self) -> Any:
        """Return the first batch of the running stage's loader, which starts again afterwards."""
        with self._looking_ahead():
            return self._first_batch()

    def first_call(self) -> Call:
        """Return the first call of the model in the running stage's step; declared inputs take precedence.

        Raises:
            UnsupportedError: There are neither declared inputs nor a batch.
        """
        module, declared = self._module, _declared(self._module)
        if declared is not None:
            return Call(module, *self._converted(declared))
        with self._looking_ahead() as state:
            batch = self._first_batch()
            if callable(getattr(module, "dummy_forward_args_fn", None)):
                return Call(module, *self._of_batch(batch))
            step, context = _STEPS[self._trainer.state.fn.value]
            with getattr(self._trainer.precision_plugin, context)():  # as when Trainer calls it
                found = _watch(module, getattr(module, step), batch, state.tensors)
            return found or Call(module, *self._of_batch(batch))

    @contextmanager
    def _looking_ahead(self) -> Iterator[PythonState]:
        """Run user code ahead, and undo its side effects: random numbers, counters, collections."""
        source = running_stage_source(self._trainer).instance
        roots = self._module, source, getattr(self._trainer, "datamodule", None)
        state = PythonState(*roots, looks_into=_has_values_or_data)
        with host_state_kept():
            try:
                yield state
            finally:
                advanced = state.advanced()
                state.restore()
        if advanced:
            raise IteratorAdvancedError(
                f"the first step ran ahead to record the inputs of the model, and advanced {advanced[0]!r}, "
                "a generator that cannot be rewound.",
                remedy="Set `self.example_input_array`, or use an iterator over a list in its place.",
            )

    def _first_batch(self) -> Any:
        batch = next(iter(running_stage_loader(self._trainer)), None)
        if batch is None:
            example_inputs(self._module)  # raises the error for missing inputs
        return self._trainer.strategy.batch_to_device(self._converted(batch))

    def _converted(self, inputs: Any) -> Any:
        """Convert inputs to the precision of the steps."""
        return self._trainer.precision_plugin.convert_input(inputs)

    def _of_batch(self, batch: Any) -> Inputs:
        convert = getattr(self._module, "dummy_forward_args_fn", None)
        return ((), dict(convert(batch))) if callable(convert) else ((batch,), {})


def _has_values_or_data(module: str) -> bool:
    return has_values(module) or module.startswith("torch.utils.data.")


def _declared(module: nn.Module) -> Inputs | None:
    keywords = getattr(module, "dummy_forward_args", None)
    if isinstance(keywords, dict):
        return (), keywords
    example: Any = getattr(module, "example_input_array", None)
    if example is None:
        return None
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


class _Reached(BaseException):
    """Leaves a step at its first call of the model; a BaseException, so that user code does not catch it."""

    def __init__(self, call: Call) -> None:
        self.call = call


def _watch(module: nn.Module, step: Any, batch: Any, others: Sequence[Tensor]) -> Call | None:
    """Run a step up to its call of the model. Return None if it fails before, or has no such call."""
    try:
        with torch.no_grad(), _leaving_at_the_model(module), _NothingWritten(module, others):
            step(batch, 0)
    except _Reached as reached:
        return reached.call
    except Exception:  # it may need a running loop; the real step raises real errors
        return None
    return None


class _NothingWritten(TorchFunctionMode):
    """Skips torch functions that write into the module's tensors, because the real step will run them.

    Args:
        module: The module.
        others: Further tensors.
    """

    def __init__(self, module: nn.Module, others: Sequence[Tensor]) -> None:
        super().__init__()
        tensors = (*module.parameters(), *module.buffers(), *others)
        strided = (tensor for tensor in tensors if tensor.layout == torch.strided)
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in strided}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("out", args[0] if args and _writes(func) else None)
        tensors = target if isinstance(target, (list, tuple)) else [target]
        if any(isinstance(tensor, Tensor) and self._is_of_module(tensor) for tensor in tensors):
            return target
        return func(*args, **kwargs)

    def _is_of_module(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self._storages


def _writes(func: Any) -> bool:
    if getattr(func, "__name__", "").startswith("_foreach_"):
        return bool(func.__name__.endswith("_"))
    return what_it_sees(func) in (Sees.IN_PLACE, Sees.ASSIGNS, Sees.ASSIGNS_GRADIENT)


@contextmanager
def _leaving_at_the_model(module: nn.Module) -> Iterator[None]:
    def reach(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        raise _Reached(Call(called, args, kwargs))

    def forward(*args: Any, **kwargs: Any) -> NoReturn:
        reach(module, args, kwargs)

    inner = [each for each in module.modules() if each is not module and any(True for _ in each.parameters())]
    hooks = [each.register_forward_pre_hook(reach, with_kwargs=True, prepend=True) for each in inner]
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = forward  # also reached by `self.forward(x)`, which runs no hooks
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.__dict__["forward"] = own
        for hook in hooks:
            hook.remove()
