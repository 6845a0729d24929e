"""The options of every strategy that is built on a backend.

The module uses only the standard library, so that `nnx show` can list options without importing torch. An
engine's own options are a dataclass of the same form in its package: the metadata of each field documents it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from nnx_core.errors import OptionError

__all__ = [
    "CommonOptions",
    "bytes_of",
    "check_choice",
    "check_options",
    "option",
    "split_options",
    "values_of",
]

StateDictType = Literal["sharded", "deduped"]
GatherAtEnd = Literal["all", "rank0", "none"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def option(
    default: Any = MISSING,
    *,
    help: str,
    choices: tuple[Any, ...] = (),
    types: tuple[type, ...] = (),
    is_read: bool = False,
    layers: bool = False,
) -> Any:
    """Return a dataclass field with the help text that `nnx show` and the docs print.

    Args:
        default: The default; an option without one is required.
        help: The effect of the option.
        choices: The allowed values, if they are few.
        types: The allowed types; None is allowed, too, if it is the default.
        is_read: True if a path must be that of an existing file.
        layers: True if it takes layer classes, names of classes, and, for a name that ends with policy,
            functions that select modules.
    """
    metadata = {"help": help, "choices": choices, "types": types, "is_read": is_read, "layers": layers}
    if isinstance(default, (list, dict, set)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every strategy, in addition to an engine's own."""

    state_dict_type: StateDictType = option(
        "deduped",
        help="'deduped' stores each element once across the ranks; 'sharded' stores every rank's complete "
        "local state, which is larger and resumes fastest on the same layout. Both resume anywhere.",
        choices=("deduped", "sharded"),
    )
    async_save: bool = option(
        False,
        help="Save in the background: training blocks only while this rank's state is copied to CPU memory, "
        "which must have space for it. Errors are raised at a later step, or at the end.",
        types=(bool,),
    )
    memory_checkpoint: int | None = option(
        None,
        help="Copy each rank's state to the memory of its host and of the next host after every so many "
        "optimizer steps of a Trainer. Restarted processes resume from the copies. By default, none.",
        types=(int,),
    )
    memory_directory: str = option(
        "/dev/shm",
        help="The directory of each host whose files are in memory, for memory_checkpoint.",
        types=(str,),
    )
    process_group_backend: str | None = option(
        None,
        help="Backend of torch.distributed ('nccl', 'gloo', ...); by default the device's own.",
        types=(str,),
    )
    timeout: float = option(
        1800.0, help="Seconds after which a collective that hangs raises an error.", types=(int, float)
    )
    start_method: StartMethod = option(
        "popen",
        help="How to start processes on one node: 'popen' runs the script again for each device; the other "
        "methods are those of multiprocessing, for notebooks and interactive use.",
        choices=("popen", "spawn", "fork", "forkserver"),
    )
    gather_at_end: GatherAtEnd = option(
        "all",
        help="Ranks that hold the unsharded weights in CPU memory after a Trainer's run: 'all', 'rank0' to "
        "save memory on the other ranks of a node, or 'none' if you only need the checkpoint. Parameters of "
        "the other ranks are on the meta device.",
        choices=("all", "rank0", "none"),
    )
    resume_data: Literal["skip", "restart"] = option(
        "skip",
        help="How training data resumes inside an epoch: 'skip' skips the samples already seen; 'restart' "
        "leaves loaders alone, for loaders that skip on their own.",
        choices=("skip", "restart"),
    )
    strict_rng: bool = option(
        False,
        help="Refuse to resume if random states cannot resume exactly, as with another number of ranks.",
        types=(bool,),
    )
    check_every: int | None = option(
        None,
        help="Compare checksums over the ranks every so many steps: replicated parameters and buffers, "
        "optimizer options and counters, the set of gradients, the plan. By default after the first two "
        "steps only, without buffers; 0 is never.",
        types=(int,),
    )
    check_plan: bool = option(
        False,
        help="Predict the memory of a rank before a Trainer's fit, as `nnx plan` does, and log it beside the "
        "memory that the third step takes on rank zero.",
        types=(bool,),
    )
    opaque_objects: Literal["error", "pickle"] = option(
        "error",
        help="How to save objects without a JSON form: refuse them, or pickle them. Pickles are loaded only "
        "through torch's restricted unpickler.",
        choices=("error", "pickle"),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.timeout <= 0:
            raise OptionError(
                f"timeout={self.timeout!r} is not a positive number of seconds.", remedy="Pass, say, 1800."
            )
        check_interval(self.memory_checkpoint)
        if self.check_every is not None and self.check_every < 0:
            raise OptionError(
                f"check_every={self.check_every!r} is not a number of steps.", remedy="Pass, say, 100."
            )


def check_interval(memory_checkpoint: int | None) -> None:
    """Refuse an interval of copies in memory that is not a positive number of steps, or None."""
    if memory_checkpoint is None or (type(memory_checkpoint) is int and memory_checkpoint > 0):
        return
    raise OptionError(
        f"memory_checkpoint={memory_checkpoint!r} is not a positive number of steps.", remedy="Pass, say, 5."
    )


def values_of(options: Any) -> dict[str, Any]:
    """Return the values of an options dataclass by name, as they are.

    Example:
        >>> values_of(CommonOptions())["timeout"]
        1800.0
    """
    return {item.name: getattr(options, item.name) for item in fields(options)}


def check_options(options: Any) -> None:
    """Refuse values that an options dataclass does not allow; call it in ``__post_init__``.

    Raises:
        OptionError: A value is not among the choices, has another type, or is the path of a missing file.
    """
    for item in fields(options):
        value, types = getattr(options, item.name), item.metadata.get("types", ())
        check_choice(item.name, value, item.metadata.get("choices", ()))
        if types and not isinstance(value, types) and not (value is None and item.default is None):
            allowed = " or ".join(each.__name__ for each in types)
            raise OptionError(
                f"{item.name}={value!r} is of type {type(value).__name__}.", remedy=f"Pass {allowed}."
            )
        is_path = item.metadata.get("is_read", False) and isinstance(value, (str, os.PathLike))
        if is_path and not Path(value).is_file():
            raise OptionError(f"{item.name}={value!r}: there is no such file.", remedy="Check the path.")
        if item.metadata.get("layers", False):
            _check_layers(item.name, value)


def _check_layers(name: str, value: Any) -> None:
    """Refuse anything but module classes and names of classes.

    Raises:
        OptionError: An item is neither. `Layers` matches names with the model later.
    """
    is_policy = name.endswith("policy")
    if value is None or (is_policy and callable(value) and not isinstance(value, type)):
        return
    several = isinstance(value, Iterable) and not isinstance(value, (str, type))
    if isinstance(value, Iterator):
        return  # it can be read once
    for item in value if several else (value,):
        bases = {f"{base.__module__}.{base.__name__}" for base in getattr(item, "__mro__", ())}
        is_name = isinstance(item, str) and all(part.isidentifier() for part in item.split("."))
        if not (is_name or "torch.nn.modules.module.Module" in bases):
            function = ", or a function from module to bool" if is_policy else ""
            raise OptionError(
                f"{name} holds {item!r}, which is not a module class.",
                remedy="Pass a subclass of torch.nn.Module, such as TransformerBlock, its name as 'Block' or "
                f"'module.Block', or a list of them{function}.",
            )


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuse a value that is not among `choices`; an empty tuple allows all values.

    Raises:
        OptionError: The value is not allowed; the message lists the allowed ones.

    Example:
        >>> check_choice("start_method", "popen", ("popen", "spawn"))
    """
    if choices and value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise OptionError(f"{name}={value!r} is not allowed.", remedy=f"Use one of {allowed}.")


def split_options(
    given: dict[str, Any],
    *,
    owner: str,
    schemas: tuple[type[Any], ...],
    elsewhere: Callable[[str], Sequence[str]] = lambda name: (),
) -> tuple[dict[str, Any], ...]:
    """Split keyword arguments between the dataclasses that declare them.

    Args:
        given: The user's keyword arguments.
        owner: The name of the strategy, for the message.
        schemas: Dataclasses; the first that declares a name gets it.
        elsewhere: Returns the names of strategies that have an option, for the message.

    Returns:
        One dict of keyword arguments for each schema.

    Raises:
        OptionError: None of them declares a name; the message suggests the nearest names.
    """
    split: tuple[dict[str, Any], ...] = tuple({} for _ in schemas)
    names = [{item.name for item in fields(schema)} for schema in schemas]
    for key, value in given.items():
        for known, target in zip(names, split, strict=True):
            if key in known:
                target[key] = value
                break
        else:
            others = elsewhere(key)
            raise _unknown_option(
                key, owner, all_names=set().union(*names), own=sorted(names[-1]), others=others
            )
    return split


def _unknown_option(
    key: str, owner: str, *, all_names: set[str], own: list[str], others: Sequence[str]
) -> OptionError:
    near = get_close_matches(key, sorted(all_names), n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    if others:
        hint = f"It is an option of {', '.join(others)}. "
    common = ", ".join(item.name for item in fields(CommonOptions))
    its = f"Its options are {', '.join(own)}; and those of every strategy: {common}." if own else ""
    return OptionError(
        f"strategy {owner!r} has no option {key!r}.",
        remedy=f"{hint}{its or f'Its options are those of every strategy: {common}.'}",
    )


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def bytes_of(value: int | float | str | None, *, name: str) -> int | None:
    """Return a number of bytes from a number or a text with a unit; None stays None.

    Args:
        value: A size such as ``24 * 2**30``, ``"24GiB"``, ``"24 GB"`` (decimal) or ``"1e9"``.
        name: The name of the option, used in the message.

    Raises:
        OptionError: The value is no size, or not positive.

    Example:
        >>> bytes_of("1.5 KiB", name="device_memory")
        1536
    """
    if value is None:
        return None
    number = _number_of(value) if isinstance(value, str) else value
    if isinstance(value, bool) or number is None or not 1 <= number < math.inf:
        raise OptionError(
            f"{name}={value!r} is not a size in bytes.", remedy="Pass a positive number or text like '24GiB'."
        )
    return int(number)


def _number_of(text: str) -> float | None:
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if found is None or (found[3] and not found[2]):
        return None
    return float(found[1]) * (_BINARY if found[3] else _UNITS)[found[2]]
