"""Algorithms that exchange weights after a step: averages over all ranks or some of them, and DiLoCo."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.sgd import sgd

from nnx_comm.algorithm import Algorithm, Averaging, Tensors, flatten, parts_of, real_view
from nnx_comm.options import DiLoCoOptions
from nnx_comm.state import REPLICA
from nnx_comm.wire import Exact, Int8, make_wire, swap
from nnx_core.agree.announced_waits import wait_for_collective
from nnx_core.errors import RankLostError, UnsupportedError, is_lost_connection

__all__ = ["AsyncAverage", "DiLoCo", "LocalSGD", "LowPrecision", "ShiftOne", "WeightExchange"]


class WeightExchange(Algorithm):
    """Exchanges weights at an interval.

    Attributes:
        interval: Steps between two exchanges.
        are_equal: True if the last exchange left equal weights on all ranks.
        own_is_of_replica: True if `own` belongs to this rank's weights: a checkpoint has it only with these.
    """

    kind = "weights"
    are_equal: bool = False
    own_is_of_replica: ClassVar[bool] = False

    def __init__(self, interval: int) -> None:
        super().__init__()
        self.interval = interval

    def begin(self, weights: Tensors) -> None:
        """Take the weights before a step, if the algorithm compares later ones with them."""

    def finish(self) -> None:
        """Wait for an exchange that travels while ranks train; the weights stay as they are."""

    def exchange(self, tensors: Tensors, *, step: int) -> int:
        """Exchange weights after every `interval` steps. Collective then."""
        self.are_equal = False
        return 0 if step % self.interval else self.exchange_weights(tensors, step // self.interval)

    def combine(
        self, name: str, read: Callable[[int], Tensor], *, saved: int, rank: int, ranks: int
    ) -> Tensor | None:
        """Return as many ranks their own replicas; others begin with the average."""
        if saved != ranks and (self.own_is_of_replica or name.startswith(REPLICA)):
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
            message = swap(mine.flatten().view(torch.uint8), [peer])[peer]
            theirs = message.view(mine.dtype).view(mine.shape)
            # Both ranks add in one order, so that their results are equal bit by bit.
            first, second = (mine, theirs) if rank < peer else (theirs, mine)
            real_view(weight).copy_((first + second) / 2)
            sent += message.numel()
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


class LowPrecision(WeightExchange):
    """Averages weights with both neighbours on a ring, by sending the change of the weights in bytes.

    Bagua's algorithm (DCD-PSGD). Each rank has a copy of its neighbours' weights and of its own, as the
    neighbours have it. It sends the coded difference between its new weights and that copy, and every rank
    that has the copy adds it. So copies stay equal bit by bit, and a rank continues from its own copy.
    """

    kind = "ring"
    own_is_of_replica = True

    def __init__(self, interval: int) -> None:
        super().__init__(interval)
        self._codec = Int8()

    @torch.no_grad()
    def begin(self, weights: Tensors) -> None:
        """Take equal weights of all ranks as the copies."""
        for parameter, weight in weights.items():
            if parameter not in self.own:
                self.own[parameter] = {name: weight.detach().clone() for name in ("here", "left", "right")}

    @torch.no_grad()
    def exchange_weights(self, weights: Tensors, number: int) -> int:
        """Move towards the average with both neighbours."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        left, right = (rank - 1) % ranks, (rank + 1) % ranks
        change = flatten(weights.values())
        for parameter, part in zip(weights, parts_of(change, weights), strict=True):
            for name, share in (("here", -5 / 3), ("left", 1 / 3), ("right", 1 / 3)):
                part.add_(real_view(self.own[parameter][name]), alpha=share)
        rows = self._codec.rows(change, 1)
        count = rows.shape[1]
        coded = self._codec.encode(rows)
        received = swap(coded, {left, right})
        for name, message in (("here", coded), ("left", received[left]), ("right", received[right])):
            decoded = self._codec.decode(message, count, change.dtype)[0, : change.numel()]
            for parameter, part in zip(weights, parts_of(decoded, weights), strict=True):
                real_view(self.own[parameter][name]).add_(part)
        for parameter, weight in weights.items():
            weight.copy_(self.own[parameter]["here"])
        return len(received) * coded.numel()


class AsyncAverage(WeightExchange):
    """Averages weights while the ranks train on, and adds the change later.

    The weights of a step travel during the next `staleness` steps. Then each rank adds the difference between
    their average and its own weights of that step. So no rank is more than `staleness` steps ahead of
    another, and the numbers do not depend on time.

    Args:
        interval: Steps between two averages.
        staleness: Steps until a rank adds an average, at most `interval`.
        group: The ranks; no other collective uses this group.
    """

    kind = "async"
    own_is_of_replica = True

    def __init__(self, interval: int, *, staleness: int, group: dist.ProcessGroup | None) -> None:
        super().__init__(interval)
        self._staleness, self._group = staleness, group
        self._travels: tuple[dist.Work, Tensor, Tensor, Tensors] | None = None

    def exchange(self, tensors: Tensors, *, step: int) -> int:
        """Add the average that is due, and begin another after every `interval` steps."""
        if (step - self._staleness) % self.interval == 0:
            self._add_change(tensors)
        return super().exchange(tensors, step=step)

    @torch.no_grad()
    def exchange_weights(self, weights: Tensors, number: int) -> int:
        """Let the weights travel."""
        sent = flatten(weights.values())
        mean = sent.div(dist.get_world_size())
        work = dist.all_reduce(mean, group=self._group, async_op=True)
        assert work is not None
        self._travels = work, mean, sent, weights
        return Exact().payload(len(sent), ranks=dist.get_world_size(), itemsize=sent.element_size())

    def finish(self) -> None:
        """Wait for the average that travels, and keep the change that is due later.

        Raises:
            RankLostError: A rank has ended.
        """
        if self._travels is None:
            return
        (work, mean, sent, weights), self._travels = self._travels, None
        try:
            wait_for_collective(work, "the average of bagua_async")
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise RankLostError("a rank was lost while the average of bagua_async travelled.") from error
        for parameter, change in zip(weights, parts_of(mean.sub_(sent), weights), strict=True):
            self.own[parameter] = {"change": change}

    @torch.no_grad()
    def _add_change(self, weights: Tensors) -> None:
        self.finish()
        for parameter, weight in weights.items():
            if parameter in self.own:
                real_view(weight).add_(self.own.pop(parameter)["change"])


class DiLoCo(WeightExchange):
    """Steps with SGD on the change of the average weights since the last exchange of their fragment.

    The published algorithm: ranks train alone with the user's optimizer; the outer SGD with Nesterov momentum
    treats the average change as a gradient.

    Args:
        options: The interval, the outer SGD, the fragments and the codec of the changes.
    """

    kind = "diloco"

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
