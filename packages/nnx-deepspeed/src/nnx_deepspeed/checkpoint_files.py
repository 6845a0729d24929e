"""Find the files of a DeepSpeed checkpoint: tags, the file ``latest``, and the files of the ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from nnx_base.errors import CheckpointError

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


_EXPERT_FILE = re.compile(r"layer_.*|(?:.*_)?expert_.*|expp_rank_.*")


_OFFLOADED = "offloaded_tensors"


_LATEST = ("latest", "latest_universal")


@dataclass
class Files:
    """The files of a tag's directory by the rank in their name; the key None is the one file of all ranks."""

    directory: Path
    models: dict[int | None, Path] = field(default_factory=dict)
    optimizers: dict[int, Path] = field(default_factory=dict)


def holds_checkpoints(directory: Path) -> bool:
    """Return True if a directory looks like a DeepSpeed checkpoint, or like the directory of one tag."""
    if not directory.is_dir():
        return False
    if _is_tag(directory):
        return True
    return any(_is_tag(child) for child in directory.iterdir() if child.is_dir())


def _is_tag(directory: Path) -> bool:
    try:
        return any(_MODEL_FILE.fullmatch(file.name) for file in directory.iterdir())
    except OSError:  # such as `lost+found` beside the tags
        return False


def tag_directory(path: Path, tag: str | None) -> Path:
    """Return the directory of a tag.

    Without a tag this is the path itself, the directory named in ``latest``, or the only one.
    """
    if tag is None and _is_tag(path):
        return path
    if tag is None:
        tag = next((found for name in _LATEST if (found := _read_tag(path / name))), None)
    tags = sorted(child.name for child in path.iterdir() if child.is_dir() and _is_tag(child))
    if tag is None and len(tags) == 1:
        tag = tags[0]
    if tag is None:
        raise CheckpointError(
            f"'{path}' holds {len(tags)} DeepSpeed checkpoints ({', '.join(tags)}) and no file 'latest' that "
            "names one.",
            remedy=f"Open one of them, such as '{path / tags[-1]}'." if tags else "Check the path.",
        )
    if tag not in tags:
        raise CheckpointError(
            f"'{path}' has no DeepSpeed checkpoint of tag '{tag}', which you or the file 'latest' named.",
            remedy=f"Open one of {', '.join(tags)}." if tags else "Restore it from a backup.",
        )
    return path / tag


_LONGEST_TAG = 256


def _read_tag(file: Path) -> str | None:
    """Return the name in a file. Reads at most 256 bytes, because the file may link to anything."""
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        return opened.read(_LONGEST_TAG).decode(errors="replace").strip()


def scan(directory: Path) -> Files:
    """List the files of a tag's directory."""
    files = Files(directory)
    for path in sorted(directory.iterdir()):
        model, optimizer = _MODEL_FILE.fullmatch(path.name), _OPTIMIZER_FILE.fullmatch(path.name)
        found = model or optimizer
        if _EXPERT_FILE.fullmatch(path.name) or (found and int(found[2]) > 0):
            raise CheckpointError(
                f"'{path}' belongs to a model that was split by tensor, pipeline or expert parallelism.",
                remedy="Only data-parallel checkpoints (ZeRO) can be read.",
            )
        if path.name == _OFFLOADED:
            raise CheckpointError(
                f"'{path}' holds tensors that were offloaded to NVMe, in DeepSpeed's own files.",
                remedy="Save it without NVMe offload.",
            )
        if model:
            files.models[None if model[1] is None else int(model[1])] = path
        elif optimizer and int(optimizer[1]) in files.optimizers:
            raise CheckpointError(
                f"'{directory}' has two optimizer files of rank {optimizer[1]}, "
                f"one of them is '{path.name}'.",
                remedy="They belong to different saves; delete the older ones.",
            )
        elif optimizer:
            files.optimizers[int(optimizer[1])] = path
    return files


def model_file(files: Files, rank: int) -> Path:
    """Return the model file of all ranks, or in stage 3 the file of one rank."""
    found = files.models.get(None, files.models.get(rank))
    if found is not None:
        return found
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    raise CheckpointError(
        f"'{files.directory / name}' is missing.",
        remedy="Restore it; reading the model needs every rank's files.",
    )
