"""When the loss scale grows and backs off: the rule of the historical strategy, on plain numbers.

Owns the settings and one update. Never touches tensors; `nnx_colossalai.loss_scale` applies it to a scaler.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from nnx.errors import OptionError

__all__ = ["LossScaleRule", "LossScaleState"]


@dataclass(frozen=True, slots=True)
class LossScaleState:
    """What the next update depends on.

    Attributes:
        scale: What the loss is multiplied by.
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
        initial_scale: Of the loss, at first.
        min_scale: The scale never backs off below it.
        max_scale: The scale never grows above it.
        growth_factor: What the scale is multiplied by when it grows.
        backoff_factor: What it is multiplied by when it backs off.
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
            overflow: Whether a gradient was infinite or not a number on any rank; the step was skipped then.
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
