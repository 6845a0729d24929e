"""List the known formats, find the format of a path, and open checkpoints.

Our own format and those in `nnx_checkpoint.foreign` are built in. An entry point of the group
``nnx_checkpoint.formats`` is a function that returns further formats by name. nnx-core has one for its
plugins, which include the readers of engines' own checkpoints. A format is imported on first use only,
because it imports torch.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from typing_extensions import override

from nnx_base.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    NnxError,
    PluginError,
    ReaderNotInstalledError,
)
from nnx_checkpoint.format.declaration import CheckpointFormatSpec, import_reference
from nnx_checkpoint.format.manifest import MANIFEST, is_save_id
from nnx_checkpoint.format.source import is_checkpoint
from nnx_checkpoint.storage.files import require_enclosed
from nnx_checkpoint.storage.locations import place_of

if TYPE_CHECKING:
    from nnx_checkpoint.reading.reader import Checkpoint

__all__ = [
    "CheckpointFormat",
    "Progress",
    "find_format",
    "get_format",
    "open_checkpoint",
    "writable",
]

log = logging.getLogger("nnx.checkpoint")

GROUP = "nnx_checkpoint.formats"

Progress = Callable[[int, int], None]
"""A function of the bytes done so far and their total."""


class CheckpointFormat(ABC):
    """The reader and optional writer of one format. Stateless; a plugin subclasses it.

    Attributes:
        name: The name for ``nnx ckpt convert --to``, the same as in its spec.
        can_write: True if `write` works.
        reaches_below: True if directories of this format, found in a directory of this format, belong to it.
    """

    name: ClassVar[str]
    can_write: ClassVar[bool] = False
    reaches_below: ClassVar[bool] = False

    @abstractmethod
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        """Return True if a path looks like this format, by names and first bytes only (unpickle nothing).

        An `OSError`, as for a directory without permission, counts as False.
        """

    @abstractmethod
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        """Open a checkpoint without reading tensor data.

        Args:
            path: A path that `guess_can_open` accepted.
            weights_only: True executes no code from the file; False allows it.

        Raises:
            CheckpointError: The checkpoint is damaged, incomplete, of another version, or needs
                ``weights_only=False``.
        """

    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        **options: Any,
    ) -> None:
        """Write a checkpoint in this format in bounded memory; `path` appears when the write is complete.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path that does not exist.
            progress: Function of the bytes done and their total.
            **options: Options of the format.

        Raises:
            CheckpointError: The format is read-only, or writing failed.
        """
        raise CheckpointError(
            f"format {self.name!r} can be read but not written.",
            remedy=f"Convert to one of {', '.join(writable())}.",
        )

    def refuse_options(self, options: Mapping[str, Any]) -> None:
        """Raise a `CheckpointError` for unknown options of `write`."""
        if options:
            raise CheckpointError(
                f"format {self.name!r} has no option {next(iter(options))!r}.",
                remedy=f"Its options are: {', '.join(self.options()) or 'none'}.",
            )

    def options(self) -> list[str]:
        """Return the names of the options of `write`."""
        return _keywords(self.write, "progress")

    def open_options(self) -> list[str]:
        """Return the names of the options of `open`."""
        return _keywords(self.open, "weights_only")


def _keywords(function: Callable[..., Any], without: str) -> list[str]:
    parameters = signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != without]


_HOME = "nnx_checkpoint.foreign"
_BUILT_IN = (
    CheckpointFormatSpec(
        "nnx", "nnx_checkpoint.conversion.convert:Native", description="the shared checkpoint"
    ),
    CheckpointFormatSpec(
        "lightning", f"{_HOME}.lightning_file:LightningFile", description="Lightning's single file, .ckpt"
    ),
    CheckpointFormatSpec(
        "lightning_sharded",
        f"{_HOME}.dcp_directory:LightningSharded",
        description="sharded directory of Lightning's ModelParallelStrategy or FSDPStrategy",
    ),
    CheckpointFormatSpec(
        "megatron",
        f"{_HOME}.megatron:MegatronDirectory",
        description="torch_dist directory of Megatron-LM",
    ),
    CheckpointFormatSpec(
        "dcp", f"{_HOME}.dcp_directory:DcpDirectory", description="directory of torch.distributed.checkpoint"
    ),
    CheckpointFormatSpec(
        "torch_checkpointing",
        f"{_HOME}.torch_checkpointing:TorchCheckpointing",
        description="directory of torch_checkpointing 0.1",
    ),
    CheckpointFormatSpec(
        "hf",
        f"{_HOME}.hf_directory:HuggingFaceDirectory",
        description="directory of Hugging Face's transformers, for from_pretrained",
    ),
    CheckpointFormatSpec(
        "safetensors",
        f"{_HOME}.safetensors:SafetensorsFiles",
        description="safetensors file, or a directory of them with an index",
    ),
)
_OF_ENGINES = (
    CheckpointFormatSpec(
        "nnscaler", f"{__name__}:NnScaler", description="nnScaler; nnx-nnscaler has the reader"
    ),
    CheckpointFormatSpec(
        "deepspeed", f"{__name__}:DeepSpeed", description="DeepSpeed; nnx-deepspeed has the reader"
    ),
    CheckpointFormatSpec(
        "colossalai", f"{__name__}:ColossalAI", description="ColossalAI; nnx-colossalai has the reader"
    ),
)
"""Formats that only name the package to install; that package replaces them by name."""


@cache
def _providers() -> list[Callable[[], Mapping[str, CheckpointFormatSpec]]]:
    """Return the functions of the entry points (skip and log those that fail to load)."""
    found = []
    for entry in entry_points(group=GROUP):
        try:
            found.append(entry.load())
        except Exception as error:
            log.warning("Ignoring the checkpoint formats of %r: %s", entry.name, error)
    return found


def from_outside() -> dict[str, CheckpointFormatSpec]:
    found: dict[str, CheckpointFormatSpec] = {}
    for provide in _providers():
        try:
            found = {**provide(), **found}
        except Exception as error:
            log.warning("Ignoring the checkpoint formats of %r: %s", provide.__module__, error)
    return found


def specs() -> Mapping[str, CheckpointFormatSpec]:
    """Return every known format by name; a plugin cannot replace a built-in one."""
    found = from_outside()
    without_reader = {spec.name: spec for spec in _OF_ENGINES if spec.name not in found}
    return {**found, **without_reader, **{spec.name: spec for spec in _BUILT_IN}}


def get_format(name: str) -> CheckpointFormat:
    """Return the format with a name.

    Raises:
        CheckpointError: No format has this name.
        PluginError: The plugin of the format cannot be imported.
    """
    for spec in _BUILT_IN:
        if spec.name == name:  # plugins cannot replace it: skip the search
            return _load(spec.target)
    known = specs()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        raise CheckpointError(
            f"unknown checkpoint format {name!r}{f'; did you mean {near[0]!r}?' if near else '.'}",
            remedy=f"Use one of {', '.join(known)}, or install the plugin that provides it.",
        )
    return _load(known[name].target)


@cache
def _load(target: str) -> CheckpointFormat:
    found: CheckpointFormat = import_reference(target, what="a checkpoint format")()
    return found


def writable() -> list[str]:
    """Return the names of the formats that can be written."""
    return [usable.name for usable in _usable() if usable.can_write]


def _usable() -> Iterator[CheckpointFormat]:
    """Yield every format that can be imported (skip and log broken plugins)."""
    for name in specs():
        try:
            yield get_format(name)
        except PluginError as error:
            log.warning("Ignoring checkpoint format %r: %s", name, error)


def find_format(path: str | os.PathLike[str]) -> CheckpointFormat:
    """Return the format of the checkpoint at a path.

    Raises:
        CheckpointError: The path does not exist, cannot be read, or has an unknown format.
    """
    if is_checkpoint(path):
        return get_format("nnx")
    for candidate in _usable():
        if recognises(candidate, path):
            return candidate
    raise _unknown(path)


def recognises(candidate: CheckpointFormat, path: str | os.PathLike[str]) -> bool:
    """Return True if one format recognizes a path (False if it cannot be inspected)."""
    try:
        return candidate.guess_can_open(path)
    except (OSError, NnxError) as error:
        log.debug("Checkpoint format %r cannot inspect '%s': %s", candidate.name, path, error)
    except Exception as error:  # a broken plugin must not hide other formats
        log.warning("Ignoring checkpoint format %r: %s", candidate.name, error)
    return False


def _unknown(path: str | os.PathLike[str]) -> CheckpointError:
    place = os.fspath(path)
    if "://" not in place and not os.path.exists(place):  # noqa: PTH110 - `path` may be a URL
        return CheckpointNotFoundError(f"there is no checkpoint at '{place}'.", remedy="Check the path.")
    if any(is_save_id(name) for name in place_of(path).names()):
        return CheckpointError(
            f"'{place}' is not a checkpoint: it has no manifest, so its first save was interrupted.",
            remedy="Resume from another one; `nnx ckpt gc` removes this one an hour after its last change.",
        )
    if place_of(path).kind() == "file":
        place_of(path).reader().close()  # raises the reason if it is unreadable
    if (place_of(path) / MANIFEST).kind() == "file":
        return CheckpointError(
            f"'{place}' is not a checkpoint of a known format: its '{MANIFEST}' is not the manifest of an "
            "nnx checkpoint.",
            remedy="Check the path.",
        )
    return CheckpointError(
        f"'{place}' is not a checkpoint of a known format: it has neither the manifest of an nnx checkpoint "
        "nor the files of another format.",
        remedy=f"Known formats: {', '.join(specs())}. A plugin may add more.",
    )


def open_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True, **options: Any) -> Checkpoint:
    """Open a checkpoint of any known format, checking all that can be checked without reading tensor data.

    Args:
        path: A directory, a file, or a link to one.
        weights_only: False executes code that the author of the checkpoint may have put there. True restricts
            unpickling, if the format needs any, to classes that torch considers safe.
        **options: Options of the format, such as ``names`` of ``"hf"`` and ``tag`` of ``"deepspeed"``.

    Returns:
        A handle that reads on demand.

    Raises:
        CheckpointError: The checkpoint does not exist, has an unknown or newer format, or a file of it is
            missing, truncated or damaged.
    """
    found = find_format(path)
    for name in options:
        if name not in found.open_options():
            raise CheckpointError(
                f"'{path}' is opened as format {found.name!r}, which has no option {name!r} for reading.",
                remedy=f"Its options are: {', '.join(found.open_options()) or 'none'}.",
            )
    try:
        if found.name != "nnx" and os.path.isdir(path):  # noqa: PTH112 - `path` may be a URL
            require_enclosed(Path(path))
        return found.open(path, weights_only=weights_only, **options)
    except NnxError:
        raise
    except Exception as error:  # unexpected data may raise anything in a reader
        raise CheckpointError(
            f"'{path}' is not a valid checkpoint of format '{found.name}': {type(error).__name__}: {error}.",
            remedy="Restore it from a backup, or use another checkpoint.",
        ) from error


# An installed package replaces the entry of the same name with its reader. Without the package these entries
# recognize the checkpoint, so that `nnx ckpt ls` lists it and opening it names the package to install.


class _ReadElsewhere(CheckpointFormat):
    """A format whose reader is in another package.

    Attributes:
        program: The name of the engine.
        package: The distribution that has the reader.
        files: Patterns of files, one of which every directory of this format holds.
    """

    program: ClassVar[str]
    package: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = ()

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        return any(True for pattern in self.files for _ in Path(path).glob(pattern))

    @override
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True, **options: Any) -> NoReturn:
        raise ReaderNotInstalledError(
            f"'{path}' is a checkpoint of {self.program}, whose reader comes with {self.package}; "
            "that package is not installed, or disabled.",
            remedy=f"Run `pip install {self.package}`.",
        )


class DeepSpeed(_ReadElsewhere):
    """A checkpoint directory of DeepSpeed, or the directory of one tag in it."""

    name = "deepspeed"
    program = "DeepSpeed"
    package = "nnx-deepspeed"
    reaches_below = True
    files = ("*mp_rank_*_model_states.pt", "*/*mp_rank_*_model_states.pt")


class NnScaler(_ReadElsewhere):
    """A directory of ``<rank>.pt``, or a merged file."""

    name = "nnscaler"
    program = "nnScaler"
    package = "nnx-nnscaler"

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        from nnx_checkpoint.unpickling.torch_file import mentions

        place = Path(path)
        return mentions(place / "0.pt" if place.is_dir() else place, "nnscaler-extra-state")


class ColossalAI(_ReadElsewhere):
    """A directory with indexes of ``.bin`` files (older versions of transformers wrote the same)."""

    name = "colossalai"
    program = "ColossalAI, or of an older version of transformers"
    package = "nnx-colossalai"
    reaches_below = True
    files = (
        "pytorch_optim.bin.index*.json",
        "*/pytorch_optim.bin.index*.json",
        "pytorch_model.bin.index*.json",
    )
