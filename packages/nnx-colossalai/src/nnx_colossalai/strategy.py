"""Define `ColossalAIStrategy`, with the name and the arguments of the class in lightning-colossalai.

``Trainer(strategy="colossalai")`` and `nnx.strategy` build the same engine.
"""

from __future__ import annotations

from typing import Any

from nnx_core.lightning.namespaces import StrategyOfTrainer


class ColossalAIStrategy(StrategyOfTrainer):
    """A strategy for the Trainer of the imported Lightning package.

    You choose accelerator and precision with the Trainer. All optimizers of torch work, also several at once.

    Args:
        use_chunk: Only True is supported, as in lightning-colossalai.
        chunk_size: The largest chunk in elements; by default a chunk is a layer.
        enable_distributed_storage: False keeps gathered weights on every rank from forward to backward.
        placement_policy: The policy ``"auto"``, ``"cuda"``, ``"cpu"``, or one tier for all chunks.
        force_outputs_fp32: True to cast outputs of every step to float32.
        gpu_margin_mem_ratio: The share of the device memory beside weights and activations for masters and
            optimizer state; None (lightning-colossalai had 0.0) makes the step fastest.
        chunk_search_range: The elements by which a chunk may exceed the larger of `min_chunk_size` and the
            largest parameter.
        chunk_search_n_grids: Only 4096 is supported, because chunks are sized exactly without a grid.
        min_chunk_size: The bytes of weights below which a layer shares the chunk around it.
        initial_scale: The initial loss scale in ``"16-mixed"``, like the next six arguments.
        min_scale: The smallest scale.
        growth_factor: The factor by which it grows.
        backoff_factor: The factor that it is multiplied by after overflow.
        growth_interval: The steps without overflow after which it grows.
        hysteresis: The overflows after which it backs off.
        max_scale: The largest scale.
        accelerator: The accelerator of Lightning's strategies, like the four arguments that follow.
        parallel_devices: The devices of this node.
        cluster_environment: The environment that started the processes.
        checkpoint_io: The checkpoint IO to use instead of nnx's own.
        precision_plugin: The precision plugin, such as `ColossalAIPrecision`.
        **options: Other options of `ColossalAIOptions` or of all nnx strategies, such as ``device_memory``,
            ``offload_fraction``, ``overlap``, ``timeout`` and ``async_save``.

    Example:
        >>> ColossalAIStrategy(placement_policy="cpu", initial_scale=32).name
        'colossalai'
    """

    def __init__(  # noqa: PLR0917 # the original's order
        self,
        use_chunk: bool = True,
        chunk_size: int | None = None,
        enable_distributed_storage: bool = True,
        placement_policy: str = "auto",
        force_outputs_fp32: bool = False,
        gpu_margin_mem_ratio: float | None = None,
        chunk_search_range: int | None = None,
        chunk_search_n_grids: int | None = None,
        min_chunk_size: int | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        from nnx_colossalai.backend import ColossalAIBackend

        given = {
            "use_chunk": use_chunk,
            "chunk_size": chunk_size,
            "enable_distributed_storage": enable_distributed_storage,
            "placement_policy": placement_policy,
            "force_outputs_fp32": force_outputs_fp32,
            "gpu_margin_mem_ratio": gpu_margin_mem_ratio,
            "chunk_search_range": chunk_search_range,
            "chunk_search_n_grids": chunk_search_n_grids,
            "min_chunk_size": min_chunk_size,
            "initial_scale": initial_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
            **options,
        }
        self._build(
            ColossalAIBackend,
            "colossalai",
            given,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
