"""What Lightning's averaging callbacks leave in a checkpoint: a second set of weights, read when needed.

Under them ``state_dict`` holds the average, and Lightning's dict the weights being trained beside it:
complete models, which no rank wants to have in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from nnx_checkpoint.foreign.torch_file import map_tree
from nnx_checkpoint.naming import LazyStateDict, StoredName, stored_objects
from nnx_checkpoint.views import Described, View

CURRENT = "current_model_state"
"""Where `WeightAveraging` puts the weights being trained; ``state_dict`` then has the average."""
STATE = "averaging_state"
"""Where it puts what else the average consists of."""
AVERAGE = "average_model_state"
"""Where `StochasticWeightAveraging` has the average, in its own state."""


class WeightsOnDisk(View):
    """A checkpoint whose objects hold a `LazyStateDict` in place of further sets of weights."""

    @cached_property
    def objects(self) -> Any:
        """The common objects, all other tensors in them read."""
        described = Described(self.inner)
        for owner, key in _weights_in(stored_objects(described, "trainer")):
            owner[key] = LazyStateDict.of(self, owner[key])
        return map_tree(described.objects, self._read)

    def _read(self, value: Any) -> Any:
        return self.read(value.key) if isinstance(value, StoredName) else value


def _weights_in(trainer: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The dicts, and the key in each, under which there are weights."""
    states = trainer.get("callbacks")
    owners = [(trainer, CURRENT)]
    owners += [(state, AVERAGE) for state in (states.values() if isinstance(states, Mapping) else ())]
    for owner, key in owners:
        if isinstance(owner, dict) and isinstance(owner.get(key), Mapping):
            yield owner, key
