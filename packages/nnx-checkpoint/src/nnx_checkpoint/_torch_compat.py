"""List the private names of torch that `nnx_checkpoint` uses.

Nothing else in `nnx_checkpoint` uses a private name. `PRIVATE_NAMES` lists them; tests/test_private_names.py
looks each of them up, and finds the names that are used elsewhere or are in no list.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nnx_base._torch_compat import IMPORT, Private
from nnx_base.errors import CheckpointError

PRIVATE_NAMES = {
    "torch._C.PyTorchFileReader": Private("reading a file of torch.save raises AttributeError"),
    "torch._subclasses.fake_tensor.FakeTensorMode": Private(IMPORT),
    "torch._utils._rebuild_tensor_v2": Private("writing a Lightning file raises AttributeError"),
    "torch._utils._rebuild_tensor_v3": Private("writing a Lightning file raises AttributeError"),
    "torch._weights_only_unpickler": Private("reading a file of torch.save raises AttributeError"),
    "torch.Tensor._make_wrapper_subclass": Private("saving by DCP raises AttributeError"),
    "torch.distributed.checkpoint.filesystem._StorageInfo": Private("converting to DCP raises ImportError"),
    "torch.serialization._load": Private("reading a file of torch.save raises AttributeError"),
    "torch.nn.Module._load_from_state_dict": Private("loading weights raises AttributeError"),
    "Module._load_state_dict_pre_hooks": Private("loading weights raises AttributeError"),
    "Module._load_state_dict_post_hooks": Private("loading weights raises AttributeError"),
    "torch.nn.modules.module._IncompatibleKeys": Private("loading weights raises AttributeError"),
    "FakeStorage._checkpoint_offset": Private("reading a file of torch.save raises CheckpointError"),
}
"""The private names of torch that this module uses, and what happens where torch lacks one."""


class WithoutData(Tensor):
    """A tensor without data, for state dicts of `torch.distributed.checkpoint`.

    DCP asks such tensors for the methods ``__create_write_items__``, ``__create_chunk_list__`` and
    ``__get_tensor_shard__`` of its private protocol `_Checkpointable`.
    """

    @classmethod
    def shaped(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
        """Return a tensor without data of a shape, dtype and device."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse arithmetic: the tensor has no data."""
        raise TypeError(f"{cls.__name__} stands for a shard in a state dict and cannot compute {func}")


class _Reader:
    """Serves the records of a file to `torch.serialization._load`, and records their positions.

    For files with a record ``.format_version`` torch computes the positions of storages from the layout of
    its own writer. A program that rewrites the zip changes them. So this reader hides that record, and torch
    asks the reader for every position.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._reader: Any = torch._C.PyTorchFileReader(str(path))
        self.places: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def has_record(self, name: str) -> bool:
        return name != ".format_version" and bool(self._reader.has_record(name))

    def get_record_offset(self, name: str) -> int:
        if name not in self.places:
            self.places[name] = int(self._reader.get_record_offset(name))
        return self.places[name]


def load_structure(path: Path) -> tuple[Any, dict[str, int]]:
    """Unpickle a file of ``torch.save`` safely, without reading the data of its tensors.

    Under `torch._subclasses.fake_tensor.FakeTensorMode`, `torch.serialization._load` notes where each storage
    is in the file instead of reading it.

    Returns:
        The saved object, and the offset of the data of each storage record.
    """
    reader, load = _Reader(path), cast("Any", torch.serialization._load)
    with FakeTensorMode(), _no_tracebacks():
        loaded = load(reader, "cpu", torch._weights_only_unpickler)
    return loaded, reader.places


@contextmanager
def _no_tracebacks() -> Iterator[None]:
    """Keep torch from printing tracebacks of errors inside `FakeTensorMode`."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def position_in_file(tensor: Tensor) -> int:
    """Return the file position of the storage of a tensor from `load_structure` (``_checkpoint_offset``).

    Raises:
        CheckpointError: torch did not record the position.
    """
    storage = tensor.untyped_storage()
    position = getattr(storage, "_checkpoint_offset", None)
    if position is None and storage.nbytes():
        raise CheckpointError(
            f"torch {torch.__version__} did not record the position of a {storage.nbytes()}-byte tensor.",
            remedy="Read the file with torch 2.11 to 2.14, or save it with a later torch.save.",
        )
    return int(position or 0)


_ENGINES = ("torch.distributed.", "nnx_colossalai.", "fairscale.", "deepspeed.")


def loads_itself(module: nn.Module) -> bool:
    """Return True if the user's code changes how a module loads its own entries.

    The user either overrides `_load_from_state_dict` or registers a hook in `_load_state_dict_pre_hooks`;
    hooks of engines do not count. Overrides of torch's own classes do not count either: they only add
    entries that old files lack.
    """
    hooks = module._load_state_dict_pre_hooks.values()
    return any(map(_is_of_user, hooks)) or not _is_of_torch(module, "_load_from_state_dict")


def _is_of_user(hook: Any) -> bool:
    """Return True if the user registered a hook (torch wraps some; the function is in ``hook``)."""
    return not str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith(_ENGINES)


def overrides_loading(module: nn.Module) -> bool:
    """Return True if the module's class, even one of torch, overrides `_load_from_state_dict`."""
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict


def overrides_load_state_dict(module: nn.Module) -> bool:
    """Return True if the user overrides `load_state_dict`, which torch calls on the outermost module only."""
    return not _is_of_torch(module, "load_state_dict")


def _is_of_torch(module: nn.Module, method: str) -> bool:
    if method in vars(module):
        return False
    return str(getattr(getattr(type(module), method), "__module__", "")).startswith("torch.")


def has_load_hooks(module: nn.Module) -> bool:
    """Return True if user hooks run after loading (``_load_state_dict_post_hooks``)."""
    return any(map(_is_of_user, module._load_state_dict_post_hooks.values()))


def call_load_hooks(module: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    """Call a module's hooks after loading; they may change both lists.

    Each hook gets a `torch.nn.modules.module._IncompatibleKeys`.
    """
    for hook in list(module._load_state_dict_post_hooks.values()):
        hook(module, nn.modules.module._IncompatibleKeys(missing, unexpected))


STORAGE_DTYPES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
"""The element type of each storage class in pickles of ``torch.save``."""


def storage_kind(dtype: torch.dtype) -> Any:
    """Return the class that a file of ``torch.save`` names for the elements of a tensor.

    The class is public, such as `torch.FloatStorage`. Newer element types have none: the file stores
    bytes.
    """
    name = _CLASSES.get(str(dtype).removeprefix("torch."), "UntypedStorage")
    return getattr(torch, name)


def rebuilding(storage: Any, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    """Return the function and arguments by which ``torch.save`` pickles a contiguous tensor.

    The function is `torch._utils._rebuild_tensor_v2` or, for element types without a storage class,
    `torch._utils._rebuild_tensor_v3`. The names belong to the file format.
    """
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    hooks: OrderedDict[Any, Any] = OrderedDict()
    arguments = (storage, 0, shape, tuple(reversed(strides)), False, hooks)
    if str(dtype).removeprefix("torch.") in _CLASSES:
        return torch._utils._rebuild_tensor_v2, arguments
    return torch._utils._rebuild_tensor_v3, (*arguments, dtype)


_CLASSES = {dtype: name for name, dtype in STORAGE_DTYPES.items()}


def storage_info() -> Any:
    """Return the class of an item's position in a DCP directory: file, first byte and length.

    It is `torch.distributed.checkpoint.filesystem._StorageInfo`.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo
