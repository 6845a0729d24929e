"""List the classes that unpickling restores with ``weights_only=True``.

Files of Lightning and of users hold a few harmless types that torch's restricted unpickler does not know:
paths, argparse's Namespace, numpy's scalars and arrays. It also refuses to fill subclasses of dict and list,
even if they are registered as safe. For these it fills a plain dict or list, which `StandIns` replaces
afterwards. Nothing here runs code from a file: each class only holds data.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nnx_base.errors import CheckpointError
from nnx_checkpoint.unpickling.cost import MOST_OBJECTS

_ATTRIBUTE_DICTS = (
    "lightning.fabric.utilities.data",
    "lightning_fabric.utilities.data",
    "pytorch_lightning.utilities.parsing",
    "lightning.pytorch.utilities.parsing",
)


_NUMPY_KINDS = "?bBhHiIlLqQefdgFDGSUMm"


class Inert:
    """A stand-in for a class of another program, which keeps the arguments and does nothing."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:  # noqa: D102 - as of any class
        made = super().__new__(cls)
        made.arguments = args
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


def harmless() -> list[Any]:
    """Return classes and functions that only make data from data, or pairs of one and its pickled name."""
    plain = [argparse.Namespace, frozenset, list, dict, tuple, int, float, str, bytes, bool, slice, range]
    return [*plain, *_paths(), *_numpy()]


def _paths() -> list[tuple[Any, str]]:
    """Return the path classes; paths of another system get their pure form, which works on every system."""
    kinds = {
        "PosixPath": pathlib.PosixPath if pathlib.Path is not pathlib.WindowsPath else pathlib.PurePosixPath,
        "WindowsPath": pathlib.PureWindowsPath,
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
    }
    return [(kind, f"{module}.{name}") for module in _PATHLIB for name, kind in kinds.items()]


_PATHLIB = ("pathlib", "pathlib._local")
"""The module name in pickles of Python 3.13, which moved the classes."""


def _numpy() -> list[Any]:
    scalar: Any = np.float64(0).__reduce__()[0]
    rebuild: Any = np.zeros(0).__reduce__()[0]
    functions = [
        pair
        for core in ("numpy.core.multiarray", "numpy._core.multiarray")
        for pair in ((scalar, f"{core}.scalar"), (rebuild, f"{core}._reconstruct"))
    ]
    return [np.ndarray, np.dtype, *{type(np.dtype(kind)) for kind in _NUMPY_KINDS}, *functions]


def refuse_endless(tree: Any, *, nbytes: int, source: str, records: tuple[type, ...] = ()) -> None:
    """Refuse nested containers with far more items than their bytes can hold.

    A list that holds another list twice, which holds the next one twice, and so on, has 2^40 leaves in two
    kilobytes: a walk over it never ends.

    Args:
        tree: The unpickled tree.
        nbytes: The number of bytes of its source.
        source: Path of the file, for messages.
        records: Further classes whose attributes are counted.

    Raises:
        CheckpointError: The tree has more objects than a million and than its bytes.
    """
    left, pending = max(MOST_OBJECTS, nbytes), [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            inner = list(value.values())
        elif isinstance(value, (list, tuple, collections.deque, set, frozenset)):
            inner = list(value)
        elif isinstance(value, (argparse.Namespace, Inert, *records)):
            inner = list(vars(value).values())
        else:
            continue
        pending += inner
        left -= len(inner)
        if left < 0:
            raise CheckpointError(
                f"'{source}' nests more than {max(MOST_OBJECTS, nbytes):,} objects in {nbytes:,} bytes.",
                remedy="No training program writes such a file; use another checkpoint.",
            )


class StandIns:
    """Plain stand-ins for special containers during one load.

    Args:
        inert: Names of classes of other programs; `Inert` replaces each.
    """

    def __init__(self, inert: Sequence[str] = ()) -> None:
        self._made: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
        self._inert = inert

    def classes(self) -> list[tuple[Any, str]]:
        """Return the stand-in of each class, by the class's pickled name."""
        return [
            *((self._dict_class(module), f"{module}.AttributeDict") for module in _ATTRIBUTE_DICTS),
            (self._defaultdict, "collections.defaultdict"),
            (self._deque, "collections.deque"),
            *((type(name.rpartition(".")[2], (Inert,), {}), name) for name in self._inert),
        ]

    def _dict_class(self, module: str) -> Any:
        def new(cls: type, *args: Any) -> dict[Any, Any]:
            return self._note({}, lambda items: _attribute_dict(module, items))  # type: ignore[no-any-return]

        return type("AttributeDict", (), {"__new__": new})

    def _defaultdict(self, factory: Any = None) -> Any:
        return self._note({}, lambda items: collections.defaultdict(factory, items))

    def _deque(self, items: Sequence[Any] = (), maxlen: int | None = None) -> Any:
        return self._note(list(items), lambda values: collections.deque(values, maxlen))

    def _note(self, made: Any, finish: Callable[[Any], Any]) -> Any:
        self._made[id(made)] = (made, finish)
        return made

    def restore(self, tree: Any) -> Any:
        """Return the same tree with the real containers."""
        if not self._made:
            return tree
        if isinstance(tree, dict):
            for key, value in tree.items():
                tree[key] = self.restore(value)
        elif isinstance(tree, list):
            tree[:] = [self.restore(value) for value in tree]
        elif type(tree) is tuple:
            return tuple(self.restore(value) for value in tree)
        elif isinstance(tree, Inert):
            tree.arguments, tree.state = self.restore(tree.arguments), self.restore(tree.state)
        _, finish = self._made.get(id(tree), (None, None))
        return tree if finish is None else finish(tree)


def _attribute_dict(module: str, items: dict[Any, Any]) -> dict[Any, Any]:
    """Return Lightning's class if one of its packages is installed, else a plain dict."""
    for candidate in (module, *_ATTRIBUTE_DICTS):
        try:
            made: dict[Any, Any] = importlib.import_module(candidate).AttributeDict()
        except (ImportError, AttributeError):
            continue
        made.update(items)
        return made
    return items
