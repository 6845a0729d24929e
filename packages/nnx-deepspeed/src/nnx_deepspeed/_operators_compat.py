"""Build DeepSpeed 0.19.8's compiled operators or raise one clear error, and free each operator once.

This module changes DeepSpeed's classes, once in a process. It compiles nothing by itself.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import weakref
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from nnx_core.errors import UnsupportedError


def prepare_operators() -> None:
    """Fix how DeepSpeed builds operators and how its CPU optimizers free them."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion
    from deepspeed.ops.op_builder.builder import OpBuilder

    if hasattr(OpBuilder, "_nnx_prepared"):
        return
    OpBuilder._nnx_prepared = True
    OpBuilder.jit_load = _explaining_failures(OpBuilder.jit_load)
    for optimizer in (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad):
        optimizer.__init__ = _freeing_own_operator(optimizer.__init__)
        # Lightning's wrapper class and the shadow inherit `__del__`. The first of them to be collected would
        # free the operator that the others step with, and the process would crash.
        optimizer.__del__ = _nothing


def counts_steps_as_int(optimizer: Optimizer) -> bool:
    """Return True if an optimizer's ``step`` is an int, as in DeepSpeed's own; torch's is a tensor."""
    return any(base.__module__.startswith("deepspeed.") for base in type(optimizer).__mro__)


def _explaining_failures(load: Any) -> Any:
    """Wrap `OpBuilder.jit_load` so that it finds ninja and explains a failure.

    DeepSpeed depends on ninja, which pip installs into the scripts folder of the environment. That folder may
    not be on PATH, or another ninja may come first and would build everything again.
    """

    @wraps(load)
    def load_explaining_failures(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.environ.get("PATH", "")
        os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), path])
        try:
            return load(self, *args, **kwargs)
        except Exception as error:
            raise _not_built(self.name, error) from error
        finally:
            os.environ["PATH"] = path

    return load_explaining_failures


def _not_built(operator: str, error: Exception) -> UnsupportedError:
    missing = [tool for tool in ("ninja", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]
    if missing:
        why = f"{' and '.join(missing)} cannot be found"
    else:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
    return UnsupportedError(
        f"DeepSpeed's operator {operator!r} could not be compiled on this machine: {why}.",
        remedy="Put ninja (`pip install ninja`) and a C++ compiler (g++) on PATH, or use an optimizer "
        "that needs no compiler, such as one of torch.optim.",
    )


def _freeing_own_operator(make: Any) -> Any:
    """Wrap an optimizer's ``__init__`` so that the operator's state is freed with that object only."""

    @wraps(make)
    def init_and_register(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            make(self, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, UnsupportedError):  # DeepSpeed wraps every error of loading
                raise error.__cause__ from error.__cause__.__cause__
            raise
        for name, operator in list(vars(self).items()):
            if name.startswith("ds_opt_"):
                free = getattr(operator, f"destroy_{name.removeprefix('ds_opt_')}")
                weakref.finalize(self, free, self.opt_id).atexit = False

    return init_and_register


def _nothing(_: Any) -> None:
    """Free nothing."""
