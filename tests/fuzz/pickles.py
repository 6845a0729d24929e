"""Pickles as trees that can be changed and written again; no name in a pickle is imported."""

from __future__ import annotations

import io
import pickle
from typing import Any

__all__ = ["Made", "Pairs", "Stored", "Tup", "dump_pickle", "load_pickle"]


class Tup(list[Any]):
    """A tuple, of which an item can be replaced."""


class Pairs(list[Any]):
    """Keys and values of a dict, without hashing the keys."""

    def items(self) -> Pairs:
        """Return the items, as of a dict."""
        return self


class Made:
    """The result of a call in a pickle; each called name has a subclass."""

    symbol = ("", "")

    def __new__(cls, *args: Any) -> Made:
        made = super().__new__(cls)
        made.args, made.state, made.items, made.values = Tup(args), None, {}, []
        return made

    args: Any
    state: Any
    items: dict[Any, Any]
    values: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        """Do as the pickle does with a list."""
        self.values.append(value)

    def extend(self, values: Any) -> None:
        """Do as the pickle does with a list."""
        self.values.extend(values)


class Stored:
    """A reference to a storage of torch, which is outside the pickle."""

    def __init__(self, pid: Any) -> None:
        self.pid = pid


class _Loader(pickle.Unpickler):
    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw))
        self._known: dict[tuple[str, str], type[Made]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        symbol = (module, name)
        return self._known.setdefault(symbol, type("Made", (Made,), {"symbol": symbol}))

    def persistent_load(self, pid: Any, /) -> Any:
        return Stored(pid)


def load_pickle(raw: bytes) -> Any:
    """The tree of a pickle."""
    return _thawed(_Loader(raw).load(), {})


def _thawed(value: Any, memo: dict[int, Any]) -> Any:
    """Return the same with `Tup` for every tuple that is no key; shared objects stay shared."""
    if id(value) in memo:
        return memo[id(value)][1]
    made = value
    if type(value) is tuple:
        made = Tup(_thawed(item, memo) for item in value)
    elif isinstance(value, list):
        value[:] = [_thawed(item, memo) for item in value]
    elif isinstance(value, dict):
        for key in value:
            value[key] = _thawed(value[key], memo)
    elif isinstance(value, Made):
        value.args, value.state = _thawed(value.args, memo), _thawed(value.state, memo)
        value.items, value.values = _thawed(value.items, memo), _thawed(value.values, memo)
        for key in value.items:
            _thawed(key, memo)
    elif isinstance(value, Stored):
        value.pid = _thawed(value.pid, memo)
    memo[id(value)] = (value, made)
    return made


class _Dumper(pickle._Pickler):  # type: ignore[name-defined]  # the one that is written in Python
    def persistent_id(self, value: Any) -> Any:
        return value.pid if isinstance(value, Stored) else None

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if isinstance(value, Tup):
            super().save(tuple(value))
        elif isinstance(value, type) and issubclass(value, Made):
            self.write(pickle.GLOBAL + "\n".join((*value.symbol, "")).encode())
        elif isinstance(value, Made) and id(value) not in self.memo:
            self._save_made(value)
        else:
            super().save(value, save_persistent_id)

    def _save_made(self, value: Made) -> None:
        self.save(type(value))
        self.save(Tup(value.args))
        self.write(pickle.REDUCE)
        self.memoize(value)
        for key, item in value.items.items():
            self.save(key)
            self.save(item)
            self.write(pickle.SETITEM)
        for item in value.values:
            self.save(item)
            self.write(pickle.APPEND)
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)


def dump_pickle(tree: Any) -> bytes:
    """The pickle of a tree."""
    target = io.BytesIO()
    _Dumper(target, protocol=2).dump(tree)
    return target.getvalue()
