"""Strategies that refuse a user pattern well, badly or not at all, for the tests of the suite's verdicts.

Workers import this module because the tests name it in ``imports``; importing it registers the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nnx
from nnx_core.errors import UnsupportedError
from nnx_tiny.backend import TinyBackend


class Refuses(TinyBackend):
    """Refuses at once on every rank."""

    def run_step(self, module: Any, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.is_time(module):
            raise self.error()
        return super().run_step(module, step, *args, **kwargs)

    def is_time(self, module: Any) -> bool:
        """Return True to refuse before this step."""
        return True

    def error(self) -> Exception:
        """Return the error to raise."""
        return UnsupportedError("layer 'head' is parametrized.", remedy="Remove the parametrization.")


class RefusesLate(Refuses):
    """Refuses only after training with wrong numbers."""

    def is_time(self, module: Any) -> bool:
        module.losses[:] = [loss * 1.1 for loss in module.losses]
        return len(module.losses) == 2


class RefusesOnOneRank(Refuses):
    """Refuses on rank 1; the other rank then raises an error that says so."""

    def is_time(self, module: Any) -> bool:
        return self.context.rank == 1


class FailsBesideARefusal(Refuses):
    """Refuses on rank 1; the other rank raises an error of its own."""

    def error(self) -> Exception:
        return super().error() if self.context.rank == 1 else IndexError("tuple index out of range")


class HasNoRemedy(Refuses):
    def error(self) -> Exception:
        return UnsupportedError("layer 'head' is parametrized.")


class HandsOn(Refuses):
    """Wraps an error of torch."""

    def error(self) -> Exception:
        return UnsupportedError("it failed: IndexError: tuple index out of range.", remedy="Try again.")


class Breaks(Refuses):
    def error(self) -> Exception:
        return RuntimeError("Connection reset by peer")


def _register(target: type[TinyBackend], *, refuses: tuple[str, ...]) -> None:
    name = f"{target.__name__.lower()}{'_as_declared' if refuses else ''}"
    declared = nnx.Capabilities(refuses=refuses)
    nnx.StrategyRegistry.register(name, target, capabilities=declared, override=True)


for _target in (
    *(TinyBackend, Refuses, RefusesLate, RefusesOnOneRank, FailsBesideARefusal, HasNoRemedy, HandsOn),
    Breaks,
):
    _register(_target, refuses=())
    _register(_target, refuses=("parametrization_with_parameters", "weights_read_on_rank_zero"))
