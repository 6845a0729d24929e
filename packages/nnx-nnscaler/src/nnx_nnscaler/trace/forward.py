"""`trace_forward`: trace a module on a sample to a `Graph`; untraceable submodules fall back to eager."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nnx_core._torch_compat import FakeTensor, FakeTensorMode, pytree
from nnx_nnscaler.ir.graph import Graph
from nnx_nnscaler.trace.build import UntraceableError, build_graph
from nnx_nnscaler.trace.effects import refuse_generators
from nnx_nnscaler.trace.export import (
    Recorded,
    Result,
    SideEffectError,
    calls_replaced,
    combine,
    export_forward,
    forget_calls,
    recorder,
)
from nnx_nnscaler.trace.guard import CommunicationError, hooks_of_the_user, running
from nnx_nnscaler.trace.structure import BatchDims, Blame, Inputs, Refusal, TraceError, blame, flatten_inputs

_REMEDY = (
    "Move that code into a submodule of its own, which then falls back to eager, or write it without the "
    "dependence (torch.where instead of a branch). Until then the forward runs in eager mode on every rank."
)
_STRICT_REMEDY = "Compute it elsewhere: in another hook, or after the step."
_lock = threading.Lock()


def trace_forward(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dims: BatchDims = "auto",
    forward: Callable[..., Any] | None = None,
    device: torch.device | None = None,
    strict: bool = False,
) -> Graph:
    """Trace a module's forward in its present mode: train or eval, with gradients or without.

    The trace changes nothing: it restores parameters, buffers, attributes and random states, and calls no
    hook. A forward that cannot be traced raises an error. Under autocast the trace follows the code that
    autocast runs, without its casts. A trace starts no collective, because the other ranks would not answer.

    Args:
        module: The root, on any device including meta. Its parameters may be sharded. Sharded parameters, and
            those on other devices than `device`, are traced as if they were unsharded and there, without
            memory. A submodule in eager mode must then return the same shapes for all values.
        args: The positional arguments of a sample.
        kwargs: The keyword arguments of a sample.
        batch_dims: The dims that may have another size at run time: by default dim 0 of every tensor with the
            most frequent dim 0; None for none.
        forward: The function to call in place of `module.forward`, if that was replaced.
        device: The device of the program; by default the module's, and the CPU for meta.
        strict: True if no submodule may fall back to eager, and the batch's size must stay a symbol. Then no
            code runs with values.

    Raises:
        TraceError: The root itself cannot be traced, the sample does not fit, or the forward fails on it.

    Example:
        >>> import torch
        >>> graph = trace_forward(torch.nn.Linear(4, 2), (torch.zeros(3, 4),))
        >>> [op.target for op in graph.ops], graph.symbols
        (['aten.linear.default'], {'B': ('input_1', 0)})
    """
    call = forward or module.forward
    gradients = torch.is_grad_enabled()  # before `inference_mode(False)`, which enables gradients
    modes = _lock, torch.inference_mode(mode=False), torch.set_grad_enabled(gradients)
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        found = stack.enter_context(plain_parameters(module, device, with_values=not strict))
        inputs = flatten_inputs(call, args, dict(kwargs or {}), batch_dims)
        inputs = inputs if found is None else inputs.moved(found)
        first: TraceError | None = None
        for attempt in _attempts(inputs)[: 1 if strict else None]:
            try:
                return _Tracer(module, call, attempt, may_keep=not strict).run()
            except TraceError as error:
                first = first or error
            finally:
                forget_calls()
        raise first or AssertionError


def _attempts(inputs: Inputs) -> list[Inputs]:
    """Return the samples to try: with a symbolic batch of at least 2, then with fixed sizes."""
    if not inputs.batched:
        return [inputs]
    return [inputs.resized(2) if inputs.batch == 1 else inputs, inputs.fixed()]


class _Tracer:
    """Traces, and traces again with failed submodules in eager mode."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], inputs: Inputs, *, may_keep: bool
    ) -> None:
        self.module = module
        self.may_keep = may_keep
        self.forward = forward
        self.inputs = inputs
        self.modules = dict(module.named_modules())
        self.kept: dict[str, str] = {}
        self.recorded: dict[str, list[Recorded]] = {}
        for name, submodule in self.modules.items():
            if name and hooks_of_the_user(submodule):
                self._keep(Blame(name, "", "it has forward or backward hooks"), spread=False)

    def run(self) -> Graph:
        """Trace the module.

        Raises:
            TraceError: The module cannot be traced.
        """
        try:
            refuse_generators(self.module)
        except Refusal as refusal:
            raise self._error(blame(refusal, self.module)) from None
        for _ in range(len(self.modules) + 1):
            try:
                self._record()
                graph = build_graph(
                    self.module, export_forward(self.module, self.forward, self.inputs, self.recorded)
                )
            except TraceError:
                raise
            except UntraceableError as error:
                self._keep_all(error.blames)
            except SideEffectError as error:
                changes = error.changed.items()
                self._keep_all(
                    [Blame(fqn, "", f"its forward changes its attribute {name!r}") for fqn, name in changes]
                )
            except Exception as error:
                self._keep_all([blame(error, self.module)])
            else:
                graph.kept = dict(self.kept)
                graph.in_spec = _spec(self.inputs)
                return graph
        raise self._error(Blame("", "", "no set of submodules in eager mode was enough"))

    def _keep_all(self, blames: Sequence[Blame]) -> None:
        before = dict(self.kept)
        for one in sorted(blames, key=lambda one: one.fqn.count(".") if one.fqn else -1):
            if not _covers(self.kept.keys() - before.keys(), one.fqn):
                self._keep(one)

    def _keep(self, one: Blame, *, spread: bool = True) -> None:
        """Run a submodule in eager mode, and the others of its class, which would fail next."""
        fqn = self._outermost(one.fqn) if self.may_keep else ""
        if not fqn:
            raise self._error(one)
        cls = type(self.modules[fqn])
        same = [name for name, module in self.modules.items() if type(module) is cls and name and spread]
        for name in same if not cls.__module__.startswith("torch.") else ():
            self._place(name, one)
        self._place(fqn, one)

    def _place(self, fqn: str, one: Blame) -> None:
        if _covers(self.kept, fqn):
            return
        for inner in [name for name in self.kept if name.startswith(f"{fqn}.")]:
            del self.kept[inner]
        self.kept[fqn] = str(one)

    def _outermost(self, fqn: str) -> str:
        """Return the nearest enclosing submodule that is called and is not yet in eager mode."""
        while fqn:
            covered = _covers(self.kept, fqn)
            if covered:
                fqn = covered.rpartition(".")[0]
            elif fqn in self.modules and type(self.modules[fqn]).forward is not nn.Module.forward:
                return fqn
            else:
                fqn = fqn.rpartition(".")[0]
        return ""

    def _error(self, one: Blame) -> TraceError:
        if not self.may_keep:
            return TraceError(f"{one}.", remedy=_STRICT_REMEDY)
        return TraceError(
            f"the forward of {type(self.module).__name__} cannot be traced: {one}.", remedy=_REMEDY
        )

    def _record(self) -> None:
        """Run the forward on the sample to record the results of submodules in eager mode."""
        self.recorded = {}
        if not self.kept:
            return
        first = self._run(self.inputs)
        batch = self.inputs.batch
        sizes = [batch + 1, 2 * batch] if self.inputs.batched else []
        second, other = first, batch
        for other in sizes:
            try:
                second = self._run(self.inputs.resized(other))
                break
            except TraceError:
                continue
        for fqn in self.kept:
            self.recorded[fqn] = combine(
                first.get(fqn, []), second.get(fqn, []), (max(batch, 1), max(other, 1))
            )

    def _run(self, inputs: Inputs) -> dict[str, list[Result]]:
        results: dict[str, list[Result]] = {}
        args, kwargs = inputs.rebuild([inputs.leaves[index].detach().clone() for index in inputs.tensors])
        modules = {name: self.modules[name] for name in self.kept}
        try:
            with running(self.module), calls_replaced(modules, recorder(results)):
                self.forward(*args, **kwargs)
        except CommunicationError as error:
            raise self._error(blame(error, self.module)) from error
        except Refusal:
            raise
        except Exception as error:
            if any(isinstance(tensor, FakeTensor) for tensor in self.module.parameters()):
                raise self._without_values() from error
            found = blame(error, self.module)
            raise TraceError(
                f"the forward of {type(self.module).__name__} fails on the sample: {found}.",
                remedy="Give a sample (dummy_forward_args) that the forward accepts.",
            ) from error
        return results

    def _without_values(self) -> TraceError:
        name, reason = next(iter(self.kept.items()))
        return TraceError(
            f"{name} must run in eager mode ({reason}). Only a run shows its results, and a run needs real "
            f"parameters: those of {type(self.module).__name__} are on the meta device, on another device or "
            "sharded.",
            remedy="Create the module on a real device.",
        )


def _covers(kept: Iterable[str], fqn: str) -> str:
    """Return the submodule among `kept` that contains another one; empty if none does."""
    return next((name for name in kept if fqn == name or fqn.startswith(f"{name}.")), "")


def _spec(inputs: Inputs) -> str:
    try:
        return pytree.treespec_dumps(inputs.spec)
    except NotImplementedError:
        return ""


# A trace cannot use parameters that are sharded, on the meta device or on another device. Stand-ins replace
# them in the modules during the trace. Parameter objects are never touched.


_PLAIN = (getattr(Tensor.__torch_function__, "__func__", None), nn.Parameter.__torch_function__)
_WITH_VALUES = "cpu"
"""The device type with memory for stand-ins of sharded tensors; on other devices stand-ins are fake."""


@contextmanager
def plain_parameters(
    module: nn.Module, device: torch.device | None = None, *, with_values: bool = True
) -> Iterator[torch.device | None]:
    """Replace all tensors of a module by plain unsharded ones, on one device.

    Stand-ins of sharded parameters on CPU have values, so that the trace can follow code that depends on
    them. All others are fake: they report the device, but take no memory.

    Args:
        module: The module.
        device: The device; by default the sharded tensors' device, and the CPU for those on meta.
        with_values: False if no stand-in needs values.

    Yields:
        The device that inputs need for a trace; None if they may stay.
    """
    tensors = [*module.parameters(), *module.buffers()]
    guarded = [tensor for tensor in tensors if _is_guarded(tensor)]
    if device is None and guarded:
        device = guarded[0].device
    if device is None and any(tensor.is_meta for tensor in tensors):
        device = torch.device("cpu")
    elsewhere = device is not None and any(tensor.device != device for tensor in tensors)
    if device is None or not (guarded or elsewhere):
        yield None
        return
    if elsewhere or device.type != _WITH_VALUES or not with_values:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        made = {id(tensor): _fake(tensor, device, mode) for tensor in tensors}
    else:
        made = {id(tensor): _with_values(tensor) for tensor in guarded}
    saved: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    for submodule in module.modules():
        for entries in (submodule._parameters, submodule._buffers):
            for name, tensor in entries.items():
                if tensor is not None and id(tensor) in made:
                    saved.append((entries, name, tensor))  # type: ignore[arg-type]
                    entries[name] = made[id(tensor)]  # type: ignore[assignment]
    try:
        yield device
    finally:
        for entries, name, tensor in saved:
            entries[name] = tensor


def _is_guarded(tensor: Tensor) -> bool:
    """Return True if a tensor's class answers torch functions itself: it may show values it does not hold."""
    own = type(tensor).__torch_function__
    return getattr(own, "__func__", own) not in _PLAIN


def _with_values(tensor: Tensor) -> Tensor:
    made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
    if tensor.dtype.is_floating_point:
        made.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    return _of_kind(tensor, made)


def _fake(tensor: Tensor, device: torch.device, mode: FakeTensorMode) -> Tensor:
    with mode:
        return _of_kind(tensor, torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device))


def _of_kind(tensor: Tensor, made: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made
