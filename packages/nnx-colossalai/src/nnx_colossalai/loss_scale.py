"""The dynamic loss scale of '16-mixed', and mixed precision under lightning-colossalai's name."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from nnx_core.backend import Backend
from nnx_core.errors import OptionError
from nnx_core.lightning.namespaces import trainer_tree
from nnx_core.optimizers.gradients import ParallelGradScaler
from nnx_core.options import check_choice

# The dynamic loss scale of '16-mixed', with hysteresis, that all ranks agree on and checkpoints keep.
#
# It is a `torch.amp.GradScaler`: Lightning's precision plugins scale, unscale, step and save with it as
# with torch's own. The rule is `nnx_colossalai.loss_scale`.


class DynamicLossScaler(ParallelGradScaler):
    """A gradient scaler that follows a `LossScaleRule`; overflow on one rank skips the step on all.

    Args:
        backend: Whose gradients are unscaled.
        rule: When the scale grows and backs off.
        enabled: False makes every method do nothing, as for torch's.
    """

    def __init__(self, backend: Backend[Any], rule: LossScaleRule, *, enabled: bool = True) -> None:
        device = backend.context.device.type
        start = torch.amp.GradScaler(
            device,
            init_scale=rule.initial_scale,
            growth_factor=rule.growth_factor,
            backoff_factor=rule.backoff_factor,
            growth_interval=rule.growth_interval,
            enabled=enabled,
        )
        super().__init__(backend.gradients, backend.context.device, replaces=start)
        self._rule = rule
        self._overflows = 0

    @property
    def rule(self) -> LossScaleRule:
        """When the scale grows and backs off; setters, and loading a state, may have changed it."""
        if not self.is_enabled():
            return self._rule
        return replace(
            self._rule,
            growth_factor=self.get_growth_factor(),
            backoff_factor=self.get_backoff_factor(),
            growth_interval=self.get_growth_interval(),
        )

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Set the scale of the next step by the rule, or to `new_scale`."""
        if not self.is_enabled():
            return
        if new_scale is not None:
            super().update(new_scale)
            return
        scale, clean_steps = self._check_scale_growth_tracker("update")
        device = scale.device
        known = [scale, clean_steps, *self._found_overflows()]
        read = torch.cat([each.reshape(1).to(device, torch.float64) for each in known])
        now, steps, *overflows = read.tolist()  # at once: the host waits for the card where it reads
        after = self.rule.update(LossScaleState(now, int(steps), self._overflows), overflow=any(overflows))
        scale.fill_(after.scale)
        clean_steps.fill_(after.clean_steps)
        self._overflows = after.overflows
        self._per_optimizer_states.clear()

    def _found_overflows(self) -> list[Tensor]:
        found = [
            tensor
            for state in self._per_optimizer_states.values()
            for tensor in state["found_inf_per_device"].values()
        ]
        if not found:
            raise RuntimeError("update() comes after unscale_() or step() of an optimizer; there was none.")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Scale, both counters and the rule: torch's own scaler can load it, too."""
        if not self.is_enabled():
            return {}
        own = {
            "min_scale": self._rule.min_scale,
            "max_scale": self._rule.max_scale,
            "hysteresis": self._rule.hysteresis,
            "_hysteresis_tracker": self._overflows,
        }
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another scaler was; what the state of torch's own lacks stays as it is here."""
        if not self.is_enabled():
            return
        super().load_state_dict(state_dict)
        low = state_dict.get("min_scale", self._rule.min_scale)
        high = state_dict.get("max_scale", self._rule.max_scale)
        scale = min(max(self.get_scale(), low), high)
        self._init_scale = scale
        if self._scale is not None:
            self._scale.fill_(scale)
        self._overflows = state_dict.get("_hysteresis_tracker", 0)
        hysteresis = state_dict.get("hysteresis", self._rule.hysteresis)
        self._rule = replace(
            self.rule, initial_scale=scale, min_scale=low, max_scale=high, hysteresis=hysteresis
        )


# When the loss scale grows and backs off: the rule of the historical strategy, on plain numbers.
#
# Owns the settings and one update. Never touches tensors; `nnx_colossalai.loss_scale` applies it to a
# scaler.


@dataclass(frozen=True, slots=True)
class LossScaleState:
    """What the next update depends on.

    Attributes:
        scale: The factor that the loss is multiplied by.
        clean_steps: Steps without overflow since the last overflow or growth.
        overflows: Overflows since the last growth; it never goes down in between.
    """

    scale: float
    clean_steps: int = 0
    overflows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleRule:
    """The dynamic loss scale with hysteresis.

    Attributes:
        initial_scale: The scale of the loss at first.
        min_scale: The scale never backs off below it.
        max_scale: The scale never grows above it.
        growth_factor: The factor by which the scale grows.
        backoff_factor: The factor by which it backs off.
        growth_interval: Steps in a row without overflow after which it grows.
        hysteresis: How many overflows since the last growth it takes to back off. From then on each
            overflow backs off at once, until the scale has grown again.

    Example:
        >>> rule = LossScaleRule(initial_scale=8.0, hysteresis=2)
        >>> once = rule.update(rule.start(), overflow=True)
        >>> once.scale, rule.update(once, overflow=True).scale
        (8.0, 4.0)
    """

    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        for holds, problem, remedy in self._checks():
            if not holds:
                raise OptionError(f"{problem}.", remedy=remedy)

    def _checks(self) -> tuple[tuple[bool, str, str], ...]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        shown = {name: f"{name}={value!r}" for name, value in values.items()}
        low, first, high = shown["min_scale"], shown["initial_scale"], shown["max_scale"]
        return (
            (self.min_scale > 0, f"{low} is not positive", "Pass, say, 1."),
            (
                self.min_scale <= self.initial_scale <= self.max_scale < float("inf"),
                f"{low}, {first}, {high} are not in this order",
                "Start between the least and the largest scale.",
            ),
            (self.growth_factor > 1, f"{shown['growth_factor']} lets nothing grow", "Pass, say, 2."),
            (0 < self.backoff_factor < 1, f"{shown['backoff_factor']} is not in (0, 1)", "Pass, say, 0.5."),
            (self.growth_interval >= 1, f"{shown['growth_interval']} is no number of steps", "Pass 1000."),
            (self.hysteresis >= 1, f"{shown['hysteresis']} is no number of overflows", "Pass 1 or more."),
        )

    def start(self) -> LossScaleState:
        """The state of a new run."""
        return LossScaleState(self.initial_scale)

    def update(self, state: LossScaleState, *, overflow: bool) -> LossScaleState:
        """The state after a step.

        Args:
            state: Before it.
            overflow: True if a gradient was infinite or not a number on any rank; the step was skipped then.
        """
        if overflow:
            overflows = state.overflows + 1
            scale = state.scale
            if overflows >= self.hysteresis:
                scale = max(scale * self.backoff_factor, self.min_scale)
            return LossScaleState(scale, clean_steps=0, overflows=overflows)
        if state.clean_steps + 1 < self.growth_interval:
            return LossScaleState(state.scale, state.clean_steps + 1, state.overflows)
        return LossScaleState(min(state.scale * self.growth_factor, self.max_scale))


# `ColossalAIPrecision`: mixed precision for the Trainer under the name that lightning-colossalai gave it.
#
# ``Trainer(precision="16-mixed")`` does the same on a GPU and is all that most need. On the CPU Lightning
# makes that 'bf16-mixed' before a strategy sees it; this plugin stays what it is. The loss scale is the
# strategy's.


_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class ColossalAIPrecision:
    """A precision plugin for the Trainer of the copy of Lightning that is in use, on CPU and GPU.

    Args:
        precision: ``"16-mixed"`` (16 is the same), or ``"bf16-mixed"``, which scales no loss.

    Example:
        >>> ColossalAIPrecision().precision
        '16-mixed'
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> ColossalAIPrecision:
        """An object of this class and of Lightning's own for mixed precision."""
        made = _class_for(cls, trainer_tree())  # type: ignore[arg-type] # mypy on hashes
        return cast("ColossalAIPrecision", object.__new__(made))

    def __init__(self, precision: str | int = "16-mixed") -> None:
        chosen = "16-mixed" if str(precision) == "16" else str(precision)
        check_choice("precision", chosen, tuple(_DTYPES))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(chosen, device)  # type: ignore[call-arg] # of Lightning's MixedPrecision

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Compute in 16 bits wherever the tensors are: with a GPU at hand, some train without it."""
        with ExitStack() as stack:
            for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
                dtype = _DTYPES[self.precision]  # type: ignore[attr-defined] # of Lightning's
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            yield


@cache
def _class_for(cls: type, root: str) -> type:
    mixed = importlib.import_module(f"{root}.plugins.precision").MixedPrecision
    return type(cls.__name__, (cls, mixed), {"__module__": cls.__module__, "__doc__": cls.__doc__})
