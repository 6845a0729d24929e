"""An optimizer's state that user code must not touch while it trains, because it would find a part of it.

An engine that keeps the state elsewhere, or only that of what a rank owns, hides it: a sum over it would be
one rank's, and a change might have no effect. Whoever touches it gets an error. The engine shows it to the
optimizer's own step, to checkpoints and, at the end, to everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from torch.optim import Optimizer

from nnx.errors import UnsupportedError

__all__ = ["HiddenState"]

_REMEDY = "Look at it in a checkpoint or when `fit` is over, or use strategy 'fsdp_auto'."


class HiddenState:
    """Hides the state of one optimizer.

    Args:
        optimizer: The user's.
        where: What an error says of the place where the state is: "it lies in ...".
    """

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        self._optimizer = optimizer
        self._state = optimizer.state
        self._refusing = cast("Any", _Refusing(where))
        self._where = where
        self._is_shown = False  # to the engine, or to everybody after the end
        optimizer.state = self._refusing

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Around what is not user code, also within itself.

        Raises:
            UnsupportedError: User code has given the optimizer another state.
        """
        if self._is_shown:
            yield
            return
        if self._optimizer.state is not self._refusing:
            raise UnsupportedError(
                f"the optimizer was given another state while training; {self._where}.",
                remedy="Resume by `ckpt_path`, load the state before training, or use strategy 'fsdp_auto'.",
            )
        self._is_shown, self._optimizer.state = True, self._state
        try:
            yield
        finally:
            self._hide()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Within `shown`: around user code, such as a closure."""
        self._hide()
        try:
            yield
        finally:
            self._is_shown, self._optimizer.state = True, self._state

    def _hide(self) -> None:
        self._is_shown, self._state = False, self._optimizer.state
        self._optimizer.state = self._refusing

    def remove(self) -> None:
        """Let everybody touch the state again, also after an error."""
        if not self._is_shown:
            self._is_shown, self._optimizer.state = True, self._state


class _Refusing(dict[Any, Any]):
    """In the place of the state."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            f"`optimizer.state` was read or written while training; {self._where}.", remedy=_REMEDY
        )

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = keys = values = items = pop = popitem = setdefault = update = clear = copy = _refuse
