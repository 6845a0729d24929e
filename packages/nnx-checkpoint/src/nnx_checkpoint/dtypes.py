"""The element types that a checkpoint can hold, and how safetensors names them.

Names are torch's without the ``torch.`` prefix. This module never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DTYPES", "width"]


@dataclass(frozen=True, slots=True)
class StoredType:
    """How one element type is stored.

    Attributes:
        code: Its name in a safetensors header.
        itemsize: Bytes of one element.
        parts: Numbers that make up one element: 2 for complex types, which safetensors does not have
            and which are therefore stored with a further last dim of extent 2.
    """

    code: str
    itemsize: int
    parts: int = 1


DTYPES: dict[str, StoredType] = {
    "bool": StoredType("BOOL", 1),
    "uint8": StoredType("U8", 1),
    "int8": StoredType("I8", 1),
    "uint16": StoredType("U16", 2),
    "int16": StoredType("I16", 2),
    "uint32": StoredType("U32", 4),
    "int32": StoredType("I32", 4),
    "uint64": StoredType("U64", 8),
    "int64": StoredType("I64", 8),
    "float8_e4m3fn": StoredType("F8_E4M3", 1),
    "float8_e5m2": StoredType("F8_E5M2", 1),
    "float16": StoredType("F16", 2),
    "bfloat16": StoredType("BF16", 2),
    "float32": StoredType("F32", 4),
    "float64": StoredType("F64", 8),
    "complex64": StoredType("F32", 8, parts=2),
    "complex128": StoredType("F64", 16, parts=2),
}


def width(dtype_name: str) -> int:
    """Bytes of one number of this type; a complex element has two of them."""
    stored = DTYPES[dtype_name]
    return stored.itemsize // stored.parts
