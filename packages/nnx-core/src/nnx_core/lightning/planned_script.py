"""Run a user's script up to its ``Trainer.fit``, for ``nnx plan --script``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from nnx_core.errors import OptionError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["stop_at_fit"]


class _AtFit(BaseException):
    """The script has come to ``fit``. No ``except Exception`` of the script catches it."""

    def __init__(self, module: Any, loaders: Any, datamodule: Any) -> None:
        super().__init__()
        self.module, self.loaders, self.datamodule = module, loaders, datamodule


def stop_at_fit(script: Path, words: Sequence[str]) -> tuple[LightningModule, Any]:
    """Return the module and the first batch that a script would train with.

    Args:
        script: The script. It runs in this process until it calls ``fit``.
        words: Its arguments.

    Raises:
        OptionError: There is no such script, or it ends without ``fit``.
    """
    from lightning.pytorch import Trainer

    if not script.is_file():
        raise OptionError(f"there is no script {str(script)!r}.", remedy="Check the path.")

    def fit(
        self: Any,
        model: Any,
        train_dataloaders: Any = None,
        val: Any = None,
        datamodule: Any = None,
        **_: Any,
    ) -> None:
        raise _AtFit(model, train_dataloaders, datamodule)

    with mock.patch.object(Trainer, "fit", fit), mock.patch.object(sys, "argv", [str(script), *words]):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _AtFit as reached:
            return reached.module, _first_batch(reached)
    raise OptionError(
        f"{str(script)!r} ended without `Trainer.fit`.",
        remedy="Give a script that trains, with its arguments.",
    )


def _first_batch(reached: _AtFit) -> Any:
    loaders, data = reached.loaders, reached.datamodule
    if loaders is not None and hasattr(loaders, "train_dataloader"):
        loaders, data = None, loaders  # a datamodule in the loaders' place
    if data is not None:
        data.prepare_data()
        data.setup("fit")
        loaders = data.train_dataloader()
    return next(iter(reached.module.train_dataloader() if loaders is None else loaders))
