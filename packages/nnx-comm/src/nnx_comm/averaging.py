"""Algorithms that exchange weights after a step: averages, averages of pairs, and DiLoCo."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.sgd import sgd

from nnx_comm.algorithm import Algorithm, Averaging, Tensors, real_view
from nnx_comm.options import DiLoCoOptions
from nnx_comm.state import REPLICA
from nnx_comm.wire import Exact, make_wire
from nnx_core.errors import UnsupportedError

__all__ = ["DiLoCo", "LocalSGD", "ShiftOne", "WeightExchange"]


class WeightExchange(Algorithm):
    """Exchanges weights at an interval.

    Attributes:
        interval: Steps between two exchanges.
        are_equal: True if the last exchange left equal weights on all ranks.
    """

    are_equal: bool = False

    def __init__(self, interval: int) -> None:
        super().__init__()
        self.interval = interval

    def begin(self, weights: Tensors) -> None:
        """Take the weights before a step, if the algorithm compares later ones with them."""

    def exchange(self, tensors: Tensors, *, step: int) -> int:
        """Exchange weights after every `interval` steps. Collective then."""
        self.are_equal = False
        return 0 if step % self.interval else self.exchange_weights(tensors, step // self.interval)

    def combine(
        self, name: str, read: Callable[[int], Tensor], *, saved: int, rank: int, ranks: int
    ) -> Tensor | None:
        """Return as many ranks their own replicas; others begin with the average."""
        if name.startswith(REPLICA) and saved != ranks:
            return None
        return super().combine(name, read, saved=saved, rank=rank, ranks=ranks)

    @abstractmethod
    def exchange_weights(self, weights: Tensors, number: int) -> int:
        """Exchange weights in place; return the bytes that this rank sent. Collective.

        Args:
            weights: The weights of this rank.
            number: The number of exchanges, this one included.
        """


class LocalSGD(WeightExchange):
    """Replaces the weights by their average."""

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self._averaging = Averaging(Exact())

    def exchange_weights(self, weights: Tensors, number: int) -> int:
        """Average the weights over all ranks."""
        self.are_equal = True
        return self._averaging.exchange(weights, step=number)


class ShiftOne(WeightExchange):
    """Averages weights with one other rank, another one in each exchange.

    Args:
        interval: Steps between two exchanges.
        ranks: The number of ranks.

    Raises:
        UnsupportedError: It is odd.
    """

    def __init__(self, interval: int, *, ranks: int) -> None:
        super().__init__(interval)
        if ranks > 1 and ranks % 2:
            raise UnsupportedError(
                f"peer_selection_mode='shift_one' averages pairs of ranks, and there are {ranks} ranks.",
                remedy="Use an even number of ranks, or peer_selection_mode='all'.",
            )

    @torch.no_grad()
    def exchange_weights(self, weights: Tensors, number: int) -> int:
        """Average the weights with this exchange's peer."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        peer, sent = peer_of(rank, ranks, number), 0
        for weight in weights.values():
            mine = real_view(weight.detach()).contiguous()
            theirs = torch.empty_like(mine)
            there, here = mine.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8)
            pair = [dist.P2POp(dist.isend, there, peer), dist.P2POp(dist.irecv, here, peer)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            # Both ranks add in one order, so that their results are equal bit by bit.
            first, second = (mine, theirs) if rank < peer else (theirs, mine)
            real_view(weight).copy_((first + second) / 2)
            sent += mine.numel() * mine.element_size()
        self.are_equal = ranks == 2
        return sent


def peer_of(rank: int, ranks: int, number: int) -> int:
    """Return the rank to average with: each rank of the lower half meets each of the upper half in turn.

    Example:
        >>> [[peer_of(rank, 4, number) for rank in range(4)] for number in (1, 2)]
        [[3, 2, 1, 0], [2, 3, 0, 1]]
    """
    half = ranks // 2
    return half + (rank + number) % half if rank < half else (rank - half - number) % half


class DiLoCo(WeightExchange):
    """Steps with SGD on the change of the average weights since the last exchange of their fragment.

    The published algorithm: ranks train alone with the user's optimizer; the outer SGD with Nesterov momentum
    treats the average change as a gradient.

    Args:
        options: The interval, the outer SGD, the fragments and the codec of the changes.
    """

    def __init__(self, options: DiLoCoOptions) -> None:
        super().__init__(options.interval)
        self._options = options
        self._averaging = Averaging(
            make_wire(options.codec, options.density), error_feedback=options.error_feedback
        )
        self.own = self._averaging.own

    @torch.no_grad()
    def begin(self, weights: Tensors) -> None:
        """Take the weights of parameters without outer weights as these."""
        for parameter, weight in weights.items():
            if "outer" not in self.shared.get(parameter, {}):
                self.shared.setdefault(parameter, {})["outer"] = weight.detach().clone()

    def exchange(self, tensors: Tensors, *, step: int) -> int:
        """Exchange the fragments whose step it is. Collective for these."""
        self.are_equal = False
        count, payload = self._options.fragments, 0
        fragments = divide(tensors, count)
        for index, fragment in enumerate(fragments):
            if (step + index * self.interval // count) % self.interval == 0:
                payload += self.exchange_weights(fragment, step)
                self.are_equal = count == 1
        return payload

    @torch.no_grad()
    def exchange_weights(self, weights: Tensors, number: int) -> int:
        """Step with the outer SGD, and continue from its weights."""
        options, states = self._options, [self.shared[parameter] for parameter in weights]
        outer = [state["outer"] for state in states]
        changes: dict[nn.Parameter, Tensor] = {
            parameter: start - weight
            for (parameter, weight), start in zip(weights.items(), outer, strict=True)
        }
        payload = self._averaging.exchange(changes, step=number)
        momenta = [state.get("momentum") for state in states]
        sgd(
            outer,
            list(changes.values()),
            momenta,
            lr=options.outer_lr,
            momentum=options.outer_momentum,
            nesterov=options.outer_momentum > 0,
            weight_decay=0.0,
            dampening=0.0,
            maximize=False,
        )
        for state, momentum in zip(states, momenta, strict=True):
            if momentum is not None:
                state["momentum"] = momentum
        for weight, start in zip(weights.values(), outer, strict=True):
            weight.copy_(start)
        return payload


def divide(weights: Tensors, count: int) -> list[dict[nn.Parameter, Tensor]]:
    """Divide weights into fragments of about equal size, in order."""
    total, before = sum(weight.numel() for weight in weights.values()), 0
    fragments: list[dict[nn.Parameter, Tensor]] = [{} for _ in range(count)]
    for parameter, weight in weights.items():
        fragments[min(count - 1, before * count // max(total, 1))][parameter] = weight
        before += weight.numel()
    return fragments
