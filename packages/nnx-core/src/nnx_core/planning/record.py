"""Record one training step of a model on fake tensors, which have shapes and no memory.

`Recorder` sees every operator, and notes each storage that it makes, reads or frees. `nnx_core._torch_compat`
has the private names of torch that it needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from nnx_core._torch_compat import TorchDispatchMode, storage_key, tree_leaves
from nnx_core.planning.trace import Event, Kind

__all__ = ["Recorder", "nbytes_of"]


class Recorder(TorchDispatchMode):
    """Records the tensors of a step, in the order in which they are made and freed.

    Args:
        root: The model.

    Attributes:
        events: The events so far.
        current: The bytes of all storages that were made and not freed.
        peak: The largest value of `current` so far.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self.current = self.peak = 0
        self._numbers: dict[int, tuple[int, int]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._names = {module: name for name, module in root.named_modules()}
        self._parameters = list(root.named_parameters())
        self._named = {storage_key(parameter): name for name, parameter in self._parameters}
        self._known = {*self._named, *(storage_key(buffer) for buffer in root.buffers())}
        self._count = self._product = 0

    def ignore(self, value: Any) -> None:
        """Take the tensors of a value for known: they were there before the step."""
        self._known |= {storage_key(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}

    def phase(self, name: str) -> None:
        """Begin a phase of the step."""
        self.events.append(Event(Kind.PHASE, name))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around the recorded step."""
        with ExitStack() as stack:
            for name, parameter in self._parameters:
                if parameter.requires_grad:
                    function = partial(self._gradient, name)
                    hook = parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
            before = register_module_forward_pre_hook(self._enter)
            after = register_module_forward_hook(self._leave)
            stack.callback(before.remove)
            stack.callback(after.remove)
            stack.enter_context(saved_tensors_hooks(self._save, _restore))
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and note its tensors."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (name := self._named.get(storage_key(leaf))) is not None:
                self.events.append(Event(Kind.USE, name))
        result = func(*args, **(kwargs or {}))
        if self._adds_bias(func, args):
            self._forget(args[0])
        unseen = _unseen(func, args)
        for place, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self._note(leaf, unseen.get(place, 0))
        return result

    def _adds_bias(self, func: Any, args: Any) -> bool:
        """Return True for the second half of a linear layer, which real tensors run in place.

        torch's ``linear`` adds the bias out of place for subclasses of Tensor, such as fake ones.
        """
        name = str(func)
        if name == "aten._unsafe_view.default":
            self._product = storage_key(args[0])
        elif name == "aten.add.Tensor":
            terms = [storage_key(term) for term in args[:2] if isinstance(term, Tensor)]
            return len(terms) == 2 and terms[0] == self._product and terms[1] in self._named
        return False

    def _forget(self, tensor: Tensor) -> None:
        """Count a storage as freed."""
        key = storage_key(tensor)
        if key in self._alive:
            self._freed(key, None)

    def _note(self, tensor: Tensor, unseen: int = 0) -> None:
        key = storage_key(tensor)
        if not key or key in self._known or key in self._numbers:
            return
        storage = tensor.untyped_storage()
        number, nbytes = self._count, max(storage.nbytes(), unseen)
        self._count += 1
        self._numbers[key] = number, nbytes
        self._alive[key] = weakref.ref(storage, partial(self._freed, key))
        self.current += nbytes
        self.peak = max(self.peak, self.current)
        self.events.append(Event(Kind.MAKE, "", number, nbytes))

    def _freed(self, key: int, _: Any) -> None:
        number, nbytes = self._numbers.pop(key)
        del self._alive[key]
        self.current -= nbytes
        self.events.append(Event(Kind.FREE, "", number, nbytes))

    def _gradient(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            number, nbytes = self._numbers.get(storage_key(gradient), (-1, 0))
            self.events.append(Event(Kind.GRADIENT, name, number, nbytes))

    def _save(self, tensor: Tensor) -> Any:
        name = self._named.get(storage_key(tensor))
        if name is None:
            return tensor
        token = _Saved(tensor)
        weakref.finalize(token, self.events.append, Event(Kind.UNSAVE, name))
        self.events.append(Event(Kind.SAVE, name))
        return token

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            self.events.append(Event(Kind.ENTER, name))
            self._on_gradient(args, Event(Kind.LEAVE_BACKWARD, name))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(module)
        if name is not None:
            self.events.append(Event(Kind.LEAVE, name))
            self._on_gradient(output, Event(Kind.ENTER_BACKWARD, name))

    def _on_gradient(self, value: Any, event: Event) -> None:
        def append(_: Tensor) -> None:
            place = len(self.events)
            if event.kind is Kind.LEAVE_BACKWARD:  # a module ends before the one that feeds it begins
                while place and self.events[place - 1].kind is Kind.ENTER_BACKWARD:
                    place -= 1
            if not place or self.events[place - 1] != event:
                self.events.insert(place, event)

        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(append)  # type: ignore[no-untyped-call]


def _unseen(func: Any, args: Any) -> dict[int, int]:
    """Return the bytes of results, by their place, that torch's rule for fake tensors leaves out.

    oneDNN keeps a workspace of each LSTM for backward. Its bytes were measured with oneDNN of torch 2.13.
    """
    if str(func) != "aten.mkldnn_rnn_layer.default":
        return {}
    length, size = args[0].shape[:2]
    return {3: size * args[10] * (62 * length + 48)}


class _Saved:
    """A parameter that autograd keeps for backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _restore(value: Any) -> Tensor:
    return value.tensor if isinstance(value, _Saved) else value


def nbytes_of(value: Any) -> int:
    """Return the bytes of all storages in a nested value, each counted once."""
    found: dict[int, int] = {}
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found[storage_key(leaf)] = leaf.untyped_storage().nbytes() if storage_key(leaf) else 0
    return sum(found.values())
