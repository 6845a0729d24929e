"""`ColossalAIStrategy`: the strategy object under the name and with the arguments of lightning-colossalai.

``Trainer(strategy="colossalai")`` and `nnx.strategy` build the same engine. This module owns the old
constructor; it never touches training.
"""

from __future__ import annotations

from typing import Any

from nnx_core.lightning.namespaces import StrategyOfTrainer


class ColossalAIStrategy(StrategyOfTrainer):
    """A strategy for the Trainer of the copy of Lightning that is in use.

    Accelerator, precision and where the model is built are the Trainer's and yours to choose; any optimizer
    of torch's, and several, will do.

    Args:
        use_chunk: Only True, as in the original.
        chunk_size: Elements that a chunk has at most; by default a chunk is a layer.
        enable_distributed_storage: False keeps every rank's complete weights from forward to backward.
        placement_policy: ``"auto"``, ``"cuda"``, ``"cpu"``, or one tier for all chunks.
        force_outputs_fp32: Cast outputs of every step to float32.
        gpu_margin_mem_ratio: Share of the device memory left beside weights and activations that masters and
            optimizer state get; None (the original had 0.0) is as much as makes the step fastest.
        chunk_search_range: Elements by which a chunk may exceed the larger of `min_chunk_size` and the
            largest parameter.
        chunk_search_n_grids: Only 4096: chunks are sized exactly, so no grid is searched.
        min_chunk_size: Bytes of weights below which a layer shares the chunk around it.
        initial_scale: The scale of the loss in ``"16-mixed"`` at first, which the next six concern too.
        min_scale: Floor of the scale.
        growth_factor: The factor by which it grows.
        backoff_factor: The factor that it is multiplied by after overflow.
        growth_interval: Steps without overflow after which it grows.
        hysteresis: Overflows from which on it backs off.
        max_scale: Cap of the scale.
        accelerator: The same as for every strategy of Lightning's, like the four that follow.
        parallel_devices: Devices of this node.
        cluster_environment: Says who started the processes.
        checkpoint_io: Takes the place of nnx's own.
        precision_plugin: Such as `ColossalAIPrecision`.
        **options: Any other option of `ColossalAIOptions` or common to all nnx strategies, such as
            ``device_memory``, ``offload_fraction``, ``overlap``, ``timeout`` and ``async_save``.

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
