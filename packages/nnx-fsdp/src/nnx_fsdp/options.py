"""Options of the FSDP strategies. Only the standard library, so that `nnx show` does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnx_core.errors import OptionError
from nnx_core.options import check_options, option

if TYPE_CHECKING:
    from torch import nn

    LayerClasses = type[nn.Module] | str | Iterable[type[nn.Module] | str]


_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """Dtypes of FSDP2's own mixed precision, by their torch names; None keeps the parameters' dtype.

    It adds to Trainer's ``precision=``, which uses autocast. All-gathers and the computation of every unit
    run in `param_dtype`; the shards keep their dtype.
    """

    param_dtype: str | None = option(
        None, help="Dtype units are gathered and computed in.", choices=(None, *_DTYPES)
    )
    reduce_dtype: str | None = option(None, help="Dtype gradients are reduced in.", choices=(None, *_DTYPES))
    output_dtype: str | None = option(
        None, help="Dtype the outputs of each unit are cast to.", choices=(None, *_DTYPES)
    )
    cast_forward_inputs: bool = option(
        True, help="Cast floating inputs of each unit to param_dtype.", types=(bool,)
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """Options of FSDP2."""

    auto_wrap: bool = option(
        True,
        help="Wrap layers automatically; False leaves wrapping to `wrap()` in `configure_model`.",
        types=(bool,),
    )
    auto_wrap_policy: LayerClasses | Callable[[nn.Module], bool] | None = option(
        None,
        help="Layers to wrap: a layer class or several, or their names, or a function from module to bool. "
        "By default repeated layers are wrapped, and the choice is logged with its reason.",
        layers=True,
    )
    by_choice: LayerClasses | None = option(
        None,
        help="Conditionally executed modules, such as experts: their names as in `named_modules`, or layer "
        "classes or their names. They and their submodules are never wrapped.",
    )
    min_num_params: int | None = option(
        None,
        help="Modules with fewer parameters are never wrapped. By default 100,000 when layers are wrapped "
        "automatically.",
        types=(int,),
    )
    activation_checkpointing: LayerClasses | None = option(
        None,
        help="Layer classes or their names: backward recomputes their activations instead of storing them, "
        "which saves memory for about a third more computation.",
        layers=True,
    )
    cpu_offload: bool = option(
        False,
        help="Offload shards, gradients and optimizer state to CPU; slower, and much larger models fit.",
        types=(bool,),
    )
    mixed_precision: MixedPrecision | None = option(
        None,
        help="FSDP2's own mixed precision (nnx_fsdp.MixedPrecision), on top of `precision=`.",
        types=(MixedPrecision,),
    )
    reshard_after_forward: bool | int | None = option(
        None,
        help="True reshards parameters after forward, False keeps them gathered until backward (faster, more "
        "memory), a number reshards to that many ranks. By default True for all units but the last layer "
        "and the root, which backward needs first.",
        types=(bool, int),
    )
    replicate_size: int | None = option(
        None,
        help="With a number, parameters are sharded over world_size / replicate_size ranks and replicated "
        "over replicate_size groups (HSDP). `fsdp_hybrid` uses the number of nodes.",
        types=(int,),
    )
    hybrid: bool = option(False, help="Shard within a node and replicate over nodes (HSDP).", types=(bool,))
    compile: bool | Mapping[str, Any] = option(
        False,
        help="torch.compile every unit, or the root's children if there is no unit: True, or a dict of "
        "torch.compile's arguments.",
        types=(bool, Mapping),
    )
    sync_module_states: bool = option(
        True,
        help="Broadcast rank zero's weights and buffers to every rank at the start.",
        types=(bool,),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.min_num_params is not None and self.min_num_params < 0:
            raise OptionError(
                f"min_num_params={self.min_num_params} is negative.", remedy="Pass a number of parameters."
            )
        if self.replicate_size is not None and self.replicate_size < 1:
            raise OptionError(
                f"replicate_size={self.replicate_size} is not positive.",
                remedy="Pass a divisor of the world size.",
            )
        if not self.auto_wrap and self.auto_wrap_policy is not None:
            raise OptionError(
                "auto_wrap_policy has no effect with manual wrapping.",
                remedy="Use strategy 'fsdp_auto', or call `wrap()` in `configure_model` without a policy.",
            )
        if not self.auto_wrap and self.by_choice is not None:
            raise OptionError(
                "by_choice has no effect with manual wrapping.",
                remedy="Use strategy 'fsdp_auto', or do not `wrap()` conditionally executed modules.",
            )
