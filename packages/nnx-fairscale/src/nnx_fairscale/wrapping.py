"""Which modules become units: those that `wrap()` was called on, or those that a policy chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fairscale.nn.wrap import default_auto_wrap_policy
from fairscale.nn.wrap import enable_wrap as fairscale_enable_wrap
from fairscale.nn.wrap.auto_wrap import ConfigAutoWrap
from torch import nn
from torch.distributed.fsdp.wrap import enable_wrap

from nnx_core.errors import OptionError
from nnx_core.layer_classes import as_classes
from nnx_fairscale.options import FairscaleFSDPOptions

__all__ = ["choose_units", "wrap_with"]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@contextmanager
def wrap_with(function: Callable[[nn.Module], None], options: FairscaleFSDPOptions) -> Iterator[None]:
    """Within it fairscale's ``wrap`` and ``auto_wrap``, and torch's ``wrap``, call a function.

    The module itself stays in its place.
    """
    wrapper = _wrapper(function)
    with fairscale_enable_wrap(_policy(options), wrapper_cls=wrapper), enable_wrap(wrapper_cls=wrapper):
        yield


def choose_units(root: nn.Module, options: FairscaleFSDPOptions) -> list[nn.Module]:
    """The modules under `root` that the policy makes units, children before parents.

    Raises:
        OptionError: The policy is of the wrong type or matches nothing.
    """
    policy = options.auto_wrap_policy
    chosen: list[nn.Module] = []
    if policy is None or (callable(policy) and not isinstance(policy, type)):
        with fairscale_enable_wrap(_policy(options), wrapper_cls=_wrapper(chosen.append)):
            ConfigAutoWrap.recursive_wrap(root, auto_wrap_policy=None, module_is_root=True)
    else:
        classes = as_classes(policy, option="auto_wrap_policy")
        chosen = [module for module in root.modules() if isinstance(module, classes)][::-1]
        if not chosen:
            names = ", ".join(cls.__name__ for cls in classes)
            raise OptionError(
                f"auto_wrap_policy names {names}, of which {type(root).__name__} has none.",
                remedy="Check the layer classes, or leave the policy out.",
            )
    return [module for module in chosen if module is not root and _can_be_unit(module, root)]


def _policy(options: FairscaleFSDPOptions) -> Callable[..., bool]:
    policy = options.auto_wrap_policy
    if callable(policy) and not isinstance(policy, type):
        return policy
    return partial(default_auto_wrap_policy, min_num_params=int(options.min_num_params))


def _wrapper(function: Callable[[nn.Module], None]) -> type:
    """A class that gives back what it is given: fairscale asks whether children are instances."""

    def wrap(cls: type, module: nn.Module, **_: Any) -> nn.Module:
        function(module)
        return module

    return type("Wrapper", (), {"__new__": wrap})


def _can_be_unit(module: nn.Module, root: nn.Module) -> bool:
    """It has parameters, is called, and shares none of them with modules outside of it."""
    own = {id(parameter) for parameter in module.parameters()}
    if not own or isinstance(module, _CONTAINERS):
        return False
    inside = {id(submodule) for submodule in module.modules()}
    return not any(
        id(parameter) in own
        for submodule in root.modules()
        if id(submodule) not in inside
        for parameter in submodule.parameters(recurse=False)
    )
