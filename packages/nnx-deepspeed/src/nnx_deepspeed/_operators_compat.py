"""DeepSpeed 0.19.8's compiled operators: built or refused with one clear error, freed once.

Changes DeepSpeed's classes, once in a process; nothing here compiles anything by itself.
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
    """Mend how DeepSpeed builds operators and how its optimizers of the host hold theirs."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion
    from deepspeed.ops.op_builder.builder import OpBuilder

    if hasattr(OpBuilder, "_nnx_prepared"):
        return
    OpBuilder._nnx_prepared = True
    OpBuilder.jit_load = _built_or_explained(OpBuilder.jit_load)
    for optimizer in (DeepSpeedCPUAdam, DeepSpeedCPULion, DeepSpeedCPUAdagrad):
        optimizer.__init__ = _owning(optimizer.__init__)
        # Inherited by the class that Lightning makes for its wrapper, and by the shadow: the first of them to
        # go would free what the others step with, and the process would die.
        optimizer.__del__ = _nothing


def counts_by_number(optimizer: Optimizer) -> bool:
    """Whether its ``step`` is an int, which DeepSpeed's operators take, and not a tensor, as torch's."""
    return any(base.__module__.startswith("deepspeed.") for base in type(optimizer).__mro__)


def _built_or_explained(load: Any) -> Any:
    """`OpBuilder.jit_load` that finds ninja and explains a failure.

    DeepSpeed depends on ninja, which lies in an environment's own folder; where the environment is not
    activated, that folder is not on the path, or another ninja is, which builds again what this one built.
    """

    @wraps(load)
    def load_or_explain(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.environ.get("PATH", "")
        os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), path])
        try:
            return load(self, *args, **kwargs)
        except Exception as error:
            raise _not_built(self.name, error) from error
        finally:
            os.environ["PATH"] = path

    return load_or_explain


def _not_built(operator: str, error: Exception) -> UnsupportedError:
    missing = [tool for tool in ("ninja", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]
    if missing:
        why = f"{' and '.join(missing)} cannot be found"
    else:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
    return UnsupportedError(
        f"DeepSpeed's operator {operator!r} has to be compiled on this machine, and was not: {why}.",
        remedy="Put ninja (`pip install ninja`) and a C++ compiler (g++) on PATH, or use what needs no "
        "compiler, such as an optimizer of torch.optim.",
    )


def _owning(make: Any) -> Any:
    """An optimizer's ``__init__`` that frees the operator's part when that object goes."""

    @wraps(make)
    def make_and_own(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            make(self, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__cause__, UnsupportedError):  # it wraps whatever loading raised
                raise error.__cause__ from error.__cause__.__cause__
            raise
        for name, operator in list(vars(self).items()):
            if name.startswith("ds_opt_"):
                free = getattr(operator, f"destroy_{name.removeprefix('ds_opt_')}")
                weakref.finalize(self, free, self.opt_id).atexit = False

    return make_and_own


def _nothing(_: Any) -> None:
    """Frees nothing."""
