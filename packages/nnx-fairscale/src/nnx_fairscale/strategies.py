"""Provide strategy classes with the names and arguments of lightning-fairscale.

``Trainer(strategy="fairscale_fsdp")`` and `nnx.strategy` build the same engines. This module holds only the
old constructors.
"""

from __future__ import annotations

from typing import Any

from nnx_core.lightning.namespaces import StrategyOfTrainer


class DDPFullyShardedStrategy(StrategyOfTrainer):
    """fairscale's FSDP for the Trainer of the copy of Lightning in use.

    Trainer chooses accelerator and precision. Clipping by norm, several optimizers and a second use of the
    same model work.

    Args:
        accelerator: The accelerator, as for Lightning's strategies.
        cpu_offload: Offload shards, gradients and optimizer state to host memory.
        flatten_parameters: Accepted; a unit's parameters are communicated as one flat tensor either way.
        reshard_after_forward: Free gathered parameters after a unit's forward.
        move_grads_to_cpu: Offload reduced gradients to host memory. Default: the same as `cpu_offload`.
        fp32_reduce_scatter: Reduce gradients in float32 under fairscale's own mixed precision.
        compute_dtype: A dtype or its name, for gathered parameters and computation.
        bucket_cap_mb: The size of the buckets that reduce gradients.
        min_num_params: The number of parameters that makes a module a unit.
        state_dict_to_cpu: Accepted; nnx writes state to disk without a copy.
        parallel_devices: The devices of this node.
        cluster_environment: The environment that started the processes.
        checkpoint_io: A replacement for nnx's own checkpoint IO.
        precision_plugin: Any precision plugin of Lightning.
        process_group_backend: The backend of torch.distributed. Default: the device's own.
        **options: Other options of `FairscaleFSDPOptions` or of all nnx strategies, such as
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
    """fairscale's ShardedDataParallel and OSS for the Trainer of the copy of Lightning in use.

    Args:
        accelerator: The accelerator, as for Lightning's strategies.
        parallel_devices: The devices of this node.
        cluster_environment: The environment that started the processes.
        checkpoint_io: A replacement for nnx's own checkpoint IO.
        precision_plugin: Any precision plugin of Lightning.
        find_unused_parameters: Accepted; nnx finds unused parameters either way.
        **options: Options of `ShardedOptions` or of all nnx strategies, such as ``reduce_buffer_size``,
            ``timeout`` and ``async_save``.

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
    """`DDPShardedStrategy` with spawned processes, for notebooks and interactive use.

    Example:
        >>> DDPSpawnShardedStrategy().common.start_method
        'spawn'
    """

    _start_method = "spawn"
