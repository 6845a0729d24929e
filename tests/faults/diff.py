"""Faults of training that `nnx diff` has to find and to name, planted in plain data parallelism.

Each fault is a function that changes values at one point of a step, such as the reduced gradients. The kinds
are those of the conformance suite's faults, of NVIDIA/Megatron-LM#7452 (silent numerical bugs), and of lost
gradients in split backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nnx_core.backend import Backend
from nnx_core.options import option
from nnx_tiny.averaging import average_gradients
from nnx_tiny.backend import TinyBackend
from nnx_tiny.options import TinyOptions


@dataclass(frozen=True, kw_only=True)
class FaultOptions(TinyOptions):
    """Options of the faulty strategy."""

    fault: str = option("", help="The name of the fault.")
    target: str = option("", help="The name of a parameter in the middle of the model.")
    vector: str = option("", help="The name of a bias near it.")


class Faulty(TinyBackend):
    """Data parallelism with one fault.

    Attributes:
        step: The number of the step, from 0.
        memory: Values that a fault keeps.
    """

    Options = FaultOptions
    options: FaultOptions

    def parallelize(self, module: nn.Module, sample: object) -> Mapping[nn.Parameter, nn.Parameter]:
        replaced = super().parallelize(module, sample)
        self.module, self.step, self.memory = module, 0, {}
        self._at("start")
        return replaced

    def _at(self, point: str, *args: Any) -> Any:
        planted = FAULTS[self.options.fault]
        return planted.act(self, *args) if planted.point == point else None

    @property
    def data_parallel_rank_and_size(self) -> tuple[int, int]:
        return self._at("share") or super().data_parallel_rank_and_size

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def size(self) -> int:
        return self.context.world_size

    @property
    def target(self) -> nn.Parameter:
        return self.module.get_parameter(self.options.target)

    @property
    def vector(self) -> nn.Parameter:
        return self.module.get_parameter(self.options.vector)

    @property
    def layer(self) -> nn.Module:
        return self.module.get_submodule(self.options.target.rpartition(".")[0])

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def run_step(self, module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        changed = self._at("batch", args[0]) if args else None
        return step(*((changed, *args[1:]) if changed is not None else args), **kwargs)

    def backward(self, module: nn.Module, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        changed = self._at("loss", loss)
        Backend.backward(self, module, loss if changed is None else changed, *args, **kwargs)
        self._at("local")
        self.local = {p: p.grad.clone() for p in module.parameters() if p.grad is not None}
        if self.size > 1:
            average_gradients(module, bucket_megabytes=self.options.bucket_megabytes)
        with torch.no_grad():
            self._at("reduced")

    def clip_grad_norm(self, optimizer: Optimizer, max_norm: float, **kwargs: Any) -> Tensor:
        changed = self._at("clip", max_norm)
        return super().clip_grad_norm(optimizer, max_norm if changed is None else changed, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        before: dict[nn.Parameter, Tensor] = {}

        def computed() -> Any:  # the closure computes gradients and clips them
            result = closure() if closure is not None else None
            before.update({p: p.detach().clone() for p in self.parameters})
            self._at("before", optimizer)
            return result

        result = step(closure=computed)
        with torch.no_grad():
            self._at("after", before)
            self._at("optimizer", optimizer)
        self.step += 1
        return result


@dataclass(frozen=True)
class Planted:
    """A planted fault.

    Attributes:
        point: Where it acts.
        act: The function, of the backend and of the values at that point.
        kinds: The kinds that name it rightly.
        where: ``target``, ``vector``, ``any`` (of many), or a name.
    """

    point: str
    act: Callable[..., Any]
    kinds: tuple[str, ...]
    where: str = "target"


FAULTS: dict[str, Planted] = {"": Planted("", lambda b: None, ())}


def _half(tensor: Tensor) -> Tensor:
    return tensor[: tensor.shape[0] // 2]


def _plant(
    name: str, point: str, kinds: Sequence[str], act: Callable[..., Any], where: str = "target"
) -> None:
    FAULTS[name] = Planted(point, act, tuple(kinds), where)


# Sums over the ranks.


def _own(b: Faulty, parameter: nn.Parameter) -> None:
    parameter.grad.copy_(b.local[parameter])


def _silence(*parameters: nn.Parameter) -> None:
    for parameter in parameters:
        parameter.grad.zero_()


MISSING = ("missing sum",)
_plant(
    "one parameter is not reduced on the last rank",
    "reduced",
    MISSING,
    lambda b: b.last and _own(b, b.target),
)
_plant("one parameter is not reduced", "reduced", MISSING, lambda b: _own(b, b.target))
_plant("a bias is not reduced", "reduced", MISSING, lambda b: _own(b, b.vector), "vector")
_plant("nothing is reduced", "reduced", MISSING, lambda b: [_own(b, p) for p in b.parameters], "any")
_plant("the first parameter is not reduced", "reduced", MISSING, lambda b: _own(b, b.parameters[0]), "first")
_plant(
    "the last parameters are not reduced",
    "reduced",
    MISSING,
    lambda b: [_own(b, p) for p in b.parameters[-2:]],
    "last",
)
_plant("the last rank adds nothing to one sum", "local", MISSING, lambda b: b.last and _silence(b.target))
_plant(
    "the last rank adds nothing to any sum",
    "local",
    MISSING,
    lambda b: b.last and _silence(*b.parameters),
    "any",
)
_plant(
    "rank 0 adds nothing to a sum of a bias",
    "local",
    MISSING,
    lambda b: b.rank == 0 and _silence(b.vector),
    "vector",
)
_plant(
    "half of a parameter is not reduced",
    "reduced",
    MISSING,
    lambda b: _half(b.target.grad).copy_(_half(b.local[b.target])),
)
_plant(
    "the layer is not reduced from step 1 on",
    "reduced",
    MISSING,
    lambda b: b.step and [_own(b, p) for p in b.layer.parameters()],
    "layer",
)

TWICE = ("summed twice",)
_plant("a gradient is added twice", "reduced", TWICE, lambda b: b.target.grad.mul_(2))
_plant(
    "a bias is added twice on the last rank",
    "reduced",
    TWICE,
    lambda b: b.last and b.vector.grad.mul_(2),
    "vector",
)
_plant(
    "rank 0 is added twice", "local", (*TWICE, "factor N"), lambda b: b.rank == 0 and b.target.grad.mul_(2)
)
_plant("half of a parameter is added twice", "reduced", TWICE, lambda b: _half(b.target.grad).mul_(2))
_plant("a bias is added twice", "reduced", TWICE, lambda b: b.vector.grad.mul_(2), "vector")
_plant(
    "one rank is added twice everywhere",
    "local",
    (*TWICE, "factor N"),
    lambda b: b.last and [p.grad.mul_(2) for p in b.parameters],
    "any",
)

FACTOR = ("factor N",)
_plant(
    "sums in the place of means",
    "reduced",
    FACTOR,
    lambda b: [p.grad.mul_(b.size) for p in b.parameters],
    "any",
)
_plant(
    "means are divided twice", "reduced", FACTOR, lambda b: [p.grad.div_(b.size) for p in b.parameters], "any"
)
_plant("the loss is scaled", "loss", FACTOR, lambda b, loss: loss * 3, "any")
_plant("the loss scale is not undone", "loss", FACTOR, lambda b, loss: loss * 128, "any")
_plant(
    "one layer is scaled",
    "reduced",
    FACTOR,
    lambda b: [p.grad.mul_(1.5) for p in b.layer.parameters()],
    "layer",
)
_plant("the sign is wrong", "reduced", FACTOR, lambda b: b.target.grad.neg_())
_plant(
    "gradients are divided by the batch once more",
    "reduced",
    FACTOR,
    lambda b: [p.grad.div_(8) for p in b.parameters],
    "any",
)

DROPPED = ("dropped gradient",)


def _forget(*parameters: nn.Parameter) -> None:
    for parameter in parameters:
        parameter.grad = None


_plant("a gradient is None", "reduced", DROPPED, lambda b: _forget(b.target))
_plant("a gradient is zero", "reduced", DROPPED, lambda b: _silence(b.target))
_plant("a bias has no gradient", "reduced", DROPPED, lambda b: _forget(b.vector), "vector")
_plant("a gradient is zero on the last rank", "reduced", DROPPED, lambda b: b.last and _silence(b.target))
_plant(
    "half of a gradient is zero", "reduced", (*DROPPED, "other mask"), lambda b: _half(b.target.grad).zero_()
)
_plant("gradients are lost from step 1 on", "reduced", DROPPED, lambda b: b.step and _silence(b.target))
_plant(
    "a split backward loses the layers before", "reduced", DROPPED, lambda b: _silence(*_before(b)), "before"
)
_plant(
    "a split backward loses the weights",
    "reduced",
    DROPPED,
    lambda b: _silence(*(p for p in b.parameters if p.dim() > 1)),
    "any",
)

KEPT = ("kept gradient",)


def _before(b: Faulty) -> list[nn.Parameter]:
    names = [name for name, _ in b.module.named_parameters()]
    return b.parameters[: names.index(b.options.target)]


def _keep(b: Faulty, *parameters: nn.Parameter) -> None:
    for parameter in parameters:
        earlier = b.memory.get(parameter)
        b.memory[parameter] = parameter.grad.clone()
        if earlier is not None:
            parameter.grad.add_(earlier)


def _late(b: Faulty, parameter: nn.Parameter) -> None:
    earlier = b.memory.get(parameter)
    b.memory[parameter] = parameter.grad.clone()
    if earlier is not None:
        parameter.grad.copy_(earlier)


_plant("gradients are not zeroed", "reduced", KEPT, lambda b: _keep(b, *b.parameters), "any")
_plant("one gradient is not zeroed", "reduced", KEPT, lambda b: _keep(b, b.target))
_plant("a gradient comes a step late", "reduced", KEPT, lambda b: _late(b, b.target))
_plant(
    "a gradient comes a step late on the last rank", "reduced", KEPT, lambda b: b.last and _late(b, b.target)
)

# Places of elements.

SLICE = ("wrong slice",)


def _swap_halves(tensor: Tensor) -> None:
    tensor.copy_(tensor.roll(tensor.shape[0] // 2, 0))


def _repeat_half(tensor: Tensor) -> None:
    half = tensor.shape[0] // 2
    tensor[half : 2 * half].copy_(tensor[:half].clone())


def _turn(tensor: Tensor) -> None:
    tensor.copy_(tensor.transpose(0, 1).clone())


def _view(tensor: Tensor) -> None:
    tensor.copy_(tensor.transpose(0, -1).contiguous().view_as(tensor).clone())


_plant("halves of a gradient are exchanged", "reduced", SLICE, lambda b: _swap_halves(b.target.grad))
_plant("a slice is there twice", "reduced", SLICE, lambda b: _repeat_half(b.target.grad))
_plant("rows are moved by one", "reduced", SLICE, lambda b: b.target.grad.copy_(b.target.grad.roll(1, 0)))
_plant(
    "columns are moved by one on the last rank",
    "reduced",
    SLICE,
    lambda b: b.last and b.target.grad.copy_(b.target.grad.roll(1, 1)),
)
_plant(
    "the ranks' chunks are in the wrong order",
    "reduced",
    SLICE,
    lambda b: b.target.grad.copy_(torch.cat(b.target.grad.chunk(b.size)[::-1])),
)
_plant("a bias has exchanged halves", "reduced", SLICE, lambda b: _swap_halves(b.vector.grad), "vector")
TURNED = ("transposed",)
_plant("a gradient is transposed", "reduced", TURNED, lambda b: _turn(b.target.grad))
_plant(
    "a gradient is transposed on the last rank", "reduced", TURNED, lambda b: b.last and _turn(b.target.grad)
)
_plant("a gradient is laid out in another order", "reduced", TURNED, lambda b: _view(b.target.grad))

# Rounding.

ROUNDED = ("precision",)


def _round(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor.copy_(tensor.to(dtype))


_plant(
    "gradients are reduced in bfloat16",
    "reduced",
    ROUNDED,
    lambda b: [_round(p.grad, torch.bfloat16) for p in b.parameters],
    "any",
)
_plant(
    "one gradient is reduced in bfloat16", "reduced", ROUNDED, lambda b: _round(b.target.grad, torch.bfloat16)
)
_plant(
    "one gradient is reduced in float16", "reduced", ROUNDED, lambda b: _round(b.target.grad, torch.float16)
)
_plant(
    "summands are rounded to bfloat16",
    "local",
    ROUNDED,
    lambda b: _round(b.target.grad.detach(), torch.bfloat16),
)
_plant("masters are bfloat16", "after", ROUNDED, lambda b, before: _round(b.target.detach(), torch.bfloat16))

# Masks.

MASK = ("other mask",)


def _some(tensor: Tensor) -> Tensor:
    return torch.rand(tensor.shape, generator=torch.Generator().manual_seed(3)) < 0.3


_plant(
    "elements of a gradient are masked",
    "reduced",
    MASK,
    lambda b: b.target.grad.masked_fill_(_some(b.target.grad), 0.0),
)


def _hook(change: Callable[[Faulty, Tensor], Tensor | None]) -> Callable[[Faulty], None]:
    def start(b: Faulty) -> None:
        b.layer.register_forward_hook(lambda module, args, output: change(b, output))

    return start


_plant("dropout is on", "start", MASK, _hook(lambda b, y: y * ~_some(y) / 0.7), "layer")
_plant(
    "outputs are masked on the last rank",
    "start",
    MASK,
    _hook(lambda b, y: y.masked_fill(_some(y), 0) if b.last else y),
    "layer",
)
_plant(
    "padding is counted in the loss",
    "batch",
    (*MASK, "other data"),
    lambda b, batch: [batch[0], torch.zeros_like(batch[1])] if b.last else None,
    "loss",
)
_plant("outputs are zero", "start", MASK, _hook(lambda b, y: y * 0), "layer")
_plant("outputs are rounded", "start", ROUNDED, _hook(lambda b, y: y.bfloat16().float()), "layer")
_plant("outputs are scaled", "start", FACTOR, _hook(lambda b, y: y * 1.1), "layer")
_plant(
    "channels are exchanged", "start", SLICE, _hook(lambda b, y: y.roll(1, -1 if y.dim() < 4 else 1)), "layer"
)
_plant(
    "attention sees other samples", "start", (*SLICE, "other data"), _hook(lambda b, y: y.roll(1, 0)), "layer"
)

# Samples.

DATA = ("other data",)


def _earlier_batch(b: Faulty, batch: list[Tensor]) -> list[Tensor] | None:
    earlier, b.memory["batch"] = b.memory.get("batch"), batch
    return earlier if b.last else None


_plant(
    "every rank reads the first share",
    "share",
    DATA,
    lambda b: (0, b.size) if hasattr(b, "context") else None,
    "batch",
)
_plant(
    "two ranks exchange nothing but read one share",
    "share",
    DATA,
    lambda b: (max(0, b.rank - 1), b.size),
    "batch",
)
_plant("the last rank uses the batch before", "batch", DATA, _earlier_batch, "input")
_plant(
    "samples and targets do not match",
    "batch",
    (*DATA, *MASK),
    lambda b, batch: [batch[0], batch[1].roll(1, 0)] if b.last else None,
    "loss",
)
_plant(
    "samples are mixed up",
    "batch",
    (*DATA, *SLICE),
    lambda b, batch: [batch[0].roll(1, 0), batch[1]] if b.rank == 0 else None,
    "input",
)

# Weights and steps.

STALE = ("stale weight",)


def _restore(*parameters: nn.Parameter) -> Callable[[dict[nn.Parameter, Tensor]], None]:
    return lambda before: [p.copy_(before[p]) for p in parameters]  # type: ignore[func-returns-value,return-value]


def _use_stale_weights(only_last: bool) -> Callable[[Faulty], None]:
    def start(b: Faulty) -> None:
        state: dict[str, Tensor] = {}

        def before(module: nn.Module, args: Any) -> None:
            if only_last and not b.last:
                return
            state["now"] = b.target.detach().clone()
            if "old" in state:
                b.target.data.copy_(state["old"])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if "now" in state:
                b.target.data.copy_(state["now"])
                state["old"] = state.pop("now")

        b.layer.register_forward_pre_hook(before)
        b.layer.register_forward_hook(after)

    return start


def _with_turned_weight(b: Faulty) -> None:
    def turn(*_: Any) -> None:
        b.target.data = b.target.data.transpose(0, 1).contiguous()

    b.layer.register_forward_pre_hook(turn)
    b.layer.register_forward_hook(turn)


def _half_restored(b: Faulty, before: dict[nn.Parameter, Tensor]) -> None:
    _half(b.target).copy_(_half(before[b.target]))


_plant("a weight is not updated", "after", STALE, lambda b, before: _restore(b.target)(before))
_plant(
    "a weight is not updated on the last rank",
    "after",
    STALE,
    lambda b, before: b.last and _restore(b.target)(before),
)
_plant("half of a weight is not updated", "after", STALE, lambda b, before: _half_restored(b, before))
_plant(
    "the last rank skips step 1",
    "after",
    STALE,
    lambda b, before: b.last and b.step == 1 and _restore(*b.parameters)(before),
    "any",
)
_plant("a bias is not updated", "after", STALE, lambda b, before: _restore(b.vector)(before), "vector")
_plant("forward uses a stale weight", "start", STALE, _use_stale_weights(False), "layer")
_plant("forward uses a stale weight on the last rank", "start", STALE, _use_stale_weights(True), "layer")
_plant("forward uses a transposed weight", "start", TURNED, _with_turned_weight, "layer")
_plant(
    "an update is transposed",
    "after",
    TURNED,
    lambda b, before: b.target.copy_(before[b.target] + (b.target - before[b.target]).transpose(0, 1)),
)
_plant(
    "an update is of another slice",
    "after",
    SLICE,
    lambda b, before: b.target.copy_(before[b.target] + (b.target - before[b.target]).roll(2, 0)),
)

RATE = ("other rate",)


def _set(key: str, factor: float, *, first: int = 0, last_only: bool = False) -> Callable[..., None]:
    def act(b: Faulty, optimizer: Optimizer) -> None:
        if b.step >= first and (b.last or not last_only):
            for group in optimizer.param_groups:
                known = b.memory.setdefault((id(group), key), group[key])
                group[key] = known * factor

    return act


_plant("the rate is halved", "before", RATE, _set("lr", 0.5), "any")
_plant("the rate is ten times as high from step 1 on", "before", RATE, _set("lr", 10.0, first=1), "any")
_plant("the rate differs on the last rank", "before", RATE, _set("lr", 0.7, last_only=True), "any")
_plant("weight decay is off", "before", RATE, _set("weight_decay", 0.0), "any")
_plant("momentum is off", "before", RATE, _set("momentum", 0.0), "any")
_plant(
    "one weight has half the rate",
    "after",
    RATE,
    lambda b, before: b.target.copy_((b.target + before[b.target]) / 2),
)
_plant("momentum is lost", "before", RATE, lambda b, optimizer: optimizer.state.clear(), "any")

CLIPPED = ("clipping",)
_plant("nothing is clipped", "clip", CLIPPED, lambda b, most: 1e9, "any")
_plant("the limit is divided by the ranks", "clip", CLIPPED, lambda b, most: most / b.size, "any")
_plant("the norm counts replicas", "clip", CLIPPED, lambda b, most: most / b.size**0.5, "any")


@torch.no_grad()
def _start_otherwise(b: Faulty) -> None:
    if b.last:
        b.target.add_(torch.randn(b.target.shape, generator=torch.Generator().manual_seed(1)) * 0.01)


@torch.no_grad()
def _start_shifted(b: Faulty) -> None:
    b.target.copy_(b.target.roll(b.target.shape[0] // 2, 0))


_plant("the last rank begins with other weights", "start", ("other start",), _start_otherwise)
_plant("a weight is loaded from another slice", "start", ("other start", *SLICE), _start_shifted)

_DEVELOPED_WITH = frozenset(FAULTS)


def _add_noise(b: Faulty) -> None:
    noise = torch.randn(b.target.grad.shape, generator=torch.Generator().manual_seed(b.rank))
    b.target.grad.add_(noise * b.target.grad.std())


def _accumulate_in_bfloat16(b: Faulty) -> None:
    state = b.memory.setdefault("sum", torch.zeros_like(b.target, dtype=torch.bfloat16))
    b.target.grad.copy_(state.zero_().add_(b.target.grad.bfloat16()))


_plant(
    "ranks add their sums to those of their neighbours only",
    "reduced",
    MISSING,
    lambda b: b.vector.grad.copy_(b.local[b.vector] / b.size),
    "vector",
)
_plant(
    "the bucket of all biases is reduced twice",
    "reduced",
    (*TWICE, "factor N"),
    lambda b: [p.grad.mul_(2) for p in b.parameters if p.dim() == 1],
    "any",
)
_plant("a gradient is accumulated in bfloat16", "reduced", ROUNDED, _accumulate_in_bfloat16)
_plant("a column of a gradient is lost", "reduced", (*DROPPED, *MASK), lambda b: b.target.grad[:, 3].zero_())
_plant("noise is added to a gradient", "reduced", ("other value",), _add_noise)
_plant("a scheduler steps too early", "before", RATE, _set("lr", 0.9, first=2), "any")
_plant(
    "a shard is written back at another offset",
    "after",
    SLICE,
    lambda b, before: b.target.copy_(b.target.flatten().roll(5).view_as(b.target)),
)
_plant("a layer is frozen by mistake", "before", STALE, lambda b, o: _forget(*b.layer.parameters()), "layer")
_plant("the loss is averaged over two batches", "loss", FACTOR, lambda b, loss: loss / 2, "any")
_plant(
    "the last rank loses its bias in the forward",
    "start",
    ("other value", "dropped gradient"),
    _hook(
        lambda b, y: (
            y - b.vector.view(-1, *(1,) * (y.dim() - 2))
            if b.last and y.dim() == 4
            else y * 1.0 - (b.vector if b.last and y.dim() < 4 else 0.0)
        )
    ),
    "layer",
)

HELD_BACK = frozenset(FAULTS) - _DEVELOPED_WITH
"""Faults that the verdict was not developed with."""
