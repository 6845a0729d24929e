"""Checkpoints of engines whose readers come with our packages for these engines.

A reader takes the place of its entry here once its package is installed. Without it, these entries recognise
the checkpoint, so that `nnx ckpt ls` lists it and opening it names the package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from typing_extensions import override

from nnx_checkpoint.errors import ReaderNotInstalledError
from nnx_checkpoint.foreign.torch_file import mentions
from nnx_checkpoint.formats import CheckpointFormat


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
    files = ("*mp_rank_*_model_states.pt", "*/*mp_rank_*_model_states.pt")


class NnScaler(_ReadElsewhere):
    """A directory of ``<rank>.pt``, or a merged file."""

    name = "nnscaler"
    program = "nnScaler"
    package = "nnx-nnscaler"

    @override
    def guess_can_open(self, path: str | os.PathLike[str]) -> bool:
        place = Path(path)
        return mentions(place / "0.pt" if place.is_dir() else place, "nnscaler-extra-state")


class ColossalAI(_ReadElsewhere):
    """A directory with indexes of ``.bin`` files, as older versions of transformers wrote them too."""

    name = "colossalai"
    program = "ColossalAI, or of an older version of transformers"
    package = "nnx-colossalai"
    files = (
        "pytorch_optim.bin.index*.json",
        "*/pytorch_optim.bin.index*.json",
        "pytorch_model.bin.index*.json",
    )
