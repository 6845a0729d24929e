"""The strategy objects under the names and with the arguments of lightning-fairscale.

``Trainer(strategy="fairscale_fsdp")`` and `nnx.strategy` build the same engines. This module owns the old
constructors; it never touches training.
"""

from __future__ import annotations

from typing import Any

from nnx_core.lightning.namespaces import StrategyOfTrainer


class DDPFullyShardedStrategy(StrategyOfTrainer):
    """fairscale's FSDP for the Trainer of the copy of Lightning that is in use.

    Accelerator and precision are the Trainer's to choose; clipping by norm, several optimizers and a second
    use of the same model work.

    Args:
        accelerator: The same as for every strategy of Lightning's.
        cpu_offload: Keep shards, gradients and optimizer state in host memory.
        flatten_parameters: Accepted; the parameters of a unit are communicated as one flat tensor either way.
        reshard_after_forward: Free what a unit has gathered after its forward.
        move_grads_to_cpu: Keep reduced gradients in host memory; by default as `cpu_offload`.
        fp32_reduce_scatter: Reduce gradients in float32 under fairscale's own mixed precision.
        compute_dtype: A dtype or its name: gather and compute in it.
        bucket_cap_mb: Size of the buckets that gradients are reduced in.
        min_num_params: Modules with so many parameters become units.
        state_dict_to_cpu: Accepted; state is described where it lies.
        parallel_devices: Devices of this node.
        cluster_environment: Says who started the processes.
        checkpoint_io: Takes the place of nnx's own.
        precision_plugin: Any of Lightning's.
        process_group_backend: Of torch.distributed; by default the device's own.
        **options: Any other option of `FairscaleFSDPOptions` or common to all nnx strategies, such as
            ``activation_checkpointing``, ``auto_wrap_policy``, ``timeout`` and ``async_save``.

    Example:
        >>> from torch.nn import Linear
        >>> strategy = DDPFullyShardedStrategy(cpu_offload=True, activation_checkpointing=Linear)
        >>> strategy.name, strategy.backend.options.cpu_offload
        ('fairscale_fsdp', True)
    """

    def __init__(  # noqa: PLR0917 # the original's order
        self,
        accelerator: Any = None,
        cpu_offload: bool = False,
        flatten_parameters: bool = True,
        reshard_after_forward: bool = True,
        move_grads_to_cpu: bool | None = None,
        fp32_reduce_scatter: bool | None = None,
        compute_dtype: Any = None,
        bucket_cap_mb: int = 25,
        min_num_params: int = 100_000_000,
        state_dict_to_cpu: bool = True,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        from nnx_fairscale.fsdp import FairscaleFSDPBackend

        given = {
            "cpu_offload": cpu_offload,
            "flatten_parameters": flatten_parameters,
            "reshard_after_forward": reshard_after_forward,
            "move_grads_to_cpu": move_grads_to_cpu,
            "fp32_reduce_scatter": fp32_reduce_scatter,
            "compute_dtype": compute_dtype,
            "bucket_cap_mb": bucket_cap_mb,
            "min_num_params": min_num_params,
            "state_dict_to_cpu": state_dict_to_cpu,
            "process_group_backend": process_group_backend,
            **options,
        }
        self._build(
            FairscaleFSDPBackend,
            "fairscale_fsdp",
            given,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )


class DDPShardedStrategy(StrategyOfTrainer):
    """fairscale's ShardedDataParallel and OSS for the Trainer of the copy of Lightning that is in use.

    Args:
        accelerator: The same as for every strategy of Lightning's, like the four that follow.
        parallel_devices: Devices of this node.
        cluster_environment: Says who started the processes.
        checkpoint_io: Takes the place of nnx's own.
        precision_plugin: Any of Lightning's.
        find_unused_parameters: Accepted; parameters that a step does not use are found either way.
        **options: Any option of `ShardedOptions` or common to all nnx strategies, such as
            ``reduce_buffer_size``, ``timeout`` and ``async_save``.

    Example:
        >>> strategy = DDPShardedStrategy(reduce_buffer_size=0, reduce_fp16=True)
        >>> strategy.name, strategy.backend.options.reduce_fp16
        ('fairscale_sharded', True)
    """

    _start_method: str | None = None

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        *,
        find_unused_parameters: bool = False,
        **options: Any,
    ) -> None:
        from nnx_fairscale.sharded import ShardedBackend

        if self._start_method is not None:
            options.setdefault("start_method", self._start_method)
        self._build(
            ShardedBackend,
            "fairscale_sharded",
            options,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )


class DDPSpawnShardedStrategy(DDPShardedStrategy):
    """`DDPShardedStrategy` whose processes are spawned, for notebooks and interactive use.

    Example:
        >>> DDPSpawnShardedStrategy().common.start_method
        'spawn'
    """

    _start_method = "spawn"
