"""Scale the loss of '16-mixed' dynamically, and offer mixed precision under lightning-colossalai's name."""

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


class DynamicLossScaler(ParallelGradScaler):
    """A gradient scaler that follows a `LossScaleRule`; overflow on one rank skips the step on all.

    The scale is equal on all ranks, and checkpoints have it. As a `torch.amp.GradScaler` it works with
    Lightning's precision plugins.

    Args:
        backend: The backend whose gradients are unscaled.
        rule: The rule by which the scale grows and backs off.
        enabled: False makes every method do nothing, as for torch's scaler.
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
        """The present rule, which setters and loaded states may have changed."""
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
        # One read for all values, because each read waits for the GPU.
        now, steps, *overflows = read.tolist()
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
            raise RuntimeError("update() was called before unscale_() or step() of any optimizer.")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, both counters and the rule; torch's own scaler can load it too."""
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
        """Load the state of another scaler; entries that torch's own lacks keep their values."""
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


@dataclass(frozen=True, slots=True)
class LossScaleState:
    """The state of a loss scale between two updates.

    Attributes:
        scale: The factor that the loss is multiplied by.
        clean_steps: The steps without overflow since the last overflow or growth.
        overflows: The overflows since the last growth; the number never falls in between.
    """

    scale: float
    clean_steps: int = 0
    overflows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleRule:
    """The rule of a dynamic loss scale with hysteresis, as in lightning-colossalai.

    `DynamicLossScaler` applies it.

    Attributes:
        initial_scale: The initial scale.
        min_scale: The smallest scale.
        max_scale: The largest scale.
        growth_factor: The factor by which the scale grows.
        backoff_factor: The factor by which it backs off.
        growth_interval: The steps in a row without overflow after which it grows.
        hysteresis: The number of overflows since the last growth after which it backs off. From then on each
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
                "Start between the smallest and the largest scale.",
            ),
            (self.growth_factor > 1, f"{shown['growth_factor']} is not above 1", "Pass, say, 2."),
            (0 < self.backoff_factor < 1, f"{shown['backoff_factor']} is not in (0, 1)", "Pass, say, 0.5."),
            (self.growth_interval >= 1, f"{shown['growth_interval']} is no number of steps", "Pass 1000."),
            (self.hysteresis >= 1, f"{shown['hysteresis']} is no number of overflows", "Pass 1 or more."),
        )

    def start(self) -> LossScaleState:
        """Return the state of a new run."""
        return LossScaleState(self.initial_scale)

    def update(self, state: LossScaleState, *, overflow: bool) -> LossScaleState:
        """Return the state after a step.

        Args:
            state: The state before the step.
            overflow: True if a gradient was infinite or NaN on any rank, so that the step was skipped.
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


_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class ColossalAIPrecision:
    """A precision plugin for the Trainer of the imported Lightning package, on CPU and GPU.

    On a GPU ``Trainer(precision="16-mixed")`` does the same. On the CPU Lightning replaces that name by
    'bf16-mixed' before a strategy sees it, but keeps this plugin. The strategy has the loss scale.

    Args:
        precision: The precision: ``"16-mixed"``, also as 16, or ``"bf16-mixed"`` without a loss scale.

    Example:
        >>> ColossalAIPrecision().precision
        '16-mixed'
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> ColossalAIPrecision:
        """Make an object of this class and of Lightning's MixedPrecision."""
        # Both `lightning` and `pytorch_lightning` may be installed: the Trainer accepts its own classes only.
        made = _class_for(cls, trainer_tree())  # type: ignore[arg-type] # mypy on hashes
        return cast("ColossalAIPrecision", object.__new__(made))

    def __init__(self, precision: str | int = "16-mixed") -> None:
        chosen = "16-mixed" if str(precision) == "16" else str(precision)
        check_choice("precision", chosen, tuple(_DTYPES))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(chosen, device)  # type: ignore[call-arg] # of Lightning's MixedPrecision

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Enable autocast for tensors on the CPU and on a GPU."""
        # For both, because a machine with a GPU may train on the CPU.
        with ExitStack() as stack:
            for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
                dtype = _DTYPES[self.precision]  # type: ignore[attr-defined] # of Lightning's
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=False))
            yield


@cache
def _class_for(cls: type, root: str) -> type:
    mixed = importlib.import_module(f"{root}.plugins.precision").MixedPrecision
    return type(cls.__name__, (cls, mixed), {"__module__": cls.__module__, "__doc__": cls.__doc__})
