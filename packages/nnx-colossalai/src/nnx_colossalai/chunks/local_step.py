"""A step at world size 1: when working weights are shown, fetched and let go, and when the masters are back.

A step begins with `LocalEngine.run_step` or with the first forward of a module that has working weights, and
is over when its backward is, or at once where none can follow. Hooks on modules say what a forward uses;
hooks on their outputs say that a backward begins to use it; the gradients of a chunk's parameters and of its
module's inputs say that the backward is done with it. Whatever else touches a parameter meets the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nnx_colossalai.chunks._torch_autograd import (
    NO_BACKWARD,
    Silenced,
    accumulator_of,
    call_at_end,
    current_backward,
    will_run,
)
from nnx_colossalai.chunks.local_chunk import LocalChunk
from nnx_colossalai.chunks.local_gradients import Gradients, Slot
from nnx_colossalai.chunks.local_listening import Listener
from nnx_colossalai.chunks.local_order import Order
from nnx_colossalai.chunks.values import (
    cast_to,
    is_transparent,
    kept_outputs,
    needs_no_backward,
    tensors_with_gradient,
)

__all__ = ["Step"]


@dataclass(slots=True, eq=False)
class _Frame:
    """A forward that runs."""

    module: nn.Module
    chunks: list[LocalChunk] = field(default_factory=list)
    windows: list[_Window] = field(default_factory=list)
    silenced: tuple[Silenced, ...] = ()

    def end(self) -> None:
        """Let the hooks of modules inside be called again."""
        for number, silenced in enumerate(self.silenced):
            silenced.end(are_first=number == 0)


class _Window:
    """The backward of one forward of streamed weights, from its outputs' gradients to its inputs'.

    Args:
        step: Whose.
        chunk: Whose weights it needs.
        inputs: Of the forward, those that need gradients.
    """

    def __init__(self, step: Step, chunk: LocalChunk, inputs: Sequence[Tensor]) -> None:
        self.chunk = chunk
        self._step = step
        self._nodes: dict[Any, Any] = {}
        self._missing: set[Any] = set()
        self._is_open = False
        self._handles = []
        for number, tensor in enumerate(inputs):
            self._nodes[number] = accumulator_of(tensor)
            self._handles.append(tensor.register_hook(lambda _, key=number: self.arrived(key)))  # type: ignore[no-untyped-call]
        for slot in chunk.trained:
            if slot.accumulator is None:
                slot.accumulator = accumulator_of(slot.parameter)
            self._nodes[slot] = slot.accumulator

    def follow(self, module: nn.Module, output: Any) -> None:
        """The forward is over, and its backward begins with what it returns or leaves on modules."""
        for tensor in (*tensors_with_gradient(output), *kept_outputs(module)):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self._open())  # type: ignore[no-untyped-call]
        if not is_transparent(output) or _shows_inner_outputs(module):
            self.chunk.held = True  # its backward may begin anywhere

    def _open(self) -> None:
        self._step.backward_runs()
        if self._is_open:
            return
        self._is_open = True
        self.chunk.users += 1
        self.chunk.make_ready()
        if torch.is_grad_enabled():  # of gradients that will be differentiated, which uses the weights again
            self.chunk.held = True
        expected = {key: will_run(node) for key, node in self._nodes.items()}
        if None in expected.values():
            self._missing = {None}  # nobody can tell: until the backward's end
        else:
            self._missing = {key for key, runs in expected.items() if runs} or {None}

    def arrived(self, key: Any) -> None:
        """One of the gradients that the backward leads to is complete; after the last, it is over."""
        self._missing.discard(key)
        if self._is_open and not self._missing:
            self._is_open = False
            self.chunk.users -= 1
            self.chunk.let_go()
            self._step.fetch_ahead()

    def close(self) -> None:
        """The step is over."""
        self._is_open = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _shows_inner_outputs(module: nn.Module) -> bool:
    """Whether hooks of the user get outputs of modules inside, which they may keep."""
    return any(
        not getattr(hook, "is_of_chunks", False)
        for inner in module.modules()
        if inner is not module
        for hook in inner._forward_hooks.values()
    )


class Step:
    """What the chunks with working weights of their own go through together.

    Args:
        chunks: All chunks, in their probable order; those without working weights are only counted.
        gradients: Where gradients go.
    """

    def __init__(self, chunks: Sequence[LocalChunk], gradients: Gradients) -> None:
        self.order = Order(chunks)
        self._all = chunks
        self._chunks = [chunk for chunk in chunks if chunk.has_working]
        self._gradients = gradients
        self._listener = Listener(gradients, lambda: self._is_active, self._gradient_runs, self._arrived)
        self._is_active = False
        self._with_gradients: bool | None = None
        self._running = 0
        self._frames: list[_Frame] = []
        self._windows: list[_Window] = []
        self._backwards: set[int] = set()
        self._has_accumulated = self._is_differentiated = False
        self._following: LocalChunk | None = None

    # --- begin and end ------------------------------------------------------------------------

    @property
    def is_needed(self) -> bool:
        """Whether there are working weights at all."""
        return bool(self._chunks)

    def begin(self) -> None:
        """Show working weights."""
        if self._is_active:
            return
        self._is_active = True
        with_gradients = torch.is_grad_enabled()
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
        self._listener.end_backward()
        self._gradients.finish()
        for chunk in self._chunks:
            chunk.end()
            for slot in chunk.slots:
                self._gradients.give(slot)
        self.order.end(self._all)

    def close(self) -> None:
        """Listen to no gradients any more."""
        self._listener.stop(self._chunks)

    def reset(self) -> None:
        """Show masters, whatever was under way."""
        while self._frames:
            self._frames.pop().end()
        self._backwards.clear()
        self._running = 0
        self.end()

    def show_masters(self) -> None:
        """In a step of manual optimization as well, unless a forward or a backward is under way."""
        if not self._frames and current_backward() == NO_BACKWARD:
            self.end()

    def finish(self) -> None:
        """Show masters, unless a forward or a backward is under way."""
        if not self._running and not self._frames and current_backward() == NO_BACKWARD:
            self.reset()

    def run(self, step: Callable[..., Any], args: Any, kwargs: Any, *, is_manual: bool) -> Any:
        """Run a step of the user's.

        Args:
            step: Forward, or all of it.
            args: For it.
            kwargs: For it.
            is_manual: Whether it calls backward and the optimizers itself.
        """
        self._forget_failures()
        self._running += 1
        try:
            self.begin()
            result = step(*args, **kwargs)
        except BaseException:
            self.reset()
            raise
        self._running -= 1
        if not self._running:
            self._left(result, is_complete=is_manual)
        return result

    def _forget_failures(self) -> None:
        """What a backward that failed has left."""
        if not self._running and not self._frames and current_backward() == NO_BACKWARD:
            self._backwards.clear()

    def _left(self, result: Any, *, is_complete: bool = False) -> None:
        """The outermost call has returned; a backward may follow."""
        if current_backward() != NO_BACKWARD:
            return
        if is_complete or not torch.is_grad_enabled() or needs_no_backward(result):
            self.end()
            return
        for tensor in tensors_with_gradient(result):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self.backward_runs())  # type: ignore[no-untyped-call]

    # --- forward ------------------------------------------------------------------------------

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
        """A forward begins that uses chunks.

        Args:
            chunks: Which.
            dtype: What floating-point inputs are cast to, if anything.
            module: Whose forward.
            args: Of the forward.
            kwargs: Of the forward.
            inner: Hooks of modules inside that do nothing meanwhile: those before forwards, and those after.
        """
        if dtype is None and self._is_inside(chunks, module):
            return None
        if dtype is not None:
            args, kwargs = cast_to(dtype, args), cast_to(dtype, kwargs)
        self._forget_failures()
        if current_backward() != NO_BACKWARD and torch.is_grad_enabled():
            self._listener.stay_apart()
        self.begin()
        frame = _Frame(module)
        self._frames.append(frame)
        for chunk in chunks:
            chunk.users += 1
            frame.chunks.append(chunk)
            chunk.make_ready()
            if chunk.users == 1 and chunk.is_streamed and torch.is_grad_enabled():
                window = _Window(self, chunk, tensors_with_gradient((args, kwargs)))
                frame.windows.append(window)
                self._windows.append(window)
        frame.silenced = tuple(map(Silenced, inner))
        return None if dtype is None else (args, kwargs)

    def _is_inside(self, chunks: Sequence[LocalChunk], module: nn.Module) -> bool:
        """Whether a forward runs inside of another, and all it uses is there until the step is over."""
        if not self._frames or self._frames[-1].module is module:
            return False
        return all(chunk.is_settled for chunk in chunks)

    def leave(self, module: nn.Module, output: Any) -> None:
        """It is over, well or not."""
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
        """Something uses a chunk: get ready what will probably follow."""
        following = self.order.used(chunk)
        if self._is_active:
            self._following = following
            self.fetch_ahead()

    def fetch_ahead(self) -> None:
        """Begin to fetch what will probably follow, once what it takes the place of has gone."""
        following = self._following
        if following is None:
            return
        passing = [chunk for chunk in self._chunks if chunk.is_resident and chunk is not following]
        if following.is_streamed and len(passing) > 1:
            return
        self._following = None
        following.prepare()

    # --- backward -----------------------------------------------------------------------------

    def backward_runs(self) -> None:
        """Called in a backward, any number of times."""
        number = current_backward()
        if number not in self._backwards:
            if self._backwards:
                self._listener.stay_apart()
            else:
                self._listener.begin_backward()
            self._backwards.add(number)
            call_at_end(partial(self._backward_over, number))
        if torch.is_grad_enabled():
            self._is_differentiated = True
        self.begin_again()

    def begin_again(self) -> None:
        """A graph that was kept is used again."""
        if not self._is_active:
            with torch.enable_grad():
                self.begin()

    def _backward_over(self, number: int) -> None:
        self._backwards.discard(number)
        if self._backwards:
            return
        if self._listener.end_backward():
            self._has_accumulated = True
        self._gradients.finish()
        if self._frames or self._is_differentiated or (self._running and not self._has_accumulated):
            self._go_on()
        else:
            self.end()

    def _go_on(self) -> None:
        """The step is not over: parameters still show working weights, beside the gradients they have."""
        self._is_differentiated = False
        for window in self._windows:
            window.arrived(None)
        for chunk in self._chunks:
            for slot in chunk.slots:
                self._gradients.put_back(slot)
                self._listener.listen_before(slot)

    def _gradient_runs(self) -> None:
        self._has_accumulated = True
        self.backward_runs()

    def _arrived(self, chunk: LocalChunk, slot: Slot) -> None:
        for window in self._windows:
            if window.chunk is chunk:
                window.arrived(slot)
