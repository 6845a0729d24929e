"""Models on `ShardedEngine`, driven by hand on every rank, with the simulated device under it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from jobs.simulated_device import SimDevice
from nnx_colossalai.chunks.chunk import Unit
from nnx_colossalai.chunks.sharded import ShardedEngine
from nnx_colossalai.ledger import DeviceMemoryError
from nnx_colossalai.plan.spec import Tier
from nnx_colossalai.plan.units import find_units
from nnx_core.backend import ParallelContext

WIDTH = 6
TIERS = ("gathered", "sharded", "offloaded", "streamed")


class Layer(nn.Module):
    """With shapes that no number of ranks divides."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 5)
        self.down = nn.Linear(5, WIDTH)
        self.spare = nn.Linear(WIDTH, 3)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three layers, and parameters of the root: a tied pair, a scalar and a frozen layer.

    Args:
        recompute: Recompute the activations of layers in backward.
    """

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer(recompute=recompute) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        x = self.enter(x)
        for number, layer in enumerate(self.layers):
            if fails and number == 2:
                raise ValueError("planted")
            x = layer(x)
        return self.leave(self.frozen(x) * self.gain).float().square().mean()


def batch(step: int) -> Tensor:
    """Return this rank's batch of a step."""
    random = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=random)


class Run:
    """A model laid out on every rank.

    Args:
        tiers: Of the layers and of the root.
        dtype: Working dtype.
        delays: Seed of the device's delays.
        net: The model.
        capacity: Of the device.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        dtype: torch.dtype | None = torch.bfloat16,
        *,
        delays: int | None = None,
        net: nn.Module | None = None,
        capacity: int = 2**24,
    ) -> None:
        self.net = Net() if net is None else net
        self.plain = dict(self.net.named_parameters())
        self.device = SimDevice(capacity, delays=delays, max_delay=0.01)
        context = ParallelContext(
            device=torch.device("cpu"), rank=dist.get_rank(), world_size=dist.get_world_size()
        )
        self.engine = ShardedEngine(context, self.device, dtype)
        found = find_units(self.net, policy=Layer)
        units = [
            Unit(one.name, one.module, one.parameters, Tier(tier))
            for one, tier in zip(found, tiers, strict=True)
        ]
        self.replaced = self.engine.parallelize(self.net, units)
        self.dtype = dtype

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the module's present parameters."""
        return dict(self.net.named_parameters())

    def forward(self, step: int, **more: Any) -> Tensor:
        """One forward of the model, through the engine."""
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return self.engine.run_step(self.net, self.net, batch(step), **more)

    def optimizer(self) -> torch.optim.Optimizer:
        """Adam over the masters."""
        return torch.optim.Adam(self.net.parameters(), lr=0.05, foreach=False)

    def train(self, steps: int, *, refresh: bool = True) -> list[float]:
        """Steps with Adam; losses of this rank."""
        optimizer, losses = self.optimizer(), []
        for step in range(steps):
            loss = self.forward(step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for chunk in self.engine.chunks if refresh else ():
                chunk.refresh()
            losses.append(loss.item())
        return losses

    def whole(self) -> dict[str, Tensor]:
        """Masters of all ranks."""
        return {name: whole(one) for name, one in self.parameters.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of all ranks, of those that have one."""
        return {name: whole(one.grad) for name, one in self.parameters.items() if one.grad is not None}

    def end(self) -> dict[str, Tensor]:
        """The user's own parameters, as they come back."""
        self.engine.unparallelize(self.net)
        self.device.close()
        return {name: one.detach().clone() for name, one in self.net.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """Of all ranks."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextmanager
def running(tiers: Sequence[str], *args: Any, **more: Any) -> Iterator[Run]:
    """A run that is ended."""
    run = Run(tiers, *args, **more)
    try:
        yield run
    finally:
        run.end()


def each(job: Callable[..., Any], mixes: Sequence[Sequence[str]], *args: Any) -> list[Any]:
    """Return a job's result for every mix of tiers."""
    return [job(tiers, *args) for tiers in mixes]


def trained(tiers: Sequence[str], dtype: torch.dtype | None, delays: int | None) -> dict[str, Any]:
    """Return losses, masters and the returned weights after a few steps."""
    run = Run(tiers, dtype, delays=delays)
    losses = run.train(3)
    masters = run.whole()
    return {"losses": losses, "masters": masters, "plain": run.end(), "used": run.device.used}


def shown(tiers: Sequence[str]) -> dict[str, list[bool]]:
    """Return True for each view at which a user sees the same masters in the module."""
    looks: dict[str, list[bool]] = {}
    with running(tiers) as run:
        masters = run.parameters

        def look(when: str) -> None:
            now = run.parameters
            same = [now[name] is master for name, master in masters.items()]
            looks[when] = [*same, all(one.dtype is torch.float32 for one in now.values())]

        look("laid out")
        loss = run.forward(0)
        loss.backward()
        look("after backward")
        with torch.no_grad():
            run.forward(0)
        look("after evaluation")
        run.forward(0)
        run.engine.end_step()
        look("after a forward that no backward followed, when the optimizer is to step")
        try_and_fail(lambda: run.forward(0, fails=True))
        look("after an error in forward")
        loss = run.forward(0)
        loss.register_hook(lambda _: None)
        hook = run.net.layers[1].register_full_backward_hook(_fail)
        failing = run.forward(0)
        try_and_fail(failing.backward)
        hook.remove()
        run.engine.finish()
        look("after an error in backward")
        run.net.zero_grad()
        run.forward(1).backward()
        look("after the next backward")
        looks["gradients"] = [bool(one.isfinite().all()) for one in run.gradients().values()]
        looks["frozen"] = [masters["frozen.weight"].grad is None]
    return looks


def _fail(*_: Any) -> None:
    raise ValueError("planted")


def try_and_fail(call: Callable[[], Any]) -> None:
    """Call a function that must raise the planted error."""
    try:
        call()
    except ValueError as error:
        assert str(error) == "planted"
        return
    raise AssertionError("nothing was raised")


def after_an_error(tiers: Sequence[str], where: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of a step after one that failed, and of the same step without it."""
    results = []
    for fails in (True, False):
        with running(tiers) as run:
            if fails and where == "forward":
                try_and_fail(lambda run=run: run.forward(0, fails=True))
            elif fails:
                hook = run.net.layers[1].register_full_backward_hook(_fail)
                try_and_fail(run.forward(0).backward)
                hook.remove()
            run.net.zero_grad()
            run.forward(1).backward()
            results.append(run.gradients())
    return results[0], results[1]


def gradients_of(tiers: Sequence[str], how: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Gradients of all ranks, computed in some way."""
    with running(tiers, dtype, net=Net(recompute=how == "recomputed")) as run:
        HOWS[how](run)
        return run.gradients()


def _once(run: Run) -> None:
    run.forward(0).backward()


def _accumulated(run: Run) -> None:
    with run.engine.no_sync(run.net):
        run.forward(0).backward()
    run.forward(1).backward()


def _added(run: Run) -> None:
    run.forward(0).backward()
    run.forward(1).backward()


def _asked_within(run: Run) -> None:
    layer = run.net.layers[1]
    layer.register_forward_hook(lambda *_: run.engine.end_step())
    layer.register_full_backward_hook(lambda *_: run.engine.end_step())
    run.forward(0).backward()


def _retained(run: Run) -> None:
    loss = run.forward(0)
    loss.backward(retain_graph=True)
    loss.backward()


def _two_forwards(run: Run) -> None:
    (run.forward(0) + run.forward(1)).backward()


def _thawed(run: Run) -> None:
    run.forward(0).backward()
    run.net.zero_grad()
    run.parameters["layers.1.up.weight"].requires_grad_(False)
    run.parameters["frozen.weight"].requires_grad_(True)
    run.forward(0).backward()


def _set_by_hand(run: Run) -> None:
    run.forward(0).backward()
    for one in run.parameters.values():
        if one.grad is not None:
            one.grad = one.grad * 2
    run.forward(1).backward()


def _let_go_in_place(run: Run) -> None:
    run.forward(0).backward()
    run.net.zero_grad(set_to_none=False)
    run.forward(1).backward()


HOWS: dict[str, Callable[[Run], None]] = {
    "once": _once,
    "recomputed": _once,
    "accumulated": _accumulated,
    "added": _added,
    "asked within": _asked_within,
    "retained": _retained,
    "two forwards": _two_forwards,
    "thawed": _thawed,
    "set by hand": _set_by_hand,
    "let go in place": _let_go_in_place,
}


def changed_from_outside(tiers: Sequence[str], how: str) -> tuple[float, float]:
    """Return the loss after masters were changed without notice to the engine, and the right loss."""
    values = {name: torch.randn(one.shape) * 0.3 for name, one in Net().named_parameters()}
    with running(tiers) as run:
        masters = run.parameters
        run.forward(0)  # leaves gathered weights behind
        if how == "in place":
            with torch.no_grad():
                for name, one in masters.items():
                    _local(one).copy_(_local_part(values[name], one))
        elif how == "state dict":
            sharded = {name: _like(values[name], one) for name, one in masters.items()}
            sharded["leave.weight"] = sharded["enter.weight"]
            run.net.load_state_dict(sharded)
        changed = run.forward(0).item()
    net = Net()
    with torch.no_grad():
        for name, one in net.named_parameters():
            one.copy_(values[name])
    with running(tiers, net=net) as run:
        return changed, run.forward(0).item()


def _local(one: Any) -> Tensor:
    return one.to_local() if isinstance(one, DTensor) else one


def _local_part(value: Tensor, one: Any) -> Tensor:
    return _local(_like(value, one))


def _like(value: Tensor, one: Any) -> Any:
    if not isinstance(one, DTensor):
        return value
    parts = value.chunk(dist.get_world_size())
    part = parts[dist.get_rank()] if dist.get_rank() < len(parts) else value[:0]
    return DTensor.from_local(
        part, one.device_mesh, one.placements, run_check=False, shape=one.shape, stride=one.stride()
    )


def waited(tiers: Sequence[str], use: str) -> dict[str, Any]:
    """Return the waits for each chunk's masters before, during and after a use."""
    with running(tiers) as run:
        calls: list[str] = []
        for chunk in run.engine.chunks:
            chunk.set_pending(_waiter(chunk, calls))
        before = list(calls)
        passing = [(one.shape, one.requires_grad, one.grad) for one in run.parameters.values()]
        assert passing
        metadata = list(calls)
        if use == "forward":
            run.forward(0)
        elif use == "read":
            whole(run.parameters["layers.1.up.weight"])
        elif use == "finish":
            run.engine.finish()
        elif use == "forget":
            for chunk in run.engine.chunks:
                chunk.set_pending(None)
        first = list(calls)
        run.forward(0)
        return {"before": before, "metadata": metadata, "first": first, "in all": calls}


def _waiter(chunk: Any, calls: list[str]) -> Callable[[], None]:
    return lambda: calls.append(chunk.name)


def stepped_in_background(tiers: Sequence[str], delays: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses when another thread changes masters late, and when they are changed at once."""
    results = []
    for late in (True, False):
        with running(tiers, delays=delays) as run:
            losses = []
            for step in range(4):
                losses.append(run.forward(step).detach())
                for chunk in run.engine.chunks:
                    parts = [_local(one.detach()) for one in chunk.masters.values()]
                    thread = threading.Thread(target=_change, args=(chunk, parts, 0.02 if late else 0.0))
                    thread.start()
                    if late:
                        chunk.set_pending(thread.join)
                    else:
                        thread.join()
            run.engine.finish()
            results.append(losses)
    return results[0], results[1]


def _change(chunk: Any, parts: list[Tensor], delay: float) -> None:
    if delay:
        threading.Event().wait(delay)
    with torch.no_grad():
        for part in parts:
            part.mul_(0.9)
    chunk.refresh()


def moved(before: Sequence[str], after: Sequence[str], dtype: torch.dtype | None) -> dict[str, Any]:
    """Training before and after chunks move, with a gradient on the way; and training that stays."""
    names = ["layers.0", "layers.1", "layers.2", ""]
    with running(before, dtype) as run:
        losses = run.train(1)
        run.net.zero_grad()
        run.forward(5).backward()
        run.engine.move(run.net, {name: Tier(tier) for name, tier in zip(names, after, strict=True)})
        tiers = {chunk.name: chunk.tier.value for chunk in run.engine.chunks}
        run.forward(6).backward()
        gradients = run.gradients()
        losses += run.train(2)
        named = [set(chunk.masters) for chunk in run.engine.chunks]
        owned = [
            all(run.parameters[name] is one for name, one in chunk.masters.items())
            for chunk in run.engine.chunks
        ]
        result = {"losses": losses, "gradients": gradients, "masters": run.whole()}
    return {**result, "tiers": tiers, "names": named, "owned": owned}


def memory(tiers: Sequence[str], dtype: torch.dtype | None) -> tuple[int, int, int]:
    """Bytes of the device in use: laid out, and when all is given back; and those of masters, whole.

    When a collective of gloo's has returned, the group's thread still holds its tensors for a moment.
    """
    run = Run(tiers, dtype)
    used = run.device.used
    run.replaced = {}
    bytes_of_masters = sum(
        one._local_tensor.numel() * 4 for one in run.parameters.values() if isinstance(one, DTensor)
    )
    run.end()
    end = time.monotonic() + 20.0
    while run.device.used and time.monotonic() < end:
        time.sleep(0.001)
    return used, run.device.used, bytes_of_masters


def traffic(tiers: Sequence[str], capacity: int) -> tuple[tuple[int, int], int, int]:
    """Return the bytes copied in a step of two micro batches, this rank's elements, and all trained ones."""
    with running(tiers, capacity=capacity) as run:
        run.engine.finish()
        padded = {
            name: -(-one.shape[0] // dist.get_world_size()) * (one.numel() // one.shape[0])
            for name, one in run.parameters.items()
            if isinstance(one, DTensor)
        }
        run.device.traffic.to_device = run.device.traffic.to_host = 0
        with run.engine.no_sync(run.net):
            run.forward(0).backward()
        run.forward(1).backward()
        trained = sum(padded[name] for name in run.gradients() if name in padded)
        copied = run.device.traffic.to_device, run.device.traffic.to_host
        return copied, sum(padded.values()), trained


def order_of_use(tiers: Sequence[str]) -> list[list[str]]:
    """Names of chunks by their index: laid out, after a forward, after one that skips a layer."""
    with running(tiers) as run:
        orders = []

        def note() -> None:
            orders.append([chunk.name for chunk in sorted(run.engine.chunks, key=lambda one: one.index)])

        note()
        run.forward(0).backward()
        note()

        def backwards(x: Tensor) -> Tensor:
            x = run.net.enter(x)
            for layer in (run.net.layers[2], run.net.layers[0]):
                x = layer(x)
            return run.net.leave(x).float().mean()

        with torch.autocast("cpu", torch.bfloat16):
            run.engine.run_step(run.net, backwards, batch(0)).backward()
        note()
    return orders


def out_of_memory(tiers: Sequence[str], when: str) -> dict[str, Any]:
    """Return the error and the later losses when one rank runs out of memory and then has enough."""
    enough, short = 2**24, 1
    if when == "laid out":
        message = _message_of(lambda: Run(tiers, capacity=short if dist.get_rank() == 1 else enough))
        return {"message": message, "loss": 0.0, "wanted": 0.0}
    with running(tiers) as run:
        wanted = run.forward(0).item()
        run.engine.move(run.net, {})
        if dist.get_rank() == 1:
            run.device.capacity = short
        names = ("layers.0", "layers.1", "layers.2", "")
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: run.forward(0),
            "moved": lambda: run.engine.move(run.net, dict.fromkeys(names, Tier.OFFLOADED)),
        }
        message = _message_of(calls[when])
        run.device.capacity = enough
        return {"message": message, "loss": run.forward(0).item(), "wanted": wanted}


def _message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except DeviceMemoryError as error:
        return error.message
    return "none"
