"""Compare the identity of a run over the groups of a quorum, and name the groups.

After every change of the quorum its groups exchange their identities through the quorum's store. A group that
has not trained yet, and whose identity differs from that of the others, leaves with an error that names the
difference.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nnx_core.agree.divergence import checksum
from nnx_core.errors import UnsupportedError
from nnx_torchft._torchft_compat import ProcessGroupGloo, ProcessGroupNCCL, create_store_client

__all__ = [
    "Beginning",
    "Identity",
    "Introduction",
    "local_of",
    "model_digest",
    "new_process_group",
    "weights_digest",
]

_WORDS = {
    "run": "the run is",
    "ranks": "the group has this many processes:",
    "model": "the model is",
    "dataset": "the training dataset has this many samples:",
    "batch": "the global batch has this many samples:",
    "accumulate": "accumulate_grad_batches is",
    "order": "the order of the samples is made by",
    "seed": "the seed is",
    "precision": "precision is",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """The facts that all groups of a run share.

    Attributes:
        run: The name of the run.
        ranks: The number of processes of a group.
        model: A digest of the names, shapes and dtypes of the parameters.
        dataset: The length of the training dataset.
        batch: The size of the global batch.
        accumulate: The number of global batches of a step.
        order: The class of the sampler.
        seed: The seed of the order.
        precision: Lightning's precision string.
    """

    run: str
    ranks: int
    model: str
    dataset: int
    batch: int
    accumulate: int
    order: str
    seed: int
    precision: str

    def difference(self, other: Identity) -> str:
        """Return the first difference as a clause; empty without one.

        Example:
            >>> one = Identity("a", 1, "4 tensors", 100, 8, 1, "RandomSampler", 0, "32-true")
            >>> one.difference(Identity("a", 1, "4 tensors", 120, 8, 1, "RandomSampler", 0, "32-true"))
            'the training dataset has this many samples: 100 here, and 120 there'
        """
        theirs = asdict(other)
        for name, value in asdict(self).items():
            if value != theirs[name]:
                return f"{_WORDS[name]} {value} here, and {theirs[name]} there"
        return ""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The state of a rank before its first step in the run.

    Attributes:
        step: The number of committed steps.
        weights: A digest of its weights; empty if it takes over the weights of another group at step 0.
    """

    step: int
    weights: str

    def differs(self, other: Beginning) -> bool:
        """Return True if two groups begin at the same step with other weights."""
        return self.step == other.step and self.weights != other.weights


def local_of(tensor: Tensor) -> Tensor:
    """Return the elements of this rank, detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def weights_digest(module: nn.Module) -> str:
    """Return a digest of this rank's elements of a module's parameters, as the engine holds them."""
    sums = [int(checksum(local_of(parameter))) for parameter in module.parameters()]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:12]


def model_digest(module: nn.Module) -> str:
    """Return the number of a module's parameters and a digest of their names, shapes and dtypes."""
    text = json.dumps([(n, tuple(p.shape), str(p.dtype)) for n, p in module.named_parameters()])
    count = sum(parameter.numel() for parameter in module.parameters())
    return f"{count:,} parameters ({hashlib.sha256(text.encode()).hexdigest()[:12]})"


class Introduction:
    """Exchanges identities after each change of the quorum.

    Attributes:
        groups: The groups of the current quorum, in its order: the id of each start, and its name.
    """

    def __init__(self, name: str, identity: Identity, beginning: Beginning, timeout: float) -> None:
        self.groups: dict[str, str] = {}
        self.has_trained = False
        self._name, self._identity, self._timeout = name, identity, timedelta(seconds=timeout)
        self._beginning = beginning
        self._id = uuid.uuid4().hex
        self._met: Sequence[Mapping[str, Any]] = ()

    def meet(self, store_address: str, rank: int, size: int) -> None:
        """Exchange identities with the groups of a new quorum. Collective over them."""
        store = create_store_client(f"{store_address}/nnx", timeout=self._timeout)
        own = {
            "id": self._id,
            "name": self._name,
            "trained": self.has_trained,
            "identity": asdict(self._identity),
            "beginning": asdict(self._beginning),
        }
        store.set(str(rank), json.dumps(own))
        self._met = [json.loads(store.get(str(other))) for other in range(size)]
        self.groups = {each["id"]: each["name"] for each in self._met}

    def refuse_others(self) -> None:
        """Refuse to join a run of another identity.

        Raises:
            UnsupportedError: This group has not trained yet, and differs from those that have, or from the
                first one if none has.
        """
        if self.has_trained or not self._met:
            return
        trained = [each for each in self._met if each["trained"]]
        for each in trained or self._met[:1]:
            difference = self._identity.difference(Identity(**each["identity"]))
            if not difference and not trained and self._beginning.differs(Beginning(**each["beginning"])):
                raise UnsupportedError(
                    f"group {self._name!r} cannot join group {each['name']!r}: its weights differ before the "
                    "first step.",
                    remedy="Call `seed_everything` with the same seed in every group, before the model is "
                    "built.",
                )
            if difference:
                raise UnsupportedError(
                    f"group {self._name!r} cannot join group {each['name']!r}: {difference}.",
                    remedy="Start every group with the same script and arguments; give another job a "
                    "lighthouse of its own.",
                )


def new_process_group(device_type: str, introduction: Introduction, timeout: float) -> Any:
    """Make the process group between the groups, which a new quorum configures again.

    Args:
        device_type: The type of the device of the gradients.
        introduction: Meets the other groups after each configuration.
        timeout: Seconds that its collectives wait.
    """
    base: Any = ProcessGroupNCCL if device_type == "cuda" else ProcessGroupGloo

    class Between(base):  # type: ignore[misc] # torchft has no types
        """Torchft's process group; its configuration ends with the introduction."""

        def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int, *rest: Any) -> None:
            super().configure(store_addr, replica_id, rank, world_size, *rest)
            introduction.meet(store_addr, rank, world_size)

    return Between(timeout=timedelta(seconds=timeout))
