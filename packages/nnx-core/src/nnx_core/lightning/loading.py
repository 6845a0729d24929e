"""`nnx.load_from_checkpoint`: load a model from a checkpoint of any format, without a Trainer.

`nnx_core.lightning.model_class` builds the class with the checkpoint's hyper-parameters. The weights are then
read into the module's own memory, so they are in memory once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import nnx_checkpoint as storage
from nnx_base.shard import Shard, shard_of
from nnx_checkpoint._torch_compat import overrides_load_state_dict
from nnx_checkpoint.reading.loading import load_model
from nnx_checkpoint.reading.naming import LazyStateDict, stored_objects
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.state import ModelState, describe_model
from nnx_core.errors import OptionError
from nnx_core.lightning.compat import WeightsOnDisk, migrate_checkpoint
from nnx_core.lightning.model_class import Kind, Trust, build, kind_of

__all__ = ["load_from_checkpoint"]


log = logging.getLogger("nnx.lightning")

T = TypeVar("T")
MapLocation = str | int | torch.device | Mapping[str, str] | Callable[..., Any] | None


def load_from_checkpoint(
    cls: type[T],
    path: str | os.PathLike[str],
    *,
    map_location: MapLocation = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    trust: Trust = False,
    **kwargs: Any,
) -> T:
    """Build a model, or a data module, from a checkpoint of any known format.

    It does the same as ``LightningModule.load_from_checkpoint``, which opens single files only: the class
    gets the saved hyper-parameters, ``configure_model`` and ``on_load_checkpoint`` run, and the weights are
    loaded. They are read into the module's own memory, without a second copy of the model.

    Args:
        cls: A LightningModule or LightningDataModule of either Lightning package, or a plain ``nn.Module``.
        path: A checkpoint of any format: a directory, a file or a URL.
        map_location: The device of the model, in any form that ``torch.load`` takes. By default it stays on
            the device on which the class builds it.
        strict: Raise for missing and unexpected names; by default the module's ``strict_loading``, which is
            True unless it was set.
        weights_only: False executes code in the checkpoint, which may be malicious, and implies
            ``trust=True``.
        trust: Names in a LightningCLI configuration of the checkpoint that may be imported and called, such
            as ``["my.module.Encoder"]``; True for all of them. Without it the class gets only plain data.
        **kwargs: Arguments for the class, which take precedence over saved hyper-parameters.

    Returns:
        The model, in training mode as it was built.

    Raises:
        CheckpointError: There is no checkpoint, its hyper-parameters do not fit the class, or it is one of
            another model.
        OptionError: `cls` cannot be loaded, or `strict` contradicts it.

    Example:
        ``model = nnx.load_from_checkpoint(Net, "last.ckpt", map_location="cuda", dropout=0.0)``
    """
    kind = kind_of(cls)
    stored = WeightsOnDisk(storage.open_checkpoint(path, weights_only=weights_only is not False))
    content = _lightning_dict(stored, kind)
    trust = True if weights_only is False else trust
    made: T = build(cls, kind, content, kwargs, source=str(path), trust=trust)
    if isinstance(made, nn.Module):
        _load_model(made, content, kind, _is_strict(made, kind, strict), _device(map_location))
    else:
        _load_data_module(made, content)
    return made


def _lightning_dict(stored: Checkpoint, kind: Kind) -> dict[str, Any]:
    """Return the dict that Lightning's hooks expect, with a ``state_dict`` that is read on use."""
    content = {**stored_objects(stored, "trainer"), "state_dict": LazyStateDict(stored)}
    return migrate_checkpoint(kind.root, content) if kind.root else content


def _load_data_module(made: Any, content: Mapping[str, Any]) -> None:
    state = content.get(type(made).__qualname__)
    if state is not None:
        made.load_state_dict(state)


def _load_model(
    module: nn.Module, content: dict[str, Any], kind: Kind, strict: bool, device: torch.device | None
) -> None:
    if kind.is_module:
        made: Any = module
        made.configure_model()
        made.on_load_checkpoint(content)
    if device is not None:
        module.to(device)
    state = describe_model(module, _shard_of)
    if not strict and not overrides_load_state_dict(module):
        _warn_of_names(state, content["state_dict"])
    load_model(module, state, content["state_dict"], strict=strict, device=device)


def _shard_of(tensor: Tensor, *, parameter: nn.Parameter | None = None) -> Shard:
    if nn.parameter.is_lazy(tensor):  # a lazy layer allocates it in its own hook
        return Shard((), tensor.dtype, (), ())
    return shard_of(tensor)


def _warn_of_names(state: ModelState, state_dict: Mapping[str, Any]) -> None:
    known = {*state.tensors, *state.aliases, *state.extra}
    for title, names in (
        ("are in the model and not in the checkpoint", [name for name in known if name not in state_dict]),
        ("are in the checkpoint and not in the model", [name for name in state_dict if name not in known]),
    ):
        if names:
            log.warning("%d names %s: %s", len(names), title, ", ".join(sorted(names)[:8]))


def _is_strict(module: Any, kind: Kind, strict: bool | None) -> bool:
    """Return the caller's `strict`, or the module's own; they must not contradict each other."""
    if not kind.is_module:
        return strict is not False
    chosen = bool(module.strict_loading)
    if strict is not None and strict != chosen and module._strict_loading is not None:
        raise OptionError(
            f"strict={strict} contradicts {type(module).__name__}.strict_loading={chosen}.",
            remedy="Leave `strict` out, or set the same value in the class.",
        )
    return chosen if strict is None else strict


def _device(map_location: MapLocation) -> torch.device | None:
    """Return the device for CPU tensors of a checkpoint; None keeps the device that the class builds on."""
    if map_location is None:
        return None
    if isinstance(map_location, Mapping):
        return torch.device(map_location["cpu"]) if "cpu" in map_location else None
    if callable(map_location):
        mapped = map_location(torch.empty(0).untyped_storage(), "cpu")
        return None if mapped is None else torch.device(mapped.device)
    return torch.device(map_location)
