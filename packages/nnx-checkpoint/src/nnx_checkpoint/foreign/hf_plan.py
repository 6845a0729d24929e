"""Choose the names and ties of a checkpoint's weights in a Hugging Face directory, and check them.

transformers' own class says which tensors it expects. A map of names, or the removal of a prefix, has to give
exactly these, with their shapes. Without the class (remote code, no transformers) a map must be given.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from nnx_base.dtypes import as_bytes
from nnx_base.errors import CheckpointError
from nnx_checkpoint.foreign._transformers_compat import Expected, expected_tensors, is_installed
from nnx_checkpoint.foreign.hf_config import Config
from nnx_checkpoint.foreign.name_maps import NameMap, is_built_in, registered_map
from nnx_checkpoint.foreign.safetensors_writing import MODEL
from nnx_checkpoint.reading.naming import Renamed
from nnx_checkpoint.reading.reader import Checkpoint
from nnx_checkpoint.reading.slabs import SLAB, row_boxes

WRITTEN = "hf."
"""The prefix, in the view that is written, of tensors that go into the directory as weights."""


@dataclass(frozen=True)
class Plan:
    """The weights of a directory.

    Attributes:
        stored: The logical name in the checkpoint by the name in the directory.
        mapped: Every logical name with a name in the directory, tied ones included.
        tied: Further names in the directory, each mapped to the one that is written.
        hidden: Logical names that are not written: copies of tied tensors.
        prefix: The prefix that was removed.
        names: The map that was applied after it; None if names stay.
        dtype_name: The element type of the floating-point weights; None if there are none.
    """

    stored: Mapping[str, str]
    mapped: Container[str]
    tied: Mapping[str, str]
    hidden: Sequence[str]
    prefix: str
    names: NameMap | None
    dtype_name: str | None

    def renamed(self, checkpoint: Checkpoint) -> Renamed:
        """Return the checkpoint with its weights under the names in the directory, after `WRITTEN`."""
        weights = {f"{WRITTEN}{name}": stored for name, stored in self.stored.items()}
        tied = {f"{WRITTEN}{alias}": f"{WRITTEN}{name}" for alias, name in self.tied.items()}
        # A tie of a weight with a tensor elsewhere: reading restores the name that was written.
        restored = {checkpoint.entry(stored).name: stored for stored in self.stored.values()}
        others = {
            alias: restored.get(name, name)
            for alias, name in checkpoint.aliases.items()
            if alias not in self.mapped
        }
        return Renamed(checkpoint, weights, {**others, **tied}, self.hidden)


def planned(checkpoint: Checkpoint, config: Config, names: NameMap | None, *, must_take_all: bool) -> Plan:
    """Choose the names of the weights.

    Args:
        checkpoint: The checkpoint to write.
        config: The configuration of the model.
        names: The map that the user gave.
        must_take_all: Refuse tensors of the model that have no place in the directory.

    Raises:
        CheckpointError: The tensors are not those of the configuration, or the map does not fit.
    """
    logical = [n for n in (*checkpoint.tensors, *checkpoint.aliases) if n.startswith(MODEL)]
    held = [name.removeprefix(MODEL) for name in logical]
    if not held:
        raise CheckpointError(
            f"'{checkpoint.path}' has no weights.", remedy="`nnx ckpt inspect` lists the names."
        )
    expected = _expected(config)
    prefix, rules = "", names
    if rules is None:
        rules = _registered(config, expected)
        prefix = _prefix(held, expected, rules, checkpoint) if expected else ""
    below = [name for name in held if name.startswith(prefix)]
    made = _in_directory([name.removeprefix(prefix) for name in below], rules)
    outside = [name for name in held if name not in {prefix + each for each in made}]
    if must_take_all and names is None and outside:
        raise CheckpointError(
            f"{_shown(outside)} of '{checkpoint.path}' have no place in the directory.",
            remedy="Leave --only-weights out to keep them beside, or give a map with a rule for each.",
        )
    stored = {directory: f"{MODEL}{prefix}{module}" for module, directory in made.items()}
    if expected is not None:
        _require_expected(checkpoint, config, stored, expected)
    return _with_ties(checkpoint, stored, expected, prefix, rules)


def _expected(config: Config) -> Expected | None:
    """Return the tensors of transformers' class; None if they cannot be known."""
    if config.has_remote_code:
        return None
    if config.architecture is None:
        raise CheckpointError(
            f"'{config.file}' does not name the class of the model.",
            remedy='Add it, such as "architectures": ["LlamaForCausalLM"], as `model.save_pretrained` does.',
        )
    if not is_installed():
        return None
    return expected_tensors(config.file.parent, config.architecture)


def _registered(config: Config, expected: Expected | None) -> NameMap | None:
    """Return the registered map of the model type, which must be a plugin's if the class is not known."""
    found = registered_map(config.model_type)
    if expected is not None or (found is not None and not is_built_in(config.model_type)):
        return found
    if config.has_remote_code:
        why = "its class is code of its authors (`auto_map`, trust_remote_code), which nnx does not execute"
        remedy = "Give a map: -o names=map.json (in Python, names=)."
    else:
        why = "transformers, which knows its names, is not installed"
        remedy = "Run `pip install transformers`, or give a map: -o names=map.json (in Python, names=)."
    raise CheckpointError(f"the names of the model of '{config.file}' are not known: {why}.", remedy=remedy)


def _in_directory(names: Sequence[str], rules: NameMap | None) -> dict[str, str]:
    return {name: name for name in names} if rules is None else rules.to_directory(names)


def _prefix(held: Sequence[str], expected: Expected, rules: NameMap | None, checkpoint: Checkpoint) -> str:
    """Return the prefix under which the checkpoint has the tensors of the class."""
    module = {name: name for name in expected.shapes} if rules is None else rules.to_module(expected.shapes)
    needed = [[module[each] for each in names if each in module] for names in expected.groups]
    known = set(held)
    ends = {name for names in (needed[0], needed[-1]) for name in names}
    prefixes = {"", *(name.removesuffix(end) for name in held for end in ends if name.endswith(f".{end}"))}
    missing = {p: [names[0] for names in needed if not any(p + n in known for n in names)] for p in prefixes}
    fitting = sorted(prefix for prefix in prefixes if not missing[prefix])
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise CheckpointError(
            f"'{checkpoint.path}' has {len(fitting)} models of class {expected.architecture}, under "
            f"{', '.join(map(repr, fitting))}.",
            remedy=f"""Choose one by a map: -o 'names=[["{fitting[0]}**", "**"], ["**", null]]'.""",
        )
    nearest = min(sorted(prefixes), key=lambda prefix: len(missing[prefix]))
    raise CheckpointError(
        f"'{checkpoint.path}' is not the model of the configuration: {expected.architecture} has "
        f"{len(missing[nearest])} tensors that it lacks, such as {_shown(missing[nearest])}"
        f"{f' below {nearest!r}' if nearest else ''}.",
        remedy="Use the configuration of this model, or give a map of names.",
    )


def _require_expected(
    checkpoint: Checkpoint, config: Config, stored: Mapping[str, str], expected: Expected
) -> None:
    missing = [names[0] for names in expected.groups if not any(name in stored for name in names)]
    unexpected = [name for name in stored if name not in expected.shapes]
    shapes = [
        f"{name} is {tuple(checkpoint.entry(stored[name]).shape)} and should be {shape}"
        for name, shape in expected.shapes.items()
        if name in stored and tuple(checkpoint.entry(stored[name]).shape) != shape
    ]
    parts = [
        f"{title} {_shown(names)}"
        for title, names in (("missing:", missing), ("left over:", unexpected), ("of another shape:", shapes))
        if names
    ]
    if parts:
        raise CheckpointError(
            f"'{checkpoint.path}' is not the model of '{config.file}' ({expected.architecture}); "
            f"{'; '.join(parts)}.",
            remedy="Use the configuration of this model, or change the map of names.",
        )


def _with_ties(
    checkpoint: Checkpoint,
    stored: Mapping[str, str],
    expected: Expected | None,
    prefix: str,
    rules: NameMap | None,
) -> Plan:
    """Write the tensors that the class ties once, and tensors that it does not tie under each name."""
    ties = expected.tied if expected is not None else _ties_in(checkpoint, stored)
    kept: dict[str, str] = {}
    hidden: list[str] = []
    tied: dict[str, str] = {}
    for name in stored if expected is None else expected.shapes:
        written = ties.get(name, name)
        if name not in stored:
            continue
        if written not in kept:
            kept[written] = stored[name]
        if written == name:
            continue
        tied[name] = written
        _require_same(checkpoint, kept[written], stored[name], name, written)
        hidden.append(checkpoint.entry(stored[name]).name)
    return Plan(kept, {*stored.values()}, tied, hidden, prefix, rules, _dtype_name(checkpoint, kept))


def _ties_in(checkpoint: Checkpoint, stored: Mapping[str, str]) -> dict[str, str]:
    """Return the ties of the checkpoint itself, under the names in the directory."""
    first: dict[str, str] = {}
    for name, logical in stored.items():
        first.setdefault(checkpoint.entry(logical).name, name)
    return {
        name: first[checkpoint.entry(logical).name]
        for name, logical in stored.items()
        if first[checkpoint.entry(logical).name] != name
    }


def _require_same(checkpoint: Checkpoint, left: str, right: str, name: str, written: str) -> None:
    """Refuse tensors that the class ties and whose values differ."""
    one, other = checkpoint.entry(left), checkpoint.entry(right)
    if one.name == other.name:
        return
    if one.dtype == other.dtype and one.shape == other.shape:
        boxes = row_boxes(one.shape, one.itemsize, SLAB)
        if all(
            torch.equal(as_bytes(checkpoint.read(left, box)), as_bytes(checkpoint.read(right, box)))
            for box in boxes
        ):
            return
    raise CheckpointError(
        f"'{left.removeprefix(MODEL)}' and '{right.removeprefix(MODEL)}' have different values, and the "
        f"configuration ties '{name}' to '{written}'.",
        remedy='Set "tie_word_embeddings": false in config.json, if the model was trained so.',
    )


def _dtype_name(checkpoint: Checkpoint, kept: Mapping[str, str]) -> str | None:
    """Return the element type that holds every floating-point weight exactly."""
    dtypes = {checkpoint.entry(name).dtype for name in kept.values()}
    floating = sorted((dtype for dtype in dtypes if dtype.is_floating_point), key=str)
    return str(reduce(torch.promote_types, floating)).removeprefix("torch.") if floating else None


def _shown(names: Sequence[str], limit: int = 6) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
