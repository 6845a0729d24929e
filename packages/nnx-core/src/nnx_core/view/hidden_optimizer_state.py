"""Hide an optimizer's state that is sharded or offloaded during training, until user code accesses it.

A sum over such state would be one rank's, and a write might have no effect. So between steps a stand-in
replaces `optimizer.state`, and detects every access. Then, by the choice of the engine, the tensors read as
unsharded (`nnx_core.view.guard`) from then on, or the access raises. Without an access there is no cost. The
engine has the plain state in steps and checkpoints, and user code gets it back after training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_base.clean_up import clean_up
from nnx_core.errors import UnsupportedError
from nnx_core.view.guard import Guard, Part, guard, show_plain, show_unsharded, unguard

_REMEDY = "Read it in a checkpoint or after `fit`, or use strategy 'fsdp_auto'."


class StateParts(Protocol):
    """An engine's sharded optimizer state."""

    def refusal(self, optimizer: Optimizer) -> str | None:
        """Return the location of state that cannot be shown, equal on all ranks; None if it can."""

    def part(self, value: Tensor, parameter: nn.Parameter, name: str) -> Part | None:
        """Return the part of a tensor in the state; None if this rank stores it unsharded.

        Args:
            value: The tensor.
            parameter: The parameter that it belongs to.
            name: Its name in the state, such as ``exp_avg``.
        """

    def own(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return this rank's shard of a tensor that user code put into the state; itself if not sharded."""

    def key(self, parameter: Any) -> Any:
        """Return the optimizer's parameter for a key of user code, such as a gathered parameter."""


class HiddenState:
    """Hides the state of one optimizer from user code, or shows it as unsharded.

    Args:
        optimizer: The user's optimizer.
        where: The location of the state, for errors.
        parts: Shows the state as unsharded; None if an access must raise.
    """

    def __init__(self, optimizer: Optimizer, where: str = "", parts: StateParts | None = None) -> None:
        self._optimizer = optimizer
        self._state: Any = optimizer.state
        self._stand_in = cast("Any", _StandIn(self, lambda key: parts.key(key) if parts else key))
        self._where = where
        self._parts = parts
        self._was_accessed = False  # user code has accessed it, and may hold references to its tensors
        self._is_shown = False  # to the engine, or to user code after training
        optimizer.state = self._stand_in

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Show the engine's own state, in a context without user code; reentrant.

        Raises:
            UnsupportedError: User code has assigned another state, which cannot be sharded.
        """
        if self._is_shown:
            yield
            return
        self._take()
        try:
            yield
        finally:
            self._hide()

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Hide the state again, within `stepping`: for a closure."""
        self._hide()
        with clean_up("taking optimizer state over", self._take):
            yield

    def touched(self) -> Any:
        """Show the state as unsharded, because user code accesses it.

        Returns:
            The state.

        Raises:
            UnsupportedError: It cannot be shown.
        """
        refusal = self._where if self._parts is None else self._parts.refusal(self._optimizer)
        if refusal:
            raise UnsupportedError(
                f"`optimizer.state` was read or written while training; {refusal}.", remedy=_REMEDY
            )
        if not (self._is_shown or self._was_accessed):
            self._was_accessed = True
            self._show_unsharded()
        return self._state

    @property
    def held(self) -> Any:
        """The state itself, without the stand-in."""
        return self._optimizer.state if self._is_shown else self._state

    def _take(self) -> None:
        """Take the state over from user code, with the changes that it made."""
        state = self._optimizer.state
        if state is not self._stand_in:
            if self._parts is None:
                raise UnsupportedError(
                    f"another state was assigned to the optimizer while training; {self._where}.",
                    remedy="Resume by `ckpt_path`, or load the state before training, or use 'fsdp_auto'.",
                )
            self._state, self._was_accessed = state, True
        if self._was_accessed and self._parts is not None:
            self._take_shards(self._parts)
        self._is_shown, self._optimizer.state = True, self._state

    def _hide(self) -> None:
        self._is_shown, self._state = False, self._optimizer.state
        self._optimizer.state = self._stand_in
        if self._was_accessed:
            self._show_unsharded()

    def _show_unsharded(self) -> None:
        if self._parts is None:
            return
        for parameter, _, name, value in self._tensors():
            if "_part" in vars(value):
                show_unsharded(value)
                continue
            part = self._parts.part(value, parameter, name)
            if part is not None:
                guard(value, part)

    def _take_shards(self, parts: StateParts) -> None:
        for parameter, entries, name, value in self._tensors():
            if isinstance(value, Guard):
                value._part.flush()
                show_plain(value)
            elif "_part" not in vars(value):
                entries[name] = parts.own(value, parameter)

    def _tensors(self) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, Any]]:
        """Yield every tensor in the state with its parameter, its dict, and its name there."""
        for parameter, entries in self._state.items():
            if isinstance(parameter, Tensor) and isinstance(entries, dict):
                for name, value in list(entries.items()):
                    if isinstance(value, Tensor):
                        yield cast("nn.Parameter", parameter), entries, name, value

    def remove(self) -> None:
        """Show the state to user code again, also after an error."""
        if self._is_shown:
            return
        if self._parts is not None:
            self._take()
        self._is_shown, self._optimizer.state = True, self._state
        for _, _, _, value in self._tensors():
            if "_part" in vars(value):
                show_unsharded(value)
                unguard(value)


def held_state(optimizer: Optimizer) -> Any:
    """Return the state itself, hidden or not, for an engine that reads it outside of the main thread."""
    state = optimizer.state
    return state.owner.held if isinstance(state, _StandIn) else state


class HiddenStates:
    """The hidden states of an engine, by optimizer."""

    def __init__(self) -> None:
        self._hidden: WeakKeyDictionary[Optimizer, HiddenState] = WeakKeyDictionary()

    def hide(self, optimizer: Optimizer, where: str = "", parts: StateParts | None = None) -> None:
        """Hide the state of an optimizer, see `HiddenState` (unless it is hidden)."""
        if optimizer not in self._hidden:
            self._hidden[optimizer] = HiddenState(optimizer, where, parts)

    def of(self, optimizer: Optimizer) -> list[HiddenState]:
        """Return the hidden state of an optimizer, or nothing."""
        state = self._hidden.get(optimizer)
        return [] if state is None else [state]

    def remove(self) -> None:
        """Show all states to user code again."""
        for state in self._hidden.values():
            state.remove()
        self._hidden.clear()


def _forwarded(name: str) -> Any:
    def method(self: _StandIn, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.touched(), name)(*args, **kwargs)

    return method


def _keyed(name: str) -> Any:
    def method(self: _StandIn, parameter: Any, *args: Any) -> Any:
        return getattr(self.touched(), name)(self.key(parameter), *args)

    return method


class _StandIn(dict[Any, Any]):
    """Replaces the state, and forwards every access to it.

    Args:
        owner: Returns the state on an access, or raises.
        key: Returns the optimizer's parameter for a key of user code.
    """

    def __init__(self, owner: HiddenState, key: Callable[[Any], Any]) -> None:
        super().__init__()
        self.owner = owner
        self.touched = owner.touched
        self.key = key

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self.touched(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.touched().__reduce_ex__(protocol)

    __getitem__, __setitem__ = _keyed("__getitem__"), _keyed("__setitem__")
    __delitem__, __contains__ = _keyed("__delitem__"), _keyed("__contains__")
    get, pop, setdefault = _keyed("get"), _keyed("pop"), _keyed("setdefault")
    __iter__, __len__ = _forwarded("__iter__"), _forwarded("__len__")
    __repr__, __eq__ = _forwarded("__repr__"), _forwarded("__eq__")
    keys, values, items = _forwarded("keys"), _forwarded("values"), _forwarded("items")
    popitem, update = _forwarded("popitem"), _forwarded("update")
    clear, copy = _forwarded("clear"), _forwarded("copy")
