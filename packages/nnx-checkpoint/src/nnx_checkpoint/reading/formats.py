"""Which formats there are, which one a path holds, and what checkpoints lie below a directory.

Our own and the ones in `nnx_checkpoint.foreign` are built in. Entry points of the group
``nnx_checkpoint.formats`` give others: each is a function that returns them by name. nnx-core has one, for
its plugins, among them the readers of engines' own checkpoints. A format is imported only when it is asked
about, because that imports torch.
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
"""Called with the bytes done so far and their total."""


class CheckpointFormat(ABC):
    """Reads, and perhaps writes, one format. Stateless; a plugin subclasses it.

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
        """Whether a path looks like this format, by its names and first bytes only: nothing is unpickled.

        An `OSError`, as for a directory that the user may not list, means no.
        """

    @abstractmethod
    def open(self, path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
        """Open it without reading tensor data.

        Args:
            path: A path that `guess_can_open` accepted.
            weights_only: True executes nothing that the file brings along; False trusts it.

        Raises:
            CheckpointError: It is damaged, incomplete, of another version, or needs trust.
        """

    def write(
        self,
        checkpoint: Checkpoint,
        path: str | os.PathLike[str],
        *,
        progress: Progress = lambda done, total: None,
        **options: Any,
    ) -> None:
        """Write a checkpoint in this format, in bounded memory; `path` appears only when it is complete.

        Args:
            checkpoint: The checkpoint to write, of any format.
            path: A path where nothing is.
            progress: Told how far it is.
            **options: The format's own.

        Raises:
            CheckpointError: The format is read-only, or writing failed.
        """
        raise CheckpointError(
            f"format {self.name!r} can be read but not written.",
            remedy=f"Convert to one of {', '.join(writable())}.",
        )

    def refuse_options(self, options: Mapping[str, Any]) -> None:
        """Raise a `CheckpointError` for options of `write` that nothing would honour."""
        if options:
            raise CheckpointError(
                f"format {self.name!r} has no option {next(iter(options))!r}.",
                remedy=f"Its options are: {', '.join(self.options()) or 'none'}.",
            )

    def options(self) -> list[str]:
        """Names of the options of `write`."""
        parameters = signature(self.write).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "progress"]


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
        "dcp", f"{_HOME}.dcp_directory:DcpDirectory", description="directory of torch.distributed.checkpoint"
    ),
    CheckpointFormatSpec(
        "safetensors",
        f"{_HOME}.safetensors:SafetensorsFiles",
        description="safetensors file, or Hugging Face directory with an index",
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
"""These only name the package to install, until it brings a format of the same name."""


@cache
def _providers() -> list[Callable[[], Mapping[str, CheckpointFormatSpec]]]:
    """The functions behind the entry points; one that fails must not keep others from being found."""
    found = []
    for entry in entry_points(group=GROUP):
        try:
            found.append(entry.load())
        except Exception as error:
            log.warning("The checkpoint formats of %r are left out: %s", entry.name, error)
    return found


def from_outside() -> dict[str, CheckpointFormatSpec]:
    found: dict[str, CheckpointFormatSpec] = {}
    for provide in _providers():
        try:
            found = {**provide(), **found}
        except Exception as error:
            log.warning("The checkpoint formats of %r are left out: %s", provide.__module__, error)
    return found


def specs() -> Mapping[str, CheckpointFormatSpec]:
    """Every known format by name; a plugin cannot replace a built-in one."""
    found = from_outside()
    without_reader = {spec.name: spec for spec in _OF_ENGINES if spec.name not in found}
    return {**found, **without_reader, **{spec.name: spec for spec in _BUILT_IN}}


def get_format(name: str) -> CheckpointFormat:
    """The format of a name.

    Raises:
        CheckpointError: There is none of this name.
        PluginError: The plugin that provides it cannot be imported.
    """
    for spec in _BUILT_IN:
        if spec.name == name:  # no plugin can replace it, so none is asked
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
    """Names of the formats that can be written."""
    return [usable.name for usable in _usable() if usable.can_write]


def _usable() -> Iterator[CheckpointFormat]:
    """Every format that can be imported: a broken plugin must not keep others from being found."""
    for name in specs():
        try:
            yield get_format(name)
        except PluginError as error:
            log.warning("Checkpoint format %r is left out: %s", name, error)


def find_format(path: str | os.PathLike[str]) -> CheckpointFormat:
    """The format that a path holds.

    Raises:
        CheckpointError: Nothing is there, it cannot be read, or no format knows it.
    """
    if is_checkpoint(path):
        return get_format("nnx")
    for candidate in _usable():
        if recognises(candidate, path):
            return candidate
    raise _unknown(path)


def recognises(candidate: CheckpointFormat, path: str | os.PathLike[str]) -> bool:
    """Ask one format. A path that it cannot look into, or that vanishes meanwhile, is not its own."""
    try:
        return candidate.guess_can_open(path)
    except (OSError, NnxError) as error:
        log.debug("Checkpoint format %r cannot look at '%s': %s", candidate.name, path, error)
    except Exception as error:  # of a plugin: it must not keep other formats from being found
        log.warning("Checkpoint format %r is left out: %s", candidate.name, error)
    return False


def _unknown(path: str | os.PathLike[str]) -> CheckpointError:
    place = os.fspath(path)
    if "://" not in place and not os.path.exists(place):  # noqa: PTH110 - `path` may be a URL
        return CheckpointNotFoundError(f"there is no checkpoint at '{place}'.", remedy="Check the path.")
    if any(is_save_id(name) for name in place_of(path).names()):
        return CheckpointError(
            f"'{place}' is not a checkpoint: it has no manifest, so its first save was interrupted.",
            remedy="Resume from another one; `nnx ckpt gc` removes this an hour after its last change.",
        )
    if place_of(path).kind() == "file":
        place_of(path).reader().close()  # one that cannot be read says why
    if (place_of(path) / MANIFEST).kind() == "file":
        return CheckpointError(
            f"'{place}' is not a checkpoint of a known format: its '{MANIFEST}' is not the manifest of an "
            "nnx checkpoint.",
            remedy="Check the path.",
        )
    return CheckpointError(
        f"'{place}' is not a checkpoint of a known format: it has neither the manifest of an nnx checkpoint "
        "nor the files of another one.",
        remedy=f"Known formats: {', '.join(specs())}. A plugin may add more.",
    )


def open_checkpoint(path: str | os.PathLike[str], *, weights_only: bool = True) -> Checkpoint:
    """Open a checkpoint of any known format, checking all that can be checked without reading tensor data.

    Args:
        path: A directory, a file, or a link to one.
        weights_only: False executes code that whoever wrote the checkpoint may have put there. True
            restricts unpickling, where a format needs any, to what torch knows to be safe.

    Returns:
        A handle that reads on demand.

    Raises:
        CheckpointError: There is no checkpoint, it is of an unknown or newer format, or a file is missing,
            truncated or damaged.
    """
    found = find_format(path)
    try:
        if found.name != "nnx" and os.path.isdir(path):  # noqa: PTH112 - `path` may be a URL
            require_enclosed(Path(path))
        return found.open(path, weights_only=weights_only)
    except NnxError:
        raise
    except Exception as error:  # whatever data of another form than its program writes makes a reader raise
        raise CheckpointError(
            f"'{path}' is no sound checkpoint of format '{found.name}': {type(error).__name__}: {error}.",
            remedy="Restore it from a backup, or use another checkpoint.",
        ) from error


# A reader takes the place of its entry here once its package is installed. Without it, these entries
# recognise the checkpoint, so that `nnx ckpt ls` lists it and opening it names the package.


class _ReadElsewhere(CheckpointFormat):
    """A format without its reader.

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
            "that is not installed, or switched off.",
            remedy=f"Run `pip install {self.package}`.",
        )


class DeepSpeed(_ReadElsewhere):
    """A directory that DeepSpeed was given, or that of a tag in it."""

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
    """A directory with indexes of ``.bin`` files, as older versions of transformers wrote them too."""

    name = "colossalai"
    program = "ColossalAI, or of an older version of transformers"
    package = "nnx-colossalai"
    reaches_below = True
    files = (
        "pytorch_optim.bin.index*.json",
        "*/pytorch_optim.bin.index*.json",
        "pytorch_model.bin.index*.json",
    )
