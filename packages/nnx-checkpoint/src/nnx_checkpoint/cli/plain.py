"""The objects of a checkpoint as plain JSON, for people and for ``--json``: nothing is decoded or imported.

`docs/checkpoint-format.md` specifies the typed JSON that is read here.
"""

from __future__ import annotations

import base64
from typing import Any

__all__ = ["plain", "shown"]

_TAG = "$"
_MAPPINGS = {"dict", "OrderedDict", "AttributeDict", "Namespace", "defaultdict"}
_SEQUENCES = {"tuple", "set", "frozenset", "deque", "torch.Size"}


def plain(tree: Any) -> Any:
    """Typed JSON without its types: containers become lists and dicts, other values strings.

    Example:
        >>> plain({"betas": {"$": "tuple", "items": [0.9, {"$": "float", "value": "inf"}]}})
        {'betas': [0.9, 'inf']}
    """
    if isinstance(tree, list):
        return [plain(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = tree.get(_TAG)
    if tag is None:
        return {key: plain(value) for key, value in tree.items()}
    if tag in _MAPPINGS:
        return {str(plain(key)): plain(value) for key, value in tree["items"]}
    if tag in _SEQUENCES:
        return [plain(item) for item in tree["items"]]
    return _leaf(tag, tree)


def _leaf(tag: str, value: dict[str, Any]) -> Any:  # noqa: PLR0911 - one branch a type
    if tag == "tensor":
        return f"tensor {value['name']}"
    if tag == "enum":
        return f"{value['type'].partition(':')[2]}.{value['name']}"
    if tag == "torch.dtype":
        return f"torch.{value['value']}"
    if tag == "int":
        return int(value["value"], 16)
    if tag in ("bytes", "bytearray"):
        return f"{len(base64.b64decode(value['data']))} bytes"
    if tag == "numpy.scalar":
        return _number(value)
    if tag == "numpy.array":
        return f"array of {'x'.join(map(str, value['shape'])) or 'no'} {value['dtype']}"
    if tag == "opaque":
        return f"pickled object at {value['place']}"
    return str(value.get("value", tag))


def _number(value: dict[str, Any]) -> Any:
    import numpy as np

    scalar = np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))[0].item()
    return scalar if isinstance(scalar, (bool, int, float, str)) else str(scalar)


def shown(value: Any, limit: int = 60) -> str:
    """A plain value on part of a line; of a dict, what is neither null nor false.

    Example:
        >>> shown({"lr": 0.1, "betas": [0.9, 0.99], "fused": None})
        'lr=0.1, betas=[0.9, 0.99]'
    """
    if isinstance(value, dict):
        told = {key: item for key, item in value.items() if item is not None and item is not False}
        return ", ".join(f"{key}={shown(item, limit)}" for key, item in told.items())
    text = "[" + ", ".join(map(shown, value)) + "]" if isinstance(value, list) else str(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
