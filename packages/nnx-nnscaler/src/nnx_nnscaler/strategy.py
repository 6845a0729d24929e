"""`NnScalerStrategy`: the strategy object under the name and with the arguments of Microsoft's nnScaler.

``Trainer(strategy="nnscaler")`` and `nnx.strategy` build the same engine. This module owns the old
constructor and `merge_checkpoint`; it never touches training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

from nnx_core.lightning.namespaces import strategy_class_of, trainer_tree
from nnx_core.options import CommonOptions, split_options
from nnx_nnscaler.options import NnScalerOptions

__all__ = ["NnScalerStrategy"]


class NnScalerStrategy:
    """A strategy for the Trainer of the copy of Lightning that is in use.

    Args:
        accelerator: As for every strategy of Lightning's, like the three that follow.
        parallel_devices: Devices of this node.
        cluster_environment: Who started the processes.
        precision_plugin: Such as `NnScalerPrecision`.
        compute_config: A `ComputeConfig` or a dict of its fields; every field has a default.
        state_dict_type: ``"sharded"`` or ``"deduped"``.
        pas_policy: Name of a policy or a function; by default ``"autodist"``.
        gen_savedir: Where plans and the generated code are kept.
        reuse: ``"match"``, ``"override"``, ``"moo"`` or ``"graph"``.
        instance_name: Tells instances of one class apart in `gen_savedir`.
        checkpoint_io: In place of nnx's own.
        **options: Any other option of `NnScalerOptions` or common to all nnx strategies, such as
            ``timeout``, ``async_save``, ``plan_ngpus`` and ``memory_limit``.

    Example:
        >>> NnScalerStrategy(compute_config={"plan_ngpus": 1}, pas_policy="dp").name
        'nnscaler'
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> NnScalerStrategy:
        """An object of this class and of nnx's strategy class for the Trainer in use."""
        made = strategy_class_of(cls, trainer_tree())  # type: ignore[arg-type] # mypy on hashes
        return cast("NnScalerStrategy", object.__new__(made))

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
        common, own = split_options(given, owner="nnscaler", schemas=(CommonOptions, NnScalerOptions))
        super().__init__(
            NnScalerBackend(NnScalerOptions(**own)),  # type: ignore[call-arg] # of nnx's strategy class
            name="nnscaler",
            common=CommonOptions(**common),
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
        """Write one file that Lightning loads under any strategy. Nothing here needs it to resume.

        Args:
            checkpoint_files: A checkpoint of any strategy, or the files that it consists of: also those of
                ranks that Microsoft's nnScaler wrote, as its own method takes them.
            output_file: ``.safetensors`` for the weights alone, anything else for Lightning's single file.

        Raises:
            CheckpointError: The files are not those of one checkpoint, or cannot be read.
        """
        from nnx_checkpoint import merge

        merge(checkpoint_files, output_file)
