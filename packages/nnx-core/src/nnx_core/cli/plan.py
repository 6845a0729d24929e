"""``nnx plan``: predict the memory of a rank under every strategy, before a device is rented.

This module imports torch only when it plans.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypedDict

from nnx_checkpoint.cli.output import print_json, print_text
from nnx_core.errors import OptionError

if TYPE_CHECKING:
    from nnx_core.planning.table import Plan

__all__ = ["Planned", "run"]

_TENSOR = re.compile(r"(?:(?P<dtype>[a-z]+\d+):)?(?P<shape>\d+(?:x\d+)*)")
_EXAMPLE = "Write a size for each dim of each tensor: 4x4096, or float32:8x3x224x224,int64:8."


class PhasePlan(TypedDict):
    """The peak of one phase of a step, in bytes.

    Attributes:
        name: ``forward``, ``backward``, ``step``, ``save`` or ``load``.
        peak: The most bytes on the device at one time.
        end: The bytes on the device at its end.
        host: The most bytes in host memory.
        kinds: The bytes at the peak, by kind.
    """

    name: str
    peak: int
    end: int
    host: int
    kinds: dict[str, int]


class MemoryEstimate(TypedDict):
    """The predicted memory of a rank.

    Attributes:
        peak: The most bytes on the device at one time.
        host: The most bytes in host memory.
        bar: The relative uncertainty.
        sources: The source of each kind: ``traced``, ``formula`` or ``measured``.
        notes: Sentences about the estimate.
        phases: The phases, in order.
    """

    peak: int
    host: int
    bar: float
    sources: dict[str, str]
    notes: list[str]
    phases: list[PhasePlan]


class StrategyPlan(TypedDict):
    """The plan of one strategy.

    Attributes:
        status: ``planned``, ``not installed``, ``no estimate`` or ``no plan``.
        fits: ``yes``, ``tight`` (above nine tenths of the memory), ``no``, or empty without ``--memory``.
        missing: The bytes that are missing.
        largest_batch: The most samples of a device that fit; null without a limit.
        limit: The largest kind of memory at the peak, and its phase.
        cure: The cheapest cure, the install command, or the reason why there is no estimate.
    """

    strategy: str
    status: Literal["planned", "not installed", "no estimate", "no plan"]
    fits: Literal["yes", "tight", "no", ""]
    missing: int
    largest_batch: int | None
    limit: str
    cure: str
    estimate: MemoryEstimate | None


class Planned(TypedDict):
    """The output of ``nnx plan --json``.

    Attributes:
        devices: The number of ranks.
        memory: The bytes of a device; null without ``--memory``.
        source: ``traced``, or ``formula`` if the step could not be traced.
    """

    devices: int
    nodes: int
    memory: int | None
    accelerator: str
    parameters: int
    batch_size: int
    precision: str
    optimizer: str
    source: Literal["traced", "formula"]
    notes: list[str]
    strategies: list[StrategyPlan]


def run(
    target: str,
    *,
    batch: str | None,
    arguments: Mapping[str, Any],
    as_json: bool,
    script: Path | None,
    words: Sequence[str],
    **settings: Any,
) -> int:
    """Print the plan; return 1 if a limit is given and no strategy fits.

    Args:
        target: ``module:Class``, ``file.py:Class``, or empty with a script.
        batch: The shapes of the batch of one device, as text.
        arguments: Arguments of the class.
        as_json: True to print JSON.
        script: A script that calls ``Trainer.fit``.
        words: The arguments of the script.
        settings: Further arguments of `nnx_core.planning.planner.plan`.
    """
    from nnx_core.planning.fakes import batch_maker
    from nnx_core.planning.planner import plan

    sys.path.insert(0, "")
    module: Any
    if script is not None:
        from nnx_core.lightning.planned_script import stop_at_fit

        module, first = stop_at_fit(script, words)
    else:
        module, first = _maker(target, arguments), None
    shapes = None if batch is None else parse_batch(batch)
    found: Plan = plan(module, first if shapes is None else batch_maker(shapes), **settings)
    if as_json:
        print_json(found.as_dict())
    else:
        print_text(str(found))
    limited = found.world.memory is not None
    return 1 if limited and not any(row.fits in ("yes", "tight") for row in found.rows) else 0


def _maker(target: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the function that makes the model which a target names."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise OptionError(
            f"{target!r} names no class.",
            remedy="Write module:Class, file.py:Class, or transformers:LlamaConfig.",
        )
    owner = _module(place)
    found: Any = owner
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        near = ", ".join(key for key, value in vars(owner).items() if isinstance(value, type))[:200]
        raise OptionError(f"{place!r} has no class {name!r}.", remedy=f"It has {near or 'no class'}.")

    def make() -> Any:
        try:
            made = found(**arguments)
        except TypeError as error:
            raise OptionError(
                f"{target} cannot be made: {error}.", remedy="Give its arguments with --init name=value."
            ) from error
        if hasattr(made, "to_json_string") and hasattr(made, "model_type"):
            import transformers

            made.use_cache = False
            causal: Any = transformers.AutoModelForCausalLM
            made = causal.from_config(made)
        return made

    return make


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise OptionError(
                f"{place!r} cannot be imported: {error}.",
                remedy="Check the name, or write the path of the file.",
            ) from error
    path = Path(place)
    if not path.is_file():
        raise OptionError(f"there is no file {place!r}.", remedy="Check the path.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # a file that exists and ends in .py
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def parse_batch(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the dtype, which may be empty, and the shape of each tensor of a batch.

    Raises:
        OptionError: The text is no batch.

    Example:
        >>> parse_batch("4x4096"), parse_batch("float32:8x3,int64:8")
        ([('', (4, 4096))], [('float32', (8, 3)), ('int64', (8,))])
    """
    found = []
    for part in text.split(","):
        match = _TENSOR.fullmatch(part.strip())
        if match is None or "0" in match["shape"].split("x"):
            raise OptionError(f"--batch {text!r} is no batch: {part!r} is no shape.", remedy=_EXAMPLE)
        found.append((match["dtype"] or "", tuple(map(int, match["shape"].split("x")))))
    return found
