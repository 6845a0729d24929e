"""The user's own optimizer over masters that lie in chunks: at once, or chunk by chunk in the background.

`Stepper` is what the backend's ``optimizer_step`` calls. The user's ``step`` always runs, once, with its
closure, its hooks and whatever schedulers wrapped around it; what differs is which parameters it finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from nnx.options import check_choice
from nnx_colossalai.chunks.chunk import Chunk
from nnx_colossalai.optimizers._torch_compat import has_hooks_that_see_the_result, shadow_of, without_guards
from nnx_colossalai.optimizers.deepspeed_adam import DeepSpeedAdam
from nnx_colossalai.optimizers.kernels import (
    groups_for_step,
    in_host_memory,
    needs_whole_tensors,
    steps_each_parameter,
)
from nnx_colossalai.optimizers.overlap import Background, Share, give_back_state, take_share

__all__ = ["CpuAdam", "Overlap", "Stepper"]

T = TypeVar("T")
Overlap = Literal["none", "exact"]
CpuAdam = Literal["torch", "deepspeed"]
log = logging.getLogger("nnx.colossalai")


class Stepper:
    """Steps optimizers over the masters of chunks, and refreshes the chunks' working weights.

    Args:
        chunks: Of the model. The attribute may be set again when chunks have moved.
        overlap: "exact" steps chunks of the tiers that step on the host in a background thread, in the order
            of the next forward; each waits for its own only. The numbers are those of "none".
        cpu_adam: What steps Adam and AdamW in host memory.
        device: This rank's.
        show_masters: Called before masters are looked at, when a closure has run: working weights may be
            there in their places.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        overlap: Overlap = "none",
        cpu_adam: CpuAdam = "torch",
        device: torch.device | None = None,
        show_masters: Callable[[], None] = lambda: None,
    ) -> None:
        check_choice("overlap", overlap, ("none", "exact"))
        check_choice("cpu_adam", cpu_adam, ("torch", "deepspeed"))
        self.chunks = chunks
        self._show_masters = show_masters
        self._overlaps = overlap == "exact"
        self._deepspeed = DeepSpeedAdam() if cpu_adam == "deepspeed" else None
        self._background = Background(device)
        self._guarded: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]] = WeakKeyDictionary()
        self._said: set[str] = set()

    # --- set up -------------------------------------------------------------------------------

    def setup_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Make whoever reads or loads their state wait; call it before the first step."""
        if not self._overlaps:
            return
        for optimizer in optimizers:
            if optimizer not in self._guarded:
                self._guarded[optimizer] = (
                    optimizer.register_state_dict_pre_hook(lambda _: self.finish()),
                    optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish()),
                )

    # --- step ---------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one step of an optimizer.

        Args:
            optimizer: Whose.
            step: The user's own, bound; runs exactly once.
            args: For it, such as a closure, which runs forward and backward.
            kwargs: For it.

        Returns:
            What `step` returns.

        Raises:
            OptimizerStepError: An earlier step failed in the background.
        """
        if not steps_each_parameter(step):
            return self._step_unknown(optimizer, step, *args, **kwargs)
        closure, args, kwargs = _take_closure(args, kwargs)
        touched: list[Chunk] = []

        def closure_then_take_over() -> Any:
            loss = None if closure is None else closure()
            self._show_masters()
            with torch.no_grad(), without_guards():
                self._take_over(optimizer, touched)
            return loss

        with _groups_kept(optimizer):
            result = step(closure_then_take_over, *args, **kwargs)
        for chunk in touched:
            chunk.refresh()
        return result

    def _step_unknown(self, optimizer: Optimizer, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """A step that may look at anything, and call its closure as often as it likes: all masters wait."""
        self._say(optimizer, "its step is not one of torch.optim's that treat each parameter by itself")
        self.finish()
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        chunks = [chunk for chunk in self.chunks if not own.isdisjoint(chunk.masters.values())]
        closure, args, kwargs = _take_closure(args, kwargs)
        if closure is not None:
            args = (self._at_new_weights(closure, chunks), *args)
        self._show_masters()
        result = step(*args, **kwargs)
        self.finish()
        for chunk in chunks:
            chunk.refresh()
        return result

    def _at_new_weights(self, closure: Callable[[], Any], chunks: Sequence[Chunk]) -> Callable[[], Any]:
        """A closure whose second and later calls compute with the masters as the step has changed them."""
        first = True

        def evaluate() -> Any:
            nonlocal first
            if not first:
                for chunk in chunks:
                    chunk.refresh()
            first = False
            loss = closure()
            self._show_masters()
            return loss

        return evaluate

    def _take_over(self, optimizer: Optimizer, touched: list[Chunk]) -> None:
        """Now that gradients are there: leave the optimizer what it steps itself, and see to the rest.

        Args:
            optimizer: Its `param_groups` are replaced until its step ends.
            touched: Gets the chunks to refresh after it.
        """
        parts = _parts_with_gradients(optimizer, self.chunks)
        goes_on = self._can_go_on_in_background(optimizer)
        if not goes_on:
            self._background.finish()
        now: dict[Chunk, Part] = {}
        later: dict[Chunk, Part] = {}
        for chunk, part in parts.items():
            if goes_on and chunk.tier.steps_on_host and _lies_in_host_memory(part):
                later[chunk] = part
                continue
            touched.append(chunk)
            if self._goes_by_shares(optimizer, part):
                now[chunk] = part
        shares = self._take_shares(optimizer, {**now, **later})
        optimizer.param_groups = _without(optimizer, (*now.values(), *later.values()))
        optimizer.param_groups = groups_for_step(optimizer)
        for share in shares[: len(now)]:
            self._step_share(optimizer, share)
        if later:
            # Last, so that on all ranks the optimizer's state begins with the same parameters.
            self._background.submit(optimizer, shares[len(now) :], self._step_and_refresh)

    def _goes_by_shares(self, optimizer: Optimizer, part: Part) -> bool:
        """Whether something else than the optimizer's own step must step a chunk at once."""
        if self._deepspeed is not None and self._deepspeed.serves(optimizer):
            return _lies_in_host_memory(part)
        # Most fused kernels do not know sharded parameters, but all can step one rank's part.
        if not _is_sharded(parameter for _, parameters in part for parameter in parameters):
            return False
        whole = needs_whole_tensors(optimizer) or _reason_to_step_whole(optimizer) is not None
        return not whole and _lies_in_host_memory(part)

    def _take_shares(self, optimizer: Optimizer, parts: Mapping[Chunk, Part]) -> list[Share]:
        """Taken when no earlier step of the same parameters is still to come: its state would be missing."""
        self._background.wait_for(
            parameter for part in parts.values() for _, parameters in part for parameter in parameters
        )
        return [take_share(chunk, optimizer, part) for chunk, part in parts.items()]

    def _step_and_refresh(self, optimizer: Optimizer, share: Share) -> None:
        self._step_share(optimizer, share)
        share.chunk.refresh()

    def _step_share(self, optimizer: Optimizer, share: Share) -> None:
        """Step one chunk as the optimizer would."""
        shadow = shadow_of(optimizer, share.groups, share.state)
        if self._deepspeed is not None and self._deepspeed.serves(shadow):
            self._deepspeed.step(shadow)
        shadow.param_groups = groups_for_step(shadow)
        shadow.step()
        give_back_state(share, optimizer)

    def _can_go_on_in_background(self, optimizer: Optimizer) -> bool:
        if not self._overlaps:
            return False
        reason = _reason_against(optimizer)
        if reason is not None:
            self._say(optimizer, reason)
        return reason is None

    def _say(self, optimizer: Optimizer, reason: str) -> None:
        message = f"{type(optimizer).__name__} does not step in the background: {reason}."
        if self._overlaps and message not in self._said:
            self._said.add(message)
            log.info(message)

    # --- end ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until every step that was begun is complete.

        Raises:
            OptimizerStepError: One failed, and nobody has been told yet.
        """
        self._background.finish()

    def close(self) -> None:
        """Wait, end the thread, and leave the optimizers as they came."""
        self._background.close()
        for handles in self._guarded.values():
            for handle in handles:
                handle.remove()
        self._guarded.clear()
        self.finish()


Part = list[tuple[dict[str, Any], list[nn.Parameter]]]
"""Param groups, each with those of its parameters that are in one chunk and have a gradient."""


def _take_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, tuple[Any, ...], dict[str, Any]]:
    """Split the closure, the first argument of every step of torch's, from the rest."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs.get("closure"), (), {key: value for key, value in kwargs.items() if key != "closure"}


@contextmanager
def _groups_kept(optimizer: Optimizer) -> Iterator[None]:
    """Give the optimizer its own list of param groups back at the end."""
    groups = optimizer.param_groups
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _parts_with_gradients(optimizer: Optimizer, chunks: Iterable[Chunk]) -> dict[Chunk, Part]:
    """What the optimizer will change, chunk by chunk in the order of the next forward."""
    ordered = sorted(chunks, key=lambda chunk: chunk.index)
    chunk_of = {parameter: chunk for chunk in ordered for parameter in chunk.masters.values()}
    parts: dict[Chunk, Part] = {chunk: [] for chunk in ordered}
    for group in optimizer.param_groups:
        inside: dict[Chunk, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None and parameter in chunk_of:
                inside.setdefault(chunk_of[parameter], []).append(parameter)
        for chunk, parameters in inside.items():
            parts[chunk].append((group, parameters))
    return {chunk: part for chunk, part in parts.items() if part}


def _lies_in_host_memory(part: Part) -> bool:
    return all(in_host_memory(parameter) for _, parameters in part for parameter in parameters)


def _without(optimizer: Optimizer, taken: Iterable[Part]) -> list[dict[str, Any]]:
    """The optimizer's groups less the parameters that are stepped in the background."""
    gone = {parameter for part in taken for _, parameters in part for parameter in parameters}
    if not gone:
        return optimizer.param_groups
    groups = [
        {**group, "params": [parameter for parameter in group["params"] if parameter not in gone]}
        for group in optimizer.param_groups
    ]
    return [group for group in groups if group["params"]]


def _is_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def _reason_to_step_whole(optimizer: Optimizer) -> str | None:
    for switch in ("capturable", "differentiable"):
        if any(group.get(switch) for group in optimizer.param_groups):
            return f"a param group has {switch}=True"
    if any(getattr(optimizer, name, None) is not None for name in ("found_inf", "grad_scale")):
        return "it looks for overflow itself"
    return None


def _reason_against(optimizer: Optimizer) -> str | None:
    """Why a step cannot go on in the background; None if it can."""
    reason = _reason_to_step_whole(optimizer)
    if reason is not None:
        return reason
    if has_hooks_that_see_the_result(optimizer):
        return "a step hook may look at the result"
    sharded = _is_sharded(parameter for group in optimizer.param_groups for parameter in group["params"])
    if sharded and needs_whole_tensors(optimizer):
        return "it communicates about sharded parameters"
    return None
