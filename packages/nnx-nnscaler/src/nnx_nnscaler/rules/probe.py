"""Find strategies of operators without a rule by trials on random data: evidence, not a proof.

This module decides which operators are probed, on which sizes, and how often. It never probes operators that
are random, change operands, or take sizes as arguments. It never proposes partial sums as operands, because a
few points cannot show that an operator is linear.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from nnx_core.json_files import cache_directory, read_json, write_json
from nnx_nnscaler.ir.graph import Argument, Graph, Op, Size, TensorMeta
from nnx_nnscaler.ir.placement import P, Placement, R, S, Strategy
from nnx_nnscaler.rules.rule import bound, operator_of, outputs_of
from nnx_nnscaler.rules.trial import DRAWS, Run, Trial, draw, runner

__all__ = [
    "cache_dir",
    "discover",
]


# Results are cached between processes: one small JSON file for each operator and call. An unreadable file is
# ignored and written again, and a directory without write access is not used.


_FORMAT = 1


def cache_dir() -> Path:
    """Return the directory of the cache; each version of torch has its own."""
    return cache_directory("nnscaler", "tried", torch.__version__)


def load(key: Mapping[str, Any]) -> list[Strategy] | None:
    """Return the cached result for this call; None if no readable one exists."""
    kept = read_json(_path(key))
    try:
        if kept["format"] != _FORMAT or kept["call"] != json.loads(json.dumps(key)):
            return None
        return [
            Strategy(entry["name"], _placements(entry["inputs"]), _placements(entry["outputs"]))
            for entry in kept["strategies"]
        ]
    except (ValueError, KeyError, TypeError):
        return None


def store(key: Mapping[str, Any], strategies: list[Strategy]) -> None:
    """Cache the result for this call."""
    kept = {
        "format": _FORMAT,
        "call": key,
        "strategies": [
            {"name": s.name, "inputs": [str(p) for p in s.inputs], "outputs": [str(p) for p in s.outputs]}
            for s in strategies
        ],
    }
    write_json(_path(key), kept)


def _placements(texts: list[str]) -> tuple[Placement, ...]:
    return tuple(Placement.parse(text) for text in texts)


def _path(key: Mapping[str, Any]) -> Path:
    digest = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True).encode())
    return cache_dir() / f"{key['operator']}-{digest[:16]}.json"


_logger = logging.getLogger("nnx.nnscaler")
_SIZES = (2, 4)
_MOST_OPERANDS = 4
_MOST_ELEMENTS = 2**17
_MOST_COMBINATIONS = 64
_SMALL = 8
_MOST_CALLS = 256
_NEVER = {
    "size",
    "sizes",
    "shape",
    "output_size",
    "split_size",
    "split_sizes",
    "sections",
    "repeats",
    "length",
}
"""Names of arguments that are sizes: the right size for a tensor is wrong for its shard."""
_POSITIONS = {
    "dim",
    "dims",
    "dim0",
    "dim1",
    "axis",
    "axes",
    "axis0",
    "axis1",
    "dimension",
    "start_dim",
    "end_dim",
}
"""Names of arguments that are right for operands of any size."""
_RANDOM = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}

_found: dict[str, list[Strategy]] = {}
_fitting: dict[tuple[str, int, tuple[tuple[int, ...], ...]], list[Strategy]] = {}

Shapes = tuple[tuple[int, ...], ...]


def discover(op: Op, graph: Graph, size: int) -> list[Strategy]:
    """Return the strategies in which the operator on shards gives shards of its unsharded result.

    Args:
        op: An operator without a rule.
        graph: The graph of the operator.
        size: The number of ranks of the unit.

    Returns:
        The strategies in a fixed order; none if the operator must not be probed or
        ``NNX_NNSCALER_PROBE=0`` is set.
    """
    if os.environ.get("NNX_NNSCALER_PROBE") == "0":
        return []
    metas = [graph.meta(name) for name in op.operands()] if op.target != "getitem" else []
    run = runner(op) if _may_try(op, metas) else None
    if run is None:
        return []
    key = _key(op, metas)
    actual = (repr(key), size, tuple(meta.hints for meta in metas))
    if actual not in _fitting:
        found = _known(key, op, metas, run)
        _fitting[actual] = [s for s in found if _keeps_shapes(run, s, metas, outputs_of(op), size)]
    return _fitting[actual]


def _may_try(op: Op, metas: Sequence[TensorMeta]) -> bool:
    operator = operator_of(op.target)
    if operator is None or op.context or not 0 < len(metas) <= _MOST_OPERANDS or not outputs_of(op):
        return False
    schema = operator._schema
    if _is_internal(op.target):
        return False
    if schema.is_mutable or _RANDOM & set(operator.tags) or op.target.startswith("prim"):
        return False
    # The meta of indexing allows any result shape, but the shape depends on data for masks only.
    is_index = op.target == "aten.index.Tensor" and all(_is_integer(meta) for meta in metas[1:])
    if torch.Tag.dynamic_output_shape in operator.tags and not is_index:
        return False
    if any(_has_size(argument) for argument in bound(op).values()) or _NEVER & set(bound(op)):
        return False
    # A kernel of a third party may not check that indices are within range.
    indices = any(_is_integer(meta) for meta in metas)
    return op.target.startswith("aten.") or not indices


def _is_internal(target: str) -> bool:
    """Return True if only torch itself calls an operator, so that its kernel may trust the shapes.

    `aten._weight_norm` writes past the end of its result if the shapes do not match.
    """
    name = target.partition(".")[2]
    return target.startswith("aten.") and name.startswith("_") and not name.startswith("__")


def _known(key: dict[str, object], op: Op, metas: Sequence[TensorMeta], run: Run) -> list[Strategy]:
    """Return an earlier result, of this process or another, or probe now."""
    text = repr(key)
    if text not in _found:
        own = not op.target.startswith("aten.")  # its code may change under the same name
        kept = None if own else load(key)
        if kept is None:
            kept = _tried(op, metas, run) if len(_found) < _MOST_CALLS else []
            if not own:
                store(key, kept)
        _found[text] = kept
    return _found[text]


def _tried(op: Op, metas: Sequence[TensorMeta], run: Run) -> list[Strategy]:
    """Return the results; none if the operator raises."""
    try:
        return _searched(op, metas, run)
    except Exception:  # sparse results, kernels of third parties: such an operator is replicated
        _logger.debug("probe: %s cannot run", op.target, exc_info=True)
        return []


def _searched(op: Op, metas: Sequence[TensorMeta], run: Run) -> list[Strategy]:
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        trials = _trials(op, metas, run)
        if not torch.equal(state, torch.get_rng_state()):
            return []  # it draws random numbers, but its schema does not say so
        if not any(bool(result.isfinite().any()) for trial in trials for result in trial.results):
            return []  # nan and inf prove nothing
        found = []
        for combination in _combinations(trials[0].operands):
            strategy = _guess(run, trials[0], combination)
            if strategy is not None and _holds(run, trials, strategy):
                found.append(strategy)
        return found


def _holds(run: Run, trials: Sequence[Trial], strategy: Strategy) -> bool:
    tensors = [(t.shape, p) for t, p in zip(trials[0].operands, strategy.inputs, strict=True)]
    tensors += [(t.shape, p) for t, p in zip(trials[0].results, strategy.outputs, strict=True)]
    sizes = [size for size in _SIZES if all(placement.fits(shape, size) for shape, placement in tensors)]
    # Every kind of data on the first number of ranks, one kind on the others: few mistakes need both.
    tried = (
        [(sizes[0], trial) for trial in trials] + [(size, trials[0]) for size in sizes[1:]] if sizes else []
    )
    return bool(tried) and not any(trial.disagreement(run, strategy, size) for size, trial in tried)


def _trials(op: Op, metas: Sequence[TensorMeta], run: Run) -> list[Trial]:
    """Run the operator on unsharded operands of every kind of data; none if it cannot run on small ones."""
    for shapes in _shapes(op, metas):
        try:
            return [_trial(run, metas, shapes, kind, seed) for seed, kind in enumerate(DRAWS)]
        except (RuntimeError, IndexError, ValueError, TypeError):  # the shapes do not fit the operator
            continue
    return []


def _trial(
    run: Run, metas: Sequence[TensorMeta], shapes: Shapes, kind: str, seed: int, most: int | None = None
) -> Trial:
    """Run the unsharded operator on one kind of data; integers stay below `most`, or below some dim."""
    generator = torch.Generator().manual_seed(seed)
    extents = [extent for shape in shapes for extent in shape if extent > 1] or [1]
    bounds = [max(extents), min(extents)] if kind == "large" else [min(extents)]
    for bound_of_indices in bounds if most is None else [most]:
        operands = [
            draw(shape, getattr(torch, meta.dtype), kind, bound_of_indices, generator)
            for shape, meta in zip(shapes, metas, strict=True)
        ]
        try:
            return Trial.of(run, operands, generator)
        except IndexError:
            continue
    raise IndexError("no random indices are within range")


def _shapes(op: Op, metas: Sequence[TensorMeta]) -> Iterator[Shapes]:
    """Yield small shapes that match, if no argument counts elements; then small traced shapes."""
    actual = tuple(meta.hints for meta in metas)
    if not any(_counts(name, argument) for name, argument in bound(op).items()):
        # A small dim may have a meaning, such as the three coordinates of a point, and is kept.
        large = sorted({extent for shape in actual for extent in shape if extent > _SMALL})
        small = {extent: _SMALL + 4 * (index + 1) for index, extent in enumerate(large)}
        yield tuple(tuple(small.get(extent, extent) for extent in shape) for shape in actual)
    if sum(math.prod(shape) for shape in actual) <= _MOST_ELEMENTS:
        yield actual


def _combinations(operands: Sequence[torch.Tensor]) -> list[tuple[Placement, ...]]:
    """Return the placements of operands to try: shards of dims of one size, the other operands replicated."""
    extents = sorted({extent for tensor in operands for extent in tensor.shape if extent > 1})
    found: dict[tuple[Placement, ...], None] = {}
    for extent in extents:
        options = [[R, *(S(dim) for dim, n in enumerate(t.shape) if n == extent)] for t in operands]
        found.update(dict.fromkeys(itertools.islice(itertools.product(*options), _MOST_COMBINATIONS)))
    found.pop((R,) * len(operands), None)
    return list(found)[:_MOST_COMBINATIONS]


def _guess(run: Run, trial: Trial, inputs: tuple[Placement, ...]) -> Strategy | None:
    """Return the strategy that the result shapes of one shard suggest; None if they suggest none."""
    first = _SIZES[0]
    if not all(p.fits(tensor.shape, first) for p, tensor in zip(inputs, trial.operands, strict=True)):
        return None
    parts = [
        tensor.narrow(p.dim, 0, tensor.shape[p.dim] // first) if p.is_shard else tensor
        for p, tensor in zip(inputs, trial.operands, strict=True)
    ]
    try:
        with torch.no_grad():
            results = run(parts)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    if len(results) != len(trial.results):
        return None
    outputs = [_guessed(part, whole, first) for part, whole in zip(results, trial.results, strict=True)]
    known = tuple(placement for placement in outputs if placement is not None)
    if len(known) < len(outputs):
        return None
    return Strategy(f"{', '.join(map(str, inputs))} -> {', '.join(map(str, known))}", inputs, known)


def _guessed(part: torch.Tensor, whole: torch.Tensor, size: int) -> Placement | None:
    if part.shape == whole.shape:
        constant = whole.numel() > 1 and bool((whole == whole.flatten()[0]).all())
        return P if whole.is_floating_point() and not constant else None
    if part.ndim != whole.ndim:
        return None
    cut = [dim for dim in range(whole.ndim) if part.shape[dim] != whole.shape[dim]]
    return S(cut[0]) if len(cut) == 1 and part.shape[cut[0]] * size == whole.shape[cut[0]] else None


def _keeps_shapes(
    run: Run, strategy: Strategy, metas: Sequence[TensorMeta], results: Sequence[TensorMeta], size: int
) -> bool:
    """Return True if shards of the traced sizes give shards of the traced results, by shapes alone."""
    inputs = list(zip(metas, strategy.inputs, strict=True))
    outputs = list(zip(results, strategy.outputs, strict=True))
    if not all(placement.fits(meta.hints, size) for meta, placement in (*inputs, *outputs)):
        return False
    parts = [
        torch.empty(p.local_shape(meta.hints, size), dtype=getattr(torch, meta.dtype), device="meta")
        for meta, p in inputs
    ]
    try:
        with torch.no_grad():
            made = run(parts)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False
    return [tuple(t.shape) for t in made] == [p.local_shape(meta.hints, size) for meta, p in outputs]


def _key(op: Op, metas: Sequence[TensorMeta]) -> dict[str, object]:
    """Return the key of a result: operator, other arguments, and probed shapes of the operands."""
    return {
        "operator": op.target,
        "arguments": {name: repr(argument) for name, argument in bound(op).items()},
        "operands": [meta.dtype for meta in metas],
        "shapes": [[list(shape) for shape in shapes] for shapes in _shapes(op, metas)],
    }


def _has_size(argument: Argument) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(_has_size(item) for item in argument)
    return isinstance(argument, Size)


def _counts(name: str, argument: Argument) -> bool:
    """Return True if an argument may count elements, so that it fits the traced sizes only."""
    if isinstance(argument, (list, tuple)):
        return any(_counts(name, item) for item in argument)
    return type(argument) is int and abs(argument) > 1 and name not in _POSITIONS


def _is_integer(meta: TensorMeta) -> bool:
    return not meta.dtype.startswith(("float", "bfloat", "complex", "bool"))
