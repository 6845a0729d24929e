"""Which layers cannot be chunks: others use their weights, or nobody could see that none does.

Owns the rule that the plan of a run and a dry run share; what a step uses is `probe`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from nnx_colossalai.chunks.units import FoundUnit
from nnx_colossalai.plan.probe import Probe
from nnx_fsdp.units import DEFAULT_MIN_NUM_PARAMS, choose_units

__all__ = ["doubtful_units", "left_with_the_root"]


def doubtful_units(
    module: nn.Module, found: Sequence[FoundUnit], *, policy: object, least: int | None, most: int | None
) -> dict[str, bool]:
    """Units whose weights other modules may use, and whether they lie beside the layers.

    Beside them are embeddings and heads; parts of layers are units because `most` asks for it.

    Args:
        module: The root.
        found: Its units.
        policy: See `find_units`, as are the next two; units that a policy chose are never in doubt.
        least: Smallest unit.
        most: Largest unit.

    Example:
        >>> from nnx_colossalai.chunks.units import find_units
        >>> layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> module = nn.ModuleDict({"embed": nn.Embedding(9, 8), "layers": layers})
        >>> doubtful_units(module, find_units(module, min_numel=9), policy=None, least=9, most=None)
        {'embed': True}
    """
    if policy is not None:
        return {}
    if least is None and most is not None:  # as for chunks
        least = min(most, DEFAULT_MIN_NUM_PARAMS)
    layers = choose_units(module, min_num_params=least).units
    names = {name for name, _ in layers} | {""}
    inside = tuple(f"{name}." for name, _ in layers)
    return {unit.name: not unit.name.startswith(inside) for unit in found if unit.name not in names}


def left_with_the_root(probe: Probe | None, doubtful: Mapping[str, bool]) -> list[str]:
    """Names of units that must be none.

    Args:
        probe: What a step was seen to use; with a note nothing was seen. None: nobody needed to look.
        doubtful: See `doubtful_units`.

    Example:
        >>> left_with_the_root(Probe(note="no inputs"), {"embed": True, "layers.0.up": False})
        ['embed']
        >>> left_with_the_root(Probe(used_outside=frozenset({"head"})), {"embed": True, "head": True})
        ['head']
    """
    if probe is None:
        return []
    if probe.note:
        return [name for name, is_beside in doubtful.items() if is_beside]
    return sorted(probe.used_outside)
