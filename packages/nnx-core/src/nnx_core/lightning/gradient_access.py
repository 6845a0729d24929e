"""Whether user code may look at gradients between backward and the step, so that an engine has to show them.

Looked up at each backward, as callbacks come and go, and only for engines that keep gradients elsewhere than
in ``p.grad``.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["looks_after_backward", "looks_before_step"]


def looks_after_backward(root: str, module: Any) -> bool:
    """Whether gradients are looked at after every backward, also while they accumulate.

    Args:
        root: The root of Lightning's tree, such as ``"lightning.pytorch"``.
        module: The LightningModule, attached to its Trainer.
    """
    return not module.automatic_optimization or _overrides(root, module, ("on_after_backward",))


def looks_before_step(root: str, module: Any) -> bool:
    """Whether gradients are looked at once they are complete, until they are dropped.

    Args:
        root: As in `looks_after_backward`.
        module: As there.
    """
    hooks = (
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "optimizer_step",
        "on_before_zero_grad",
    )
    return _overrides(root, module, hooks)


def _overrides(root: str, module: Any, hooks: tuple[str, ...]) -> bool:
    tree = importlib.import_module(root)
    if any(_is_overridden(module, hook, tree.LightningModule) for hook in hooks):
        return True
    return any(
        _is_overridden(callback, hook, tree.Callback)
        for callback in module.trainer.callbacks
        for hook in hooks
    )


def _is_overridden(instance: Any, hook: str, base: type) -> bool:
    if hook in vars(instance):  # put on the object itself
        return True
    own = getattr(type(instance), hook, None)
    return own is not None and own is not getattr(base, hook, None)
