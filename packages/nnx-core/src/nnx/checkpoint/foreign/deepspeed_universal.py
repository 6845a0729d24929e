"""DeepSpeed's "universal" checkpoints: what ``ds_to_universal.py`` makes of the files of all ranks.

``zero/<parameter>/`` has one file for the fp32 master and one for each state of the optimizer, complete;
``zero/optimizer_state.pt`` the param groups. Stage 3 stores them flat and lists no steps by parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnx.box import Box
from nnx.checkpoint.foreign.contents import Contents, add_shared_state, pieces_of_range
from nnx.checkpoint.foreign.deepspeed_zero import OWN_CLASSES, Shapes, contradiction
from nnx.checkpoint.foreign.torch_file import FileTensor, load_torch_file
from nnx.checkpoint.storage.files import require_inside

__all__ = ["Universal"]

_MASTER = "fp32"


class Universal:
    """The parameters of a universal checkpoint.

    Args:
        directory: The tag's directory.
        shapes: ``param_shapes`` of the model file.

    Attributes:
        stage: The ZeRO stage that it was converted from.
        groups: The optimizer's param groups, with the names of their parameters.
    """

    def __init__(self, directory: Path, shapes: Shapes) -> None:
        self._directory = directory
        self._shapes = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        self._group_of = {name: i for i, group in enumerate(shapes) for name in group}
        common = load_torch_file(directory / "zero" / "optimizer_state.pt", inert=OWN_CLASSES)
        flat = common.get("optimizer_state_dict")
        self.stage = 3 if flat is not None else 2
        self._states: Mapping[Any, Any] = flat["state"] if flat is not None else {}
        numbers = [number for group in common["param_groups"] for number in group["params"]]
        names: dict[Any, list[str]] = {
            number: list(group) for number, group in zip(numbers, shapes, strict=False)
        }
        self._numbers = numbers
        self.groups = [
            {**group, "params": [name for number in group["params"] for name in names.get(number, ())]}
            for group in common["param_groups"]
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def add_master(self, contents: Contents, name: str, key: str) -> None:
        """Add the fp32 master of a parameter under a logical name."""
        self._add(contents, name, key, self._load(name, f"{_MASTER}.pt"))

    def add_states(self, contents: Contents, name: str, prefix: str) -> dict[str, Any]:
        """Add the optimizer's state of a parameter; what is no tensor is returned."""
        values: dict[str, Any] = {}
        folder = self._folder(name)
        keys = sorted(file.stem for file in folder.glob("*.pt") if file.stem != _MASTER)
        for key in keys:
            value = self._load(name, f"{key}.pt")
            if (
                isinstance(value, FileTensor)
                and value.numel == math.prod(self._shapes[name])
                and key != "step"
            ):
                self._add(contents, name, f"{prefix}.{key}", value)
            else:
                add_shared_state(contents, f"{prefix}.{key}", value, values)
        state = self._states.get(self._numbers[self._group_of[name]], {}) if self._states else {}
        if "step" in state and "step" not in keys:
            add_shared_state(contents, f"{prefix}.step", state["step"], values)
        return values

    def _load(self, name: str, file: str) -> Any:
        found = load_torch_file(self._folder(name) / file, inert=OWN_CLASSES)
        return found["param"] if isinstance(found, Mapping) else found

    def _folder(self, name: str) -> Path:
        """Where the files of a parameter are; its name comes from a file, and could lead anywhere."""
        folder = self._directory / "zero" / name
        require_inside(folder, self._directory)
        return folder

    def _add(self, contents: Contents, name: str, key: str, value: Any) -> None:
        shape = self._shapes[name]
        if not isinstance(value, FileTensor) or value.numel != math.prod(shape):
            raise contradiction(self._directory, f"what is stored of '{name}' has not its shape {shape}")
        pieces = pieces_of_range(value, 0, Box.whole(shape), 0, value.numel)
        contents.add_pieces(key, shape, str(value.dtype).removeprefix("torch."), pieces)
