"""`NnScalerStrategy`: the strategy with the name and the arguments of Microsoft's nnScaler.

``Trainer(strategy="nnscaler")`` and `nnx.strategy` build the same engine. This module only adds the old
constructor and `merge_checkpoint`; it never touches training.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import torch

from nnx_core.errors import OptionError
from nnx_core.lightning.namespaces import StrategyOfTrainer, trainer_tree
from nnx_core.options import check_choice

# `NnScalerPrecision`: Lightning's precision plugins under nnScaler's name. ``Trainer(precision="...")`` does
# the same and is enough for most users. The class adds your own gradient scaler with '16-true', and
# '16-mixed' on CPU.


PRECISIONS = ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
_TRUE_HALVES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}
_MIXED = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class NnScalerPrecision:
    """A precision plugin for the Trainer of the imported copy of Lightning.

    Args:
        precision: One of 32-true, 16-true, bf16-true, 16-mixed, bf16-mixed.
        scaler: The gradient scaler, which keeps small gradients in float16. '16-mixed' makes one by default;
            the other modes have none. Overflow on one rank skips the step on all.

    Example:
        >>> NnScalerPrecision("16-mixed").scaler is not None
        True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> NnScalerPrecision:
        """Return an object of this class and of Lightning's own class for the precision."""
        precision = str(kwargs.get("precision", args[0] if args else "32-true"))
        made = _class_for(cls, precision, trainer_tree())  # type: ignore[arg-type] # mypy on hashes
        return cast("NnScalerPrecision", object.__new__(made))

    def __init__(self, precision: str = "32-true", scaler: torch.amp.GradScaler | None = None) -> None:
        check_choice("precision", precision, PRECISIONS)
        if scaler is not None and precision.startswith("bf16"):
            raise OptionError(
                f"precision={precision!r} with a scaler: bfloat16 has the range of float32.",
                remedy="Leave the scaler out.",
            )
        if scaler is None and precision == "16-mixed":
            scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
        self.precision = precision
        self.scaler = scaler
        self._desired_input_dtype = _TRUE_HALVES.get(precision, torch.float32)  # Lightning reads it

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Compute in the precision, on the device of the tensors."""
        with ExitStack() as stack:
            if self.precision in _MIXED:
                for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
                    context = torch.autocast(device, dtype=_MIXED[self.precision], cache_enabled=False)
                    stack.enter_context(context)
            elif self.precision in _TRUE_HALVES:
                stack.enter_context(super().forward_context())  # type: ignore[misc] # of HalfPrecision
            yield


@cache
def _class_for(cls: type, precision: str, root: str) -> type:
    """Return Lightning's class that steps with a scaler, and for true halves the one that casts."""
    plugins = importlib.import_module(f"{root}.plugins.precision")
    casting = (plugins.HalfPrecision,) if precision in _TRUE_HALVES else ()
    bases = (cls, *casting, plugins.MixedPrecision)
    return type(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__})


class NnScalerStrategy(StrategyOfTrainer):
    """A strategy for the Trainer of the imported copy of Lightning.

    Args:
        accelerator: The accelerator of any Lightning strategy; so are the next three.
        parallel_devices: The devices of this node.
        cluster_environment: The launcher of the processes.
        precision_plugin: A plugin such as `NnScalerPrecision`.
        compute_config: A `ComputeConfig` or a dict of its fields; every field has a default.
        state_dict_type: ``"sharded"`` or ``"deduped"``.
        pas_policy: The name of a policy or a function; by default ``"autodist"``.
        gen_savedir: The directory of plans and the generated code.
        reuse: ``"match"``, ``"override"``, ``"moo"`` or ``"graph"``.
        instance_name: A name that tells instances of one class apart in `gen_savedir`.
        checkpoint_io: A replacement of nnx's own.
        **options: Any other option of `NnScalerOptions` or common option of nnx strategies, such as
            ``timeout``, ``async_save``, ``plan_ngpus`` and ``memory_limit``.

    Example:
        >>> NnScalerStrategy(compute_config={"plan_ngpus": 1}, pas_policy="dp").name
        'nnscaler'
    """

    def __init__(  # noqa: PLR0917 # the original's order
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        precision_plugin: Any = None,
        compute_config: Any = None,
        state_dict_type: str = "sharded",
        pas_policy: Any = None,
        gen_savedir: str | os.PathLike[str] = "./.nnscaler",
        reuse: str = "match",
        instance_name: str | None = None,
        checkpoint_io: Any = None,
        **options: Any,
    ) -> None:
        from nnx_nnscaler.backend import NnScalerBackend

        given = {
            "compute_config": compute_config,
            "state_dict_type": state_dict_type,
            "gen_savedir": os.fspath(gen_savedir),
            "reuse": getattr(reuse, "value", reuse),
            "instance_name": instance_name,
            **({} if pas_policy is None else {"pas_policy": pas_policy}),
            **options,
        }
        self._build(
            NnScalerBackend,
            "nnscaler",
            given,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    @classmethod
    def merge_checkpoint(
        cls,
        checkpoint_files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        output_file: str | os.PathLike[str],
    ) -> None:
        """Write one file that Lightning loads under any strategy. nnx itself resumes without it.

        Args:
            checkpoint_files: A checkpoint of any strategy, or its files, also the rank files of Microsoft's
                nnScaler, as its own method takes them.
            output_file: ``.safetensors`` for the weights alone; any other name for Lightning's single file.

        Raises:
            CheckpointError: The files belong to several checkpoints, or cannot be read.
        """
        from nnx_checkpoint import merge

        merge(checkpoint_files, output_file)
