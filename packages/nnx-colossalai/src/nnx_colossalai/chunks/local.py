"""Run a chunked model at world size 1: parameters are views of flat buffers, and copies overlap compute.

`LocalEngine` places the chunks of a model, hooks its modules, and undoes both. `Step` decides when parameters
show working weights or masters. `local_chunk` holds one chunk, `local_gradients` moves gradients to the
masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from nnx_base.clean_up import clean_up_after_error
from nnx_colossalai._torch_compat import (
    NO_BACKWARD,
    Silenced,
    accumulator_of,
    current_backward,
    will_run,
)
from nnx_colossalai.chunks.chunk import (
    ChunkEngine,
    Unit,
    cast_to,
    is_transparent,
    kept_outputs,
    needs_no_backward,
    tensors_with_gradient,
)
from nnx_colossalai.chunks.local_chunk import LocalChunk, Slot, is_chunkable, segments_of
from nnx_colossalai.chunks.local_gradients import Gradients, Listener
from nnx_colossalai.device import Device
from nnx_colossalai.plan.spec import Tier
from nnx_core._torch_compat import when_backward_ends
from nnx_core.backend import ParallelContext
from nnx_core.view.modules import materialize

__all__ = ["LocalEngine"]


T = TypeVar("T")
_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class LocalEngine(ChunkEngine):
    """Holds the chunks of one module at world size 1.

    Parameters that are no ordinary floating-point tensors stay outside of chunks, on the device. Layers with
    running statistics keep their dtype in a step, because torch does not mix dtypes in them.

    Args:
        context: The rank of this process and the world size.
        device: The device that allocates and copies.
        working_dtype: The dtype of the weights that forward and backward compute with; None keeps the
            masters' own.
    """

    chunks: Sequence[LocalChunk]

    def __init__(
        self, context: ParallelContext, device: Device[Any], working_dtype: torch.dtype | None
    ) -> None:
        super().__init__(context, device, working_dtype)
        self._units: Sequence[Unit] = ()
        self._own_dtype: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._gradients = Gradients(device)
        self._step = Step((), self._gradients)

    @override
    def parallelize(self, root: nn.Module, units: Sequence[Unit]) -> Mapping[nn.Parameter, nn.Parameter]:
        if self._units:
            return {}
        replaced = self._materialize(root, units)
        self._own_dtype = {
            id(parameter)
            for module in root.modules()
            if isinstance(module, _WITH_STATISTICS)
            for parameter in module.parameters(recurse=False)
        }
        self._units = units
        self.chunks = [self._make_chunk(unit, replaced) for unit in units]
        self._move_rest(root)
        self._connect(root)
        return replaced

    def _materialize(self, root: nn.Module, units: Sequence[Unit]) -> dict[nn.Parameter, nn.Parameter]:
        """Allocate and initialize parameters that are on the meta device; tied parameters stay tied."""
        slots = [
            (module, name, parameter)
            for module in root.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        ]
        for unit in units if slots else ():
            device = torch.device("cpu") if unit.tier.steps_on_host else self.device.torch_device
            materialize(unit.module, device, name=unit.name)
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for module, name, before in slots:
            # `materialize` makes one parameter per module: the first replacement serves all tied modules.
            module._parameters[name] = replaced.setdefault(before, module._parameters[name])  # type: ignore[arg-type] # as before
        return replaced

    def _make_chunk(self, unit: Unit, replaced: Mapping[nn.Parameter, nn.Parameter]) -> LocalChunk:
        parameters = {name: replaced.get(one, one) for name, one in unit.parameters.items()}
        chunkable = {name: parameter for name, parameter in parameters.items() if is_chunkable(parameter)}
        segments = segments_of(chunkable, self._working_dtype_of)
        return LocalChunk(unit.name, unit.tier, segments, self.device, self._used)

    def _used(self, chunk: LocalChunk) -> None:
        self._step.used(chunk)

    def _working_dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        if self.working_dtype is None or parameter.dtype != torch.float32 or id(parameter) in self._own_dtype:
            return parameter.dtype
        return self.working_dtype

    def _move_rest(self, root: nn.Module) -> None:
        """Move buffers and parameters outside of chunks to the device."""
        device = self.device.torch_device
        in_chunks = {id(parameter) for chunk in self.chunks for parameter in chunk.masters.values()}
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in in_chunks and not nn.parameter.is_lazy(parameter):
                    parameter.data = parameter.data.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != device:
                    module._buffers[name] = buffer.to(device)

    def _connect(self, root: nn.Module) -> None:
        """Hook every module whose forward uses working weights."""
        self._step = Step(self.chunks, self._gradients)
        used: dict[nn.Module, list[LocalChunk]] = {}
        owners: dict[int, LocalChunk] = {}
        for unit, chunk in zip(self._units, self.chunks, strict=True):
            if chunk.has_working:
                used.setdefault(unit.module, []).append(chunk)
                owners.update((id(parameter), chunk) for parameter in chunk.masters.values())
        for module in root.modules():
            for parameter in module.parameters(recurse=False):
                owner = owners.get(id(parameter))
                if owner is not None and owner not in used.setdefault(module, []):
                    used[module].append(owner)
        enters = {
            module: Enter(self._step, chunks, self._dtype_of_inputs(module))
            for module, chunks in used.items()
        }
        unit_of = {chunk: unit.module for unit, chunk in zip(self._units, self.chunks, strict=True)}
        for module, chunks in used.items():
            first = module.register_forward_pre_hook(enters[module], prepend=True, with_kwargs=True)
            last = module.register_forward_hook(Leave(self._step), always_call=True)
            self._hooks += (first, last)
            if module not in unit_of.values() and len(chunks) == 1 and not chunks[0].is_streamed:
                # The unit's own hooks have made the chunk ready, and a chunk that is not streamed stays so:
                # the unit silences the hooks of inner modules, which saves two calls for each forward.
                before, after = enters[unit_of[chunks[0]]].inner
                before.append(first)
                after.append(last)
        # Two chunks in transfer: the host adds one to its totals while the lane copies the other.
        self._gradients.limit = 2 * max((chunk.nbytes for chunk in self.chunks), default=0)

    def _dtype_of_inputs(self, module: nn.Module) -> torch.dtype | None:
        """Return the dtype that a unit's inputs are cast to, as FSDP2 does; None for other modules."""
        for unit, chunk in zip(self._units, self.chunks, strict=True):
            if unit.module is module and any(
                slot.working is not None and slot.working.dtype == self.working_dtype for slot in chunk.slots
            ):
                return self.working_dtype
        return None

    def _disconnect(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._step.close()
        self._gradients.forget_staging()

    @override
    def unparallelize(self, root: nn.Module) -> Mapping[nn.Parameter, nn.Parameter]:
        self.finish()
        self._disconnect()
        for chunk in self.chunks:
            chunk.take_down()
        self._units, self.chunks = (), ()
        self._step = Step((), self._gradients)
        return {}

    @override
    def move(self, root: nn.Module, tiers: Mapping[str, Tier]) -> None:
        self.finish()
        self._disconnect()
        moves = [(chunk, tiers.get(chunk.name, chunk.tier)) for chunk in self.chunks]
        try:
            # Chunks that free device memory first, so that the others find room.
            for chunk, tier in sorted(moves, key=lambda move: -_depth(move[1])):
                if tier is not chunk.tier:
                    chunk.move(tier)
        finally:
            self._connect(root)

    @override
    def run_step(self, root: nn.Module, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if not self._step.is_needed:
            return step(*args, **kwargs)
        is_manual = torch.is_grad_enabled() and not getattr(root, "automatic_optimization", True)
        result: T = self._step.run(step, args, kwargs, is_manual=is_manual)
        return result

    @override
    def no_sync(self, root: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def finish(self) -> None:
        for chunk in self.chunks:
            chunk.finish()
        self._step.finish()

    @override
    def end_step(self) -> None:
        self._step.show_masters()


def _depth(tier: Tier) -> int:
    return list(Tier).index(tier)


class Order:
    """Remembers the uses of chunks and predicts the next one.

    The last step of the same kind, with or without gradients, predicts the order.

    Args:
        chunks: The chunks in the probable order of their first uses.
    """

    def __init__(self, chunks: Sequence[LocalChunk]) -> None:
        self._last: dict[bool, list[LocalChunk]] = {}
        self._now: list[LocalChunk] = []
        self._kind, self._position = True, 0
        number(chunks)

    def start(self, *, with_gradients: bool) -> LocalChunk | None:
        """Begin a step and return the chunk that it will probably use first."""
        self._kind, self._position, self._now = with_gradients, 0, []
        expected = self._last.get(with_gradients, [])
        return expected[0] if expected else None

    def used(self, chunk: LocalChunk) -> LocalChunk | None:
        """Record the use of a chunk and return the chunk that will probably follow."""
        self._now.append(chunk)
        expected = self._last.get(self._kind, [])
        try:
            # Searched from the last position on: backward uses the chunks of the forward a second time.
            self._position = expected.index(chunk, self._position) + 1
        except ValueError:
            return None
        return expected[self._position] if self._position < len(expected) else None

    def end(self, chunks: Iterable[LocalChunk]) -> None:
        """End a step; its uses predict the next step of its kind."""
        self._last[self._kind] = self._now
        # Numbers tell the background thread which chunk the next training forward needs first; an evaluation
        # between two steps may use others.
        if self._kind:
            number([*dict.fromkeys(self._now), *(chunk for chunk in chunks if chunk not in self._now)])


def number(chunks: Iterable[LocalChunk]) -> None:
    """Number the chunks."""
    for index, chunk in enumerate(chunks):
        chunk.index = index


@dataclass(slots=True, eq=False)
class _Frame:
    """A running forward."""

    module: nn.Module
    chunks: list[LocalChunk] = field(default_factory=list)
    windows: list[_Window] = field(default_factory=list)
    silenced: tuple[Silenced, ...] = ()

    def end(self) -> None:
        """Restore the hooks of inner modules."""
        # The first are pre-forward hooks, which `_connect` has put before those of the user.
        for number, silenced in enumerate(self.silenced):
            silenced.end(are_first=number == 0)


class _Window:
    """The backward of one forward of streamed weights: it fetches them, and frees them after the last use.

    It opens at the first gradient of an output. It closes after the last gradient that autograd will compute
    for the chunk's parameters and the forward's inputs: no later node reads the weights.

    Args:
        step: The step that the forward belongs to.
        chunk: The chunk of the weights.
        inputs: The inputs of the forward that need gradients.
    """

    def __init__(self, step: Step, chunk: LocalChunk, inputs: Sequence[Tensor]) -> None:
        self.chunk = chunk
        self._step = step
        # Collected in the forward: its inputs are at hand, but only the backward knows which nodes will run.
        self._nodes: dict[Any, Any] = {}
        self._missing: set[Any] = set()
        self._is_open = False
        self._handles = []
        for number, tensor in enumerate(inputs):
            self._nodes[number] = accumulator_of(tensor)
            self._handles.append(tensor.register_hook(lambda _, key=number: self.complete(key)))  # type: ignore[no-untyped-call]
        for slot in chunk.trained:
            # Cached until the step ends, because an operator call is necessary to find the node.
            if slot.accumulator is None:
                slot.accumulator = accumulator_of(slot.parameter)
            self._nodes[slot] = slot.accumulator

    def follow(self, module: nn.Module, output: Any) -> None:
        """Hook the tensors that a backward may start at: outputs, and tensors kept on modules."""
        for tensor in (*tensors_with_gradient(output), *kept_outputs(module)):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._open())  # type: ignore[no-untyped-call]
        if not is_transparent(output) or _shows_inner_outputs(module):
            # A backward may start at a tensor without our hook, so the weights stay until the step ends.
            self.chunk.hold()

    def _open(self) -> None:
        self._step.backward_runs()
        if self._is_open:
            return
        self._is_open = True
        self.chunk.users += 1
        self.chunk.make_ready()
        # Gradients are enabled in a backward with create_graph=True: a later one reads the weights again.
        if torch.is_grad_enabled():
            self.chunk.hold()
        # Found only now: a backward may compute only some gradients, and a wait for the others would keep the
        # weights on the device.
        expected = {key: will_run(node) for key, node in self._nodes.items()}
        # The key None completes at the end of the backward: autograd does not tell which nodes run, or none
        # of them does.
        if None in expected.values():
            self._missing = {None}
        else:
            self._missing = {key for key, runs in expected.items() if runs} or {None}

    def complete(self, key: Any) -> None:
        """Record that a gradient is complete; the last one frees the weights."""
        self._missing.discard(key)
        if self._is_open and not self._missing:
            self._is_open = False
            self.chunk.users -= 1
            self.chunk.let_go()
            self._step.fetch_ahead()

    def close(self) -> None:
        """Remove all hooks, at the end of the step."""
        self._is_open = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _shows_inner_outputs(module: nn.Module) -> bool:
    """Return True if user hooks see outputs of inner modules, which they may keep."""
    return any(
        not getattr(hook, "is_of_chunks", False)
        for inner in module.modules()
        if inner is not module
        for hook in inner._forward_hooks.values()
    )


class Step:
    """One step of the chunks with working weights, from the first forward to the end of the backward.

    A step begins with `LocalEngine.run_step`, or with the first forward of a module with working weights. It
    ends with its backward, or at once if no backward can follow. Hooks drive it:

    - Hooks on modules show which chunks a forward uses.
    - Hooks on outputs show when a backward begins to use a chunk.
    - Hooks on the chunk's parameters and its module's inputs show when a backward has used it.

    The guard of a parameter covers every other use.

    A step tracks calls of `run` (``_running``), running forwards (``_frames``), forwards whose backward is
    open or may follow (``_windows``), and running backwards (``_backwards``, by autograd's number). User code
    nests all four: a step may run backwards, and a backward may run forwards and other backwards.

    Args:
        chunks: All chunks in their probable order; chunks without working weights only count in the order.
        gradients: The object that collects gradients for the masters.
    """

    def __init__(self, chunks: Sequence[LocalChunk], gradients: Gradients) -> None:
        self.order = Order(chunks)
        self._all = chunks
        self._chunks = [chunk for chunk in chunks if chunk.has_working]
        self._gradients = gradients
        self._listener = Listener(gradients, lambda: self._is_active, self._gradient_runs, self._complete)
        self._is_active = False
        self._with_gradients: bool | None = None
        self._running = 0
        self._frames: list[_Frame] = []
        self._windows: list[_Window] = []
        self._backwards: set[int] = set()
        self._has_accumulated = self._is_differentiated = False
        self._following: LocalChunk | None = None

    @property
    def is_needed(self) -> bool:
        """True if some chunk has working weights."""
        return bool(self._chunks)

    def begin(self) -> None:
        """Show working weights."""
        if self._is_active:
            return
        self._is_active = True
        with_gradients = torch.is_grad_enabled()
        # Users exchange weights between training and evaluation through `.data`, which counts no version.
        if with_gradients is not self._with_gradients:
            self._with_gradients = with_gradients
            for chunk in self._chunks:
                chunk.distrust()
        for chunk in self._chunks:
            self._listener.listen(chunk)
            chunk.begin()
        first = self.order.start(with_gradients=with_gradients)
        if first is not None:
            first.prepare()

    def end(self) -> None:
        """Show masters, with their gradients."""
        if not self._is_active:
            return
        self._is_active = self._has_accumulated = self._is_differentiated = False
        self._following = None
        for window in self._windows:
            window.close()
        self._windows.clear()
        # In this order: totals are complete, then parameters show masters, then they get the totals. torch
        # rejects a gradient whose dtype is not that of the data.
        self._listener.end_backward()
        self._gradients.finish()
        for chunk in self._chunks:
            chunk.end()
            for slot in chunk.slots:
                self._gradients.give(slot)
        self.order.end(self._all)

    def close(self) -> None:
        """Remove the hooks on parameters."""
        self._listener.stop(self._chunks)

    def reset(self) -> None:
        """Show masters, and drop running forwards and backwards."""
        while self._frames:
            self._frames.pop().end()
        self._backwards.clear()
        self._running = 0
        self.end()

    def show_masters(self) -> None:
        """Show masters, also inside of `run`, unless a forward or a backward is running."""
        if not self._frames and current_backward() == NO_BACKWARD:
            self.end()

    def finish(self) -> None:
        """Show masters, unless `run`, a forward or a backward is running."""
        if not self._running and not self._frames and current_backward() == NO_BACKWARD:
            self.reset()

    def run(self, step: Callable[..., Any], args: Any, kwargs: Any, *, is_manual: bool) -> Any:
        """Run the user's step.

        Args:
            step: The function that runs the forward, or the complete step.
            args: The arguments of the step.
            kwargs: The keyword arguments of the step.
            is_manual: True if it calls backward and the optimizers itself.
        """
        self._forget_failures()
        self._running += 1
        with clean_up_after_error("showing master weights", self.reset):
            self.begin()
            result = step(*args, **kwargs)
        self._running -= 1
        if not self._running:
            self._left(result, is_complete=is_manual)
        return result

    def _forget_failures(self) -> None:
        """Drop the numbers of failed backwards."""
        # Autograd runs no end-of-backward callback after an error, so `_backward_over` never dropped them.
        if not self._running and not self._frames and current_backward() == NO_BACKWARD:
            self._backwards.clear()

    def _left(self, result: Any, *, is_complete: bool = False) -> None:
        """End the step after the outermost call, or watch for the backward that may follow."""
        # A forward inside of a backward, as of activation checkpointing: the backward ends the step.
        if current_backward() != NO_BACKWARD:
            return
        if is_complete or not torch.is_grad_enabled() or needs_no_backward(result):
            self.end()
            return
        # These hooks notice a backward at its start, and one that reaches no parameter.
        for tensor in tensors_with_gradient(result):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self.backward_runs())  # type: ignore[no-untyped-call]

    def enter(
        self,
        chunks: Sequence[LocalChunk],
        dtype: torch.dtype | None,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        *,
        inner: Sequence[Sequence[RemovableHandle]] = (),
    ) -> Any:
        """Begin a forward that uses chunks.

        Args:
            chunks: The chunks that it uses.
            dtype: The dtype that floating-point inputs are cast to, if any.
            module: The module of the forward.
            args: The arguments of the forward.
            kwargs: The keyword arguments of the forward.
            inner: The pre-forward and the forward hooks of inner modules, silenced until the forward ends.
        """
        if dtype is None and self._is_inside(chunks, module):
            return None
        if dtype is not None:
            args, kwargs = cast_to(dtype, args), cast_to(dtype, kwargs)
        self._forget_failures()
        # Checkpointing repeats a forward in the backward. That forward may start a backward of its own, which
        # may compute a second gradient of one parameter: neither can wait for the other.
        if current_backward() != NO_BACKWARD and torch.is_grad_enabled():
            self._listener.stop_grouping()
        self.begin()
        frame = _Frame(module)
        self._frames.append(frame)
        for chunk in chunks:
            chunk.users += 1
            frame.chunks.append(chunk)
            chunk.make_ready()
            # The outermost forward of a chunk only: its window spans those of inner modules.
            if chunk.users == 1 and chunk.is_streamed and torch.is_grad_enabled():
                window = _Window(self, chunk, tensors_with_gradient((args, kwargs)))
                frame.windows.append(window)
                self._windows.append(window)
        frame.silenced = tuple(map(Silenced, inner))
        return None if dtype is None else (args, kwargs)

    def _is_inside(self, chunks: Sequence[LocalChunk], module: nn.Module) -> bool:
        """Return True if a forward runs inside of another, and its chunks are ready until the step ends."""
        if not self._frames or self._frames[-1].module is module:
            return False
        return all(chunk.is_settled for chunk in chunks)

    def leave(self, module: nn.Module, output: Any) -> None:
        """End a forward, after its return or its error."""
        # There may be no frame: `enter` skips some forwards, and an earlier hook may have raised an error.
        if not self._frames or self._frames[-1].module is not module:
            return
        frame = self._frames.pop()
        frame.end()
        for window in frame.windows:
            window.follow(module, output)
        for chunk in frame.chunks:
            chunk.users -= 1
            chunk.let_go()
        self.fetch_ahead()
        if not self._frames and not self._running:
            self._left(output)

    def used(self, chunk: LocalChunk) -> None:
        """Record the use of a chunk and fetch the chunk that will probably follow."""
        following = self.order.used(chunk)
        if self._is_active:
            self._following = following
            self.fetch_ahead()

    def fetch_ahead(self) -> None:
        """Begin to fetch the chunk that will probably follow, once there is room for it."""
        following = self._following
        if following is None:
            return
        # Two streamed chunks at a time, as the plan counts memory: one computes while the next is fetched.
        passing = [chunk for chunk in self._chunks if chunk.is_resident and chunk is not following]
        if following.is_streamed and len(passing) > 1:
            return
        self._following = None
        following.prepare()

    def backward_runs(self) -> None:
        """Record the backward that runs; hooks call it any number of times in each."""
        number = current_backward()
        if number not in self._backwards:
            # A backward inside of another may compute a second gradient of one parameter: grouped, the two
            # would be added in 16 bits.
            if self._backwards:
                self._listener.stop_grouping()
            else:
                self._listener.begin_backward()
            self._backwards.add(number)
            when_backward_ends(partial(self._backward_over, number))
        # Gradients are enabled with create_graph=True: a backward of the gradients reads the weights again.
        if torch.is_grad_enabled():
            self._is_differentiated = True
        self._reopen()

    def _reopen(self) -> None:
        """Begin the step again if it has ended, because a backward repeats on a retained graph."""
        if not self._is_active:
            # Backward disables gradients, so `begin` would take the step for an evaluation.
            with torch.enable_grad():
                self.begin()

    def _backward_over(self, number: int) -> None:
        self._backwards.discard(number)
        if self._backwards:
            return
        if self._listener.end_backward():
            self._has_accumulated = True
        self._gradients.finish()
        # The step continues after a backward inside of a forward, after one with create_graph=True, and after
        # `torch.autograd.grad` inside of `run`, which accumulates nothing.
        if self._frames or self._is_differentiated or (self._running and not self._has_accumulated):
            self._continue()
        else:
            self.end()

    def _continue(self) -> None:
        """Keep showing working weights after a backward, with the gradients so far."""
        self._is_differentiated = False
        # None is the key of windows whose last gradient was unknown.
        for window in self._windows:
            window.complete(None)
        for chunk in self._chunks:
            for slot in chunk.slots:
                self._gradients.put_back(slot)
                self._listener.listen_before(slot)

    def _gradient_runs(self) -> None:
        self._has_accumulated = True
        self.backward_runs()

    def _complete(self, chunk: LocalChunk, slot: Slot) -> None:
        for window in self._windows:
            if window.chunk is chunk:
                window.complete(slot)


class _Hook:
    """A hook of one module; its copy does nothing, because a copied module has plain parameters."""

    is_of_chunks = True

    def __reduce__(self) -> Any:
        return _hook_of_copies, ()


class Enter(_Hook):
    """The hook before a module's forward.

    Args:
        step: The step of the engine.
        chunks: The chunks that the module uses.
        dtype: The dtype that its floating-point inputs are cast to, if any.

    Attributes:
        inner: The pre-forward and the forward hooks of inner modules, silenced while the forward runs.
    """

    def __init__(self, step: Step, chunks: Sequence[LocalChunk], dtype: torch.dtype | None) -> None:
        self._step, self._chunks, self._dtype = step, chunks, dtype
        self.inner: tuple[list[RemovableHandle], list[RemovableHandle]] = ([], [])

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments cast to the dtype; None leaves them unchanged."""
        return self._step.enter(self._chunks, self._dtype, module, args, kwargs, inner=self.inner)


class Leave(_Hook):
    """The hook after a module's forward, also after an error.

    Args:
        step: The step of the engine.
    """

    def __init__(self, step: Step) -> None:
        self._step = step

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward; the output stays unchanged."""
        self._step.leave(module, output)


def _nothing(*_: Any) -> None:
    """Replace a hook in copied modules."""


def _hook_of_copies() -> Any:
    return _nothing
