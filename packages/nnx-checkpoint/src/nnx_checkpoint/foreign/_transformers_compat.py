"""Ask transformers which tensors `from_pretrained` expects for a configuration. No other module imports it.

Only classes of transformers itself are built, on the meta device: without memory, without a download, and
without code of the directory.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nnx_base.errors import CheckpointError


@dataclass(frozen=True)
class Expected:
    """The tensors of a model.

    Attributes:
        architecture: Name of the class.
        shapes: The shape of each tensor by the name in the directory, in the class's order.
        tied: The names that the class ties, each mapped to the name that is stored.
    """

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]

    @property
    def groups(self) -> list[list[str]]:
        """The names of each tensor, the stored one first."""
        found = {name: [name] for name in self.shapes if name not in self.tied}
        for alias, stored in self.tied.items():
            found[stored].append(alias)
        return list(found.values())


def is_installed() -> bool:
    """Return True if transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


def expected_tensors(directory: Path, architecture: str) -> Expected:
    """Build the class of a configuration on the meta device, and describe its tensors.

    Args:
        directory: The directory with ``config.json``.
        architecture: The class in transformers.

    Raises:
        CheckpointError: transformers has no such class, or refuses the configuration.
    """
    transformers: Any = importlib.import_module("transformers")
    found = getattr(transformers, architecture, None)
    if found is None or not issubclass(found, transformers.PreTrainedModel):
        raise CheckpointError(
            f"transformers {transformers.__version__} has no class {architecture!r}, which "
            f"'{directory / 'config.json'}' names.",
            remedy="Upgrade transformers, or give a map of names.",
        )
    try:
        # Eager attention: another kind may fetch a kernel.
        config = transformers.AutoConfig.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True, attn_implementation="eager"
        )
        with torch.device("meta"):
            model = found(config)
    except Exception as error:  # transformers raises many types for configurations
        raise CheckpointError(
            f"transformers {transformers.__version__} builds no {architecture} from "
            f"'{directory / 'config.json'}': {type(error).__name__}: {error}",
            remedy="Use the configuration of the model that was trained.",
        ) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return Expected(architecture, shapes, _tied(model, shapes))


def _tied(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the further names of each parameter, mapped to its first one."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stored = first.setdefault(id(parameter), name)
        if stored != name and name in shapes:
            tied[name] = stored
    return tied
