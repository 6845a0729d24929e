"""Options of the DeepSpeed strategies, named as in Lightning's ``DeepSpeedStrategy``.

This module needs the standard library only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnx_core.errors import OptionError
from nnx_core.options import check_options, option


@dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """Options that configure DeepSpeed. `config` may set the same, and more, by DeepSpeed's own names."""

    stage: int = option(
        2,
        help="ZeRO stage: 1 partitions optimizer state, 2 gradients as well, 3 parameters as well.",
        choices=(1, 2, 3),
    )
    config: Mapping[str, Any] | str | os.PathLike[str] | None = option(
        None,
        help="A DeepSpeed config: a dict, or the path of a JSON file. Its values override the defaults here. "
        "nnx raises an error if it contradicts an option that you set, or Trainer's arguments.",
        types=(Mapping, str, os.PathLike),
        is_read=True,
    )
    offload_optimizer: bool = option(
        False, help="Offload masters, optimizer state and the step itself to the host.", types=(bool,)
    )
    offload_parameters: bool = option(
        False, help="Offload partitioned parameters to the host; stage 3 only.", types=(bool,)
    )
    offload_optimizer_device: str = option(
        "cpu", help="Device of offloaded optimizer state.", choices=("cpu", "nvme")
    )
    offload_params_device: str = option(
        "cpu", help="Device of offloaded parameters.", choices=("cpu", "nvme")
    )
    nvme_path: str = option("/local_nvme", help="Directory on the disk for the nvme devices.", types=(str,))
    pin_memory: bool = option(
        False, help="Pin offloaded memory: faster copies, more host memory.", types=(bool,)
    )
    params_buffer_count: int = option(5, help="Buffers for parameters read from disk.", types=(int,))
    params_buffer_size: int = option(100_000_000, help="Elements of each parameter buffer.", types=(int,))
    max_in_cpu: int = option(
        1_000_000_000, help="Parameter elements in host memory; all others are on disk.", types=(int,)
    )
    optimizer_buffer_count: int = option(4, help="Buffers for optimizer state read from disk.", types=(int,))
    block_size: int = option(1_048_576, help="Bytes of one disk request.", types=(int,))
    queue_depth: int = option(8, help="Disk requests in flight.", types=(int,))
    single_submit: bool = option(False, help="Submit disk requests one by one.", types=(bool,))
    overlap_events: bool = option(True, help="Submit disk requests while others complete.", types=(bool,))
    thread_count: int = option(1, help="Threads that read and write the disk.", types=(int,))
    sub_group_size: int = option(
        1_000_000_000_000, help="Elements that stage 3 steps at a time.", types=(int,)
    )
    contiguous_gradients: bool = option(
        True, help="Copy gradients into one buffer during backward.", types=(bool,)
    )
    overlap_comm: bool = option(True, help="Reduce gradients while backward runs.", types=(bool,))
    allgather_partitions: bool = option(
        True, help="Collect updated parameters by all-gather instead of broadcasts.", types=(bool,)
    )
    reduce_scatter: bool = option(
        True, help="Reduce gradients by reduce-scatter instead of all-reduce.", types=(bool,)
    )
    allgather_bucket_size: int = option(200_000_000, help="Elements gathered at once.", types=(int,))
    reduce_bucket_size: int = option(200_000_000, help="Elements reduced at once.", types=(int,))
    persistence_threshold: int = option(
        100_000,
        help="Stage 3 replicates parameters of at most this many elements; 0 shards all.",
        types=(int,),
    )
    zero_allow_untested_optimizer: bool = option(
        True, help="Accept element-wise optimizers that DeepSpeed has not tested itself.", types=(bool,)
    )
    partition_activations: bool = option(
        False, help="deepspeed.checkpointing: split checkpointed activations over ranks.", types=(bool,)
    )
    cpu_checkpointing: bool = option(
        False, help="deepspeed.checkpointing: keep checkpointed activations on the host.", types=(bool,)
    )
    contiguous_memory_optimization: bool = option(
        False, help="deepspeed.checkpointing: one buffer for checkpointed activations.", types=(bool,)
    )
    synchronize_checkpoint_boundary: bool = option(
        False, help="deepspeed.checkpointing: synchronise at each checkpoint.", types=(bool,)
    )
    logging_level: int = option(logging.WARNING, help="Level of DeepSpeed's own logger.", types=(int,))

    def __post_init__(self) -> None:
        check_options(self)
        if self.offload_parameters and self.stage != 3:
            raise OptionError(
                f"offload_parameters=True needs stage 3, this is stage {self.stage}.",
                remedy="Use 'nnx_deepspeed_3_cpu', or offload_optimizer=True alone.",
            )
