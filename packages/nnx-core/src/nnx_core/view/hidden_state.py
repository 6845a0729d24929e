"""An optimizer's state that is elsewhere, or sharded, during training, and its view in user code.

A sum over the state would be one rank's, and a change might have no effect. So between steps another object
stands in the state's place, and notices whoever touches it. What happens then is the engine's choice: either
the tensors look whole (`nnx_core.view.guard`) from then on, or there is an error. Nobody pays who does not
look. The engine has the state to itself in steps and checkpoints, and at the end it is everybody's.
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
from nnx_core.view.guard import Guard, Part, guard, show_plain, show_whole, unguard

_REMEDY = "Look at it in a checkpoint or when `fit` is over, or use strategy 'fsdp_auto'."


class StateParts(Protocol):
    """An engine's sharded optimizer state."""

    def refusal(self, optimizer: Optimizer) -> str | None:
        """Where the state is, if it cannot be shown: "it lies in ..."; the same on all ranks."""

    def part(self, value: Tensor, parameter: nn.Parameter, name: str) -> Part | None:
        """Return the part of a tensor in the state; None if this rank holds all of it.

        Args:
            value: The tensor.
            parameter: The parameter it belongs to.
            name: The name of it in the state, such as ``exp_avg``.
        """

    def own(self, value: Tensor, parameter: nn.Parameter) -> Tensor:
        """This rank's part of what user code has put into the state of a parameter; itself if it is none."""

    def key(self, parameter: Any) -> Any:
        """The parameter that the optimizer has, of what user code may have in its place."""


class HiddenState:
    """Hides the state of one optimizer from user code, or shows it whole.

    Args:
        optimizer: The user's.
        where: The place of the state, for errors: "it lies in ...".
        parts: Shows it whole; None if nothing can, so that touching it is an error.
    """

    def __init__(self, optimizer: Optimizer, where: str = "", parts: StateParts | None = None) -> None:
        self._optimizer = optimizer
        self._state: Any = optimizer.state
        self._stand_in = cast("Any", _StandIn(self, lambda key: parts.key(key) if parts else key))
        self._where = where
        self._parts = parts
        self._is_whole = False  # user code has looked at it, and may do so again by what it holds of it
        self._is_shown = False  # to the engine, or to everybody after the end
        optimizer.state = self._stand_in

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Show the engine's state, around code other than the user's; reentrant.

        Raises:
            UnsupportedError: User code has given the optimizer another state, of which no part can be taken.
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
        """User code looks at the state: show it whole.

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
        if not (self._is_shown or self._is_whole):
            self._is_whole = True
            self._show_wholes()
        return self._state

    @property
    def held(self) -> Any:
        """The state itself."""
        return self._optimizer.state if self._is_shown else self._state

    def _take(self) -> None:
        """Take the state over from user code, with its changes."""
        state = self._optimizer.state
        if state is not self._stand_in:
            if self._parts is None:
                raise UnsupportedError(
                    f"the optimizer was given another state while training; {self._where}.",
                    remedy="Resume by `ckpt_path`, or load the state before training, or use 'fsdp_auto'.",
                )
            self._state, self._is_whole = state, True
        if self._is_whole and self._parts is not None:
            self._take_parts(self._parts)
        self._is_shown, self._optimizer.state = True, self._state

    def _hide(self) -> None:
        self._is_shown, self._state = False, self._optimizer.state
        self._optimizer.state = self._stand_in
        if self._is_whole:
            self._show_wholes()

    def _show_wholes(self) -> None:
        if self._parts is None:
            return
        for parameter, _, name, value in self._tensors():
            if "_part" in vars(value):
                show_whole(value)
                continue
            part = self._parts.part(value, parameter, name)
            if part is not None:
                guard(value, part)

    def _take_parts(self, parts: StateParts) -> None:
        for parameter, entries, name, value in self._tensors():
            if isinstance(value, Guard):
                value._part.flush()
                show_plain(value)
            elif "_part" not in vars(value):
                entries[name] = parts.own(value, parameter)

    def _tensors(self) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, Any]]:
        """Every tensor in the state: its parameter, where it is, and by which name."""
        for parameter, entries in self._state.items():
            if isinstance(parameter, Tensor) and isinstance(entries, dict):
                for name, value in list(entries.items()):
                    if isinstance(value, Tensor):
                        yield cast("nn.Parameter", parameter), entries, name, value

    def remove(self) -> None:
        """Let everybody touch the state again, also after an error."""
        if self._is_shown:
            return
        if self._parts is not None:
            self._take()
        self._is_shown, self._optimizer.state = True, self._state
        for _, _, _, value in self._tensors():
            if "_part" in vars(value):
                show_whole(value)
                unguard(value)


def held_state(optimizer: Optimizer) -> Any:
    """The state itself, hidden or not: for an engine that looks at it beside the main thread."""
    state = optimizer.state
    return state.owner.held if isinstance(state, _StandIn) else state


class HiddenStates:
    """The states of an engine's optimizers, by optimizer."""

    def __init__(self) -> None:
        self._hidden: WeakKeyDictionary[Optimizer, HiddenState] = WeakKeyDictionary()

    def hide(self, optimizer: Optimizer, where: str = "", parts: StateParts | None = None) -> None:
        """Hide one, as `HiddenState` says, unless it is hidden."""
        if optimizer not in self._hidden:
            self._hidden[optimizer] = HiddenState(optimizer, where, parts)

    def of(self, optimizer: Optimizer) -> list[HiddenState]:
        """Return the hidden state of an optimizer, or nothing."""
        state = self._hidden.get(optimizer)
        return [] if state is None else [state]

    def remove(self) -> None:
        """Let everybody touch these states again."""
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
    """Stands in the place of the state, and forwards every access to the state.

    Args:
        owner: Gives the state, or refuses.
        key: Gives the parameter that the state knows.
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
