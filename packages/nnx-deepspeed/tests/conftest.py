"""Fixtures with files of other programs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nnx_checkpoint.unpickling.allowed import Inert
from nnx_checkpoint.unpickling.torch_file import FileTensor, load_torch_file


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """Copies one of DeepSpeed's checkpoints to a folder where it may be damaged."""

    def made(name: str) -> Path:
        home = Path(__file__).parent / "fixtures" / "deepspeed"
        return Path(shutil.copytree(home / name, tmp_path / name))

    return made


@pytest.fixture
def edit() -> Callable[[Path, Callable[[Any], None]], None]:
    """Changes the content of a torch.save file."""
    return _edit


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the content of a torch.save file; DeepSpeed's own objects are omitted or replaced by numbers."""

    def real(value: Any) -> Any:
        if isinstance(value, FileTensor):
            return value.read()
        if isinstance(value, Inert):
            return value.arguments[0] if value.arguments else None
        if isinstance(value, dict):
            return {key: real(item) for key, item in value.items()}
        if isinstance(value, list):
            return [real(item) for item in value]
        return value

    state = real(load_torch_file(path, inert=("deepspeed.",)))
    change(state)
    torch.save(state, path)
