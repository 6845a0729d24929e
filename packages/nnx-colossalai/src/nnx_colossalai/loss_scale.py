"""The dynamic loss scale of '16-mixed', with hysteresis, that all ranks agree on and checkpoints keep.

It is a `torch.amp.GradScaler`: Lightning's precision plugins scale, unscale, step and save with it as with
torch's own. The rule is `nnx_colossalai.loss_scale_rule`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nnx.backend import Backend
from nnx.gradients import ParallelGradScaler
from nnx_colossalai.loss_scale_rule import LossScaleRule, LossScaleState

__all__ = ["DynamicLossScaler"]


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
        now = LossScaleState(float(scale), int(clean_steps), self._overflows)
        after = self.rule.update(now, overflow=self._found_overflow())
        scale.fill_(after.scale)
        clean_steps.fill_(after.clean_steps)
        self._overflows = after.overflows
        self._per_optimizer_states.clear()

    def _found_overflow(self) -> bool:
        found = [
            tensor
            for state in self._per_optimizer_states.values()
            for tensor in state["found_inf_per_device"].values()
        ]
        if not found:
            raise RuntimeError("update() comes after unscale_() or step() of an optimizer; there was none.")
        return any(bool(tensor) for tensor in found)

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
