"""Encode objects other than tensor data as typed JSON, which keeps their types.

JSON's own types are unchanged. Every other value is an object with the key ``"$"`` that names its type.
Tensors and shards are lifted out and replaced by references. Decoding never executes or imports anything.
An object without encoding is an error that names its path, or is collected for pickle by opt-in.
This module owns that encoding and never touches files.
"""

from __future__ import annotations

import argparse
import base64
import collections
import enum
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from nnx_base.errors import CheckpointError
from nnx_base.shard import Shard

__all__ = ["Encoder", "EnumName", "decode"]

Opaque = Literal["error", "pickle", "skip"]

_TAG = "$"
_NUMPY_DTYPE = re.compile(r"[<>|=]?[?bBhHiIlLqQefdgFDGSUMmcu]\d{0,6}(\[\d{0,9}\w{1,2}\])?")
_MAX_DEPTH = 200
_LONG_INT = 4096
"""Bits above which Python refuses to print an int in decimal, with a margin."""
_FACTORIES: dict[str, Callable[[], Any]] = {
    "list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EnumName:
    """A member of an enum whose module is not imported in this process.

    Attributes:
        type: ``"module:Class"``.
        name: Name of the member.
    """

    type: str
    name: str


class Encoder:
    """Encodes a tree of Python objects as a tree of JSON values.

    Args:
        prefix: The prefix of the names of lifted tensors.
        opaque: The treatment of an object without encoding: ``"error"`` raises, ``"pickle"`` adds it to
            `opaque_objects`, ``"skip"`` drops it.

    Example:
        >>> Encoder("objects").encode({"betas": (0.9, float("inf"))})
        {'betas': {'$': 'tuple', 'items': [0.9, {'$': 'float', 'value': 'inf'}]}}
    """

    def __init__(self, prefix: str, opaque: Opaque = "error") -> None:
        self.tensors: dict[str, Tensor | Shard] = {}
        """Lifted tensors and shards by name."""
        self.opaque_objects: dict[str, Any] = {}
        """Objects without encoding, by their path in the tree."""
        self._prefix = prefix
        self._opaque = opaque

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:  # noqa: PLR0911 - one branch a type
        """Encode a value.

        Args:
            value: The tree.
            path: The path of the value in the tree, used in names and messages.

        Raises:
            CheckpointError: An object has no encoding, or the tree is nested too deeply or in a cycle.
        """
        if len(path) > _MAX_DEPTH:
            raise CheckpointError(
                f"the object at '{_text(path[:8])}...' is nested deeper than {_MAX_DEPTH} levels.",
                remedy="Break the cycle or flatten the structure.",
            )
        if value is None or type(value) in (bool, str):
            return value
        if isinstance(value, (Tensor, Shard)):
            return {_TAG: "tensor", "name": self._lift(value, path)}
        kind = type(value)
        if kind is int:
            long = value.bit_length() > _LONG_INT
            return {_TAG: "int", "value": hex(value)} if long else value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
        if kind is list:
            return self._items(value, path)
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        return self._encode_other(value, path)

    def _items(self, values: Iterable[Any], path: tuple[str, ...]) -> list[Any]:
        return [self.encode(value, (*path, str(i))) for i, value in enumerate(values)]

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:  # noqa: PLR0911
        kind = type(value)
        if kind is dict:
            if all(type(key) is str and not key.startswith(_TAG) for key in value):
                return {key: self.encode(item, (*path, key)) for key, item in value.items()}
            return {_TAG: "dict", "items": self._pairs(value, path)}
        if kind is collections.Counter:  # an extra key, so that readers without it still find the dict
            return {_TAG: "dict", "class": "Counter", "items": self._pairs(value, path)}
        if kind is collections.OrderedDict:
            return {_TAG: "OrderedDict", "items": self._pairs(value, path)}
        if isinstance(value, collections.defaultdict) and kind is collections.defaultdict:
            factory = value.default_factory
            name = None if factory is None else next((n for n, f in _FACTORIES.items() if f is factory), "")
            if name != "":
                return {_TAG: "defaultdict", "factory": name, "items": self._pairs(value, path)}
        if _is_attribute_dict(kind):
            return {_TAG: "AttributeDict", "items": self._pairs(value, path)}
        return self._unknown(value, path)

    def _pairs(self, value: dict[Any, Any], path: tuple[str, ...]) -> list[Any]:
        return [
            [self.encode(key, (*path, f"key {key!r}")), self.encode(item, (*path, str(key)))]
            for key, item in value.items()
        ]

    def _encode_other(self, value: Any, path: tuple[str, ...]) -> Any:  # noqa: PLR0911 - one branch a type
        kind = type(value)
        if isinstance(value, enum.Enum):
            if value.name in kind.__members__:
                return {_TAG: "enum", "type": f"{kind.__module__}:{kind.__qualname__}", "name": value.name}
        elif kind is tuple:
            return {_TAG: "tuple", "items": self._items(value, path)}
        elif kind in (set, frozenset):
            items = sorted(self._items(value, path), key=json.dumps)
            return {_TAG: kind.__name__, "items": items}
        elif kind is collections.deque:
            return {_TAG: "deque", "maxlen": value.maxlen, "items": self._items(value, path)}
        elif kind is argparse.Namespace:
            return {_TAG: "Namespace", "items": self._pairs(vars(value), path)}
        elif isinstance(value, (np.generic, np.ndarray)):
            return self._encode_numpy(value, path)
        else:
            leaf = _encode_leaf(value)
            if leaf is not None:
                return leaf
        return self._unknown(value, path)

    def _encode_numpy(self, value: Any, path: tuple[str, ...]) -> Any:
        plain = isinstance(value, np.generic) or type(value) is np.ndarray
        if not plain or value.dtype.hasobject or value.dtype.kind == "V":
            return self._unknown(value, path)
        body = {"dtype": value.dtype.str, "data": base64.b64encode(value.tobytes()).decode()}
        if isinstance(value, np.generic):
            return {_TAG: "numpy.scalar", **body}
        return {_TAG: "numpy.array", "shape": list(value.shape), **body}

    def _lift(self, value: Tensor | Shard, path: tuple[str, ...]) -> str:
        name = wanted = ".".join((self._prefix, *path))
        number = 1
        while name in self.tensors:
            number += 1
            name = f"{wanted}#{number}"
        self.tensors[name] = value
        return name

    def _unknown(self, value: Any, path: tuple[str, ...]) -> Any:
        if self._opaque == "skip":
            return None
        if self._opaque == "pickle":
            place = _text(path)
            self.opaque_objects[place] = value
            return {_TAG: "opaque", "place": place}
        kind = type(value)
        instead = (
            "Store its `state_dict()` instead" if hasattr(value, "state_dict") else "Remove or convert it"
        )
        raise CheckpointError(
            f"the object at '{_text(path)}' is a {kind.__module__}.{kind.__qualname__}, "
            "which has no safe encoding in a checkpoint.",
            remedy=f'{instead}, or allow pickle for such objects: opaque_objects="pickle" on the '
            'strategy or on nnx.CheckpointIO, opaque="pickle" in nnx_checkpoint.save.',
        )


def _encode_leaf(value: Any) -> Any:  # noqa: PLR0911 - one branch a type
    kind = type(value)
    if kind in (bytes, bytearray):
        return {_TAG: kind.__name__, "data": base64.b64encode(value).decode()}
    if kind is complex:
        return {_TAG: "complex", "value": [_number(value.real), _number(value.imag)]}
    if isinstance(value, pathlib.PurePath):
        return {_TAG: "path", "value": str(value)}
    if kind is torch.Size:
        return {_TAG: "torch.Size", "items": list(value)}
    if kind is torch.dtype:
        return {_TAG: "torch.dtype", "value": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {_TAG: "torch.device", "value": str(value)}
    return None


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _text(path: tuple[str, ...]) -> str:
    return ".".join(path) or "(the root)"


def _is_attribute_dict(kind: type) -> bool:
    """Return True for Lightning's dict with attribute access, from any of its three packages."""
    return kind.__name__ == "AttributeDict" and kind.__module__.split(".")[0] in (
        "lightning", "lightning_fabric", "pytorch_lightning",
    )  # fmt: skip


def decode(
    value: Any, *, tensor: Callable[[str], Any], opaque: Callable[[str], Any], source: str = "objects"
) -> Any:
    """Rebuild the tree that an `Encoder` encoded.

    Args:
        value: The JSON values.
        tensor: Function from a name to its tensor.
        opaque: Function from a path to its pickled object.
        source: The origin of the values, used in messages.

    Raises:
        CheckpointError: No encoder produces these values.
    """

    def visit(item: Any) -> Any:  # noqa: PLR0911 - one branch a type
        if isinstance(item, list):
            return [visit(part) for part in item]
        if not isinstance(item, dict):
            return item
        tag = item.get(_TAG)
        if tag is None:
            return {key: visit(part) for key, part in item.items()}
        if tag == "tensor":
            return tensor(_name(item["name"]))
        if tag == "opaque":
            return opaque(item["place"])
        if tag in _CONTAINERS:
            items = [visit(part) for part in item["items"]]
            if tag in _HASHING:
                counts = HashCounts()
                for part in items:
                    counts.add(hash(part if tag in _SETS else part[0]))
            return _CONTAINERS[tag](items, item)
        return _LEAVES[tag](item)

    try:
        return visit(value)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise CheckpointError(
            f"'{source}' is malformed: {type(error).__name__}: {error}.",
            remedy="It was written by another program or a newer nnx; upgrade, or resume from another "
            "checkpoint.",
        ) from error


class HashCounts:
    """Counts the hashes of keys: Python compares keys of equal hash in pairs, and a file can hold many.

    Only the hashes of strings are unpredictable. At most 34 numbers of 64 bits have the same hash.
    """

    _MOST = 64

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, hashed: int) -> None:
        """Count one key of a dict or a set by its hash.

        Raises:
            ValueError: More than 64 keys have one hash.
        """
        count = self._counts[hashed] = self._counts.get(hashed, 0) + 1
        if count > self._MOST:
            raise ValueError(f"more than {self._MOST} keys have one hash")


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:50]!r} is not the name of a tensor")
    return value


def _attribute_dict(items: list[Any], _: Any) -> dict[Any, Any]:
    module = sys.modules.get("lightning.fabric.utilities.data")
    made: dict[Any, Any] = module.AttributeDict() if module is not None else {}
    made.update(items)
    return made


def _defaultdict(items: list[Any], item: Any) -> Any:
    name = item["factory"]
    return collections.defaultdict(None if name is None else _FACTORIES[name], items)


def _enum(item: Any) -> Any:
    """Return the enum's member if its class is imported (a checkpoint must never cause an import)."""
    module, _, qualname = item["type"].partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if found is not None else None
    if isinstance(found, type) and issubclass(found, enum.Enum) and item["name"] in found.__members__:
        return found[item["name"]]
    return EnumName(item["type"], item["name"])


def _dtype(item: Any) -> torch.dtype:
    found = vars(torch).get(item["value"])
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype {item['value']!r}")
    return found


def _array(item: Any) -> Any:
    if not _NUMPY_DTYPE.fullmatch(item["dtype"]):
        raise ValueError(f"no dtype {item['dtype']!r}")
    return np.frombuffer(_data(item), dtype=np.dtype(item["dtype"]))


def _data(item: Any) -> bytes:
    return base64.b64decode(item["data"], validate=True)


_CONTAINERS: dict[str, Callable[[list[Any], Any], Any]] = {
    "tuple": lambda items, _: tuple(items),
    "set": lambda items, _: set(items),
    "frozenset": lambda items, _: frozenset(items),
    "deque": lambda items, item: collections.deque(items, item["maxlen"]),
    "dict": lambda items, item: (collections.Counter if item.get("class") == "Counter" else dict)(
        dict(items)
    ),
    "OrderedDict": lambda items, _: collections.OrderedDict(items),
    "defaultdict": _defaultdict,
    "AttributeDict": _attribute_dict,
    "Namespace": lambda items, _: argparse.Namespace(**dict(items)),
    "torch.Size": lambda items, _: torch.Size(items),
}
_SETS = ("set", "frozenset")
_HASHING = (*_SETS, "dict", "OrderedDict", "defaultdict", "AttributeDict")
_LEAVES: dict[str, Callable[[Any], Any]] = {
    "int": lambda item: int(item["value"], 16),
    "float": lambda item: float(item["value"]),
    "complex": lambda item: complex(*map(float, item["value"])),
    "bytes": _data,
    "bytearray": lambda item: bytearray(_data(item)),
    "path": lambda item: pathlib.Path(item["value"]),
    "enum": _enum,
    "torch.dtype": _dtype,
    "torch.device": lambda item: torch.device(item["value"]),
    "numpy.scalar": lambda item: _array(item)[0],
    "numpy.array": lambda item: _array(item).reshape(item["shape"]).copy(),
}
