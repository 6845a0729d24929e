"""nnScaler's `ComputeConfig`: the target that a model is compiled for.

Every field has an effect here, or is refused with the reason and the remedy; none is ignored.
`ComputeConfig.strategy_options` translates them to options of the strategies. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any

from nnx_core.errors import OptionError
from nnx_core.options import check_options, option

TRACE_STRATEGIES = ("cuda_run_cpu_offload", "cuda", "cpu", "meta", "reuse_cache")


PIPELINE_FIELDS = (
    "pp_size",
    "pipeline_nmicros",
    "pipeline_nstages",
    "pipeline_scheduler",
)
"""Options of pipelines with the same name here and in ``pas_config``."""
_GIB = 1024**3


_FEWER_MICROS = (
    "microbatches are chosen from the batch",
    "Set `pipeline_nmicros` to so many that it is met.",
)


_REFUSED = {
    "seed": ("policy 'tp' does not draw at random here", "Leave it out."),
    "use_fp16": ("the precision is Trainer's", "Pass `precision='16-mixed'` or '16-true' to Trainer."),
    "use_bf16": ("the precision is Trainer's", "Pass `precision='bf16-mixed'` or 'bf16-true' to Trainer."),
    "use_memory_efficient_fp16": ("the precision is Trainer's", "Pass `precision='16-true'` to Trainer."),
    "use_memory_efficient_bf16": ("the precision is Trainer's", "Pass `precision='bf16-true'` to Trainer."),
    "use_apex_fused_adam_v2": ("the optimizer is yours", "Build it in `configure_optimizers`."),
    "partition_constraints_path": (
        "there is no constraints file",
        "Pass the strategy's option `constraints`: patterns of names to names of strategies.",
    ),
    "parallel_profile": ("nothing is profiled operator by operator", "Leave it out."),
    "re_profile": ("nothing is profiled operator by operator", "Leave it out."),
    "task_name": ("there is no profile to be named", "Use `instance_name` to tell plans apart."),
    "max_partition_degree": ("an operator is split over all ranks of a unit", "Set `plan_ngpus` instead."),
    "transient_mem_coef": ("memory is counted by liveness", "Set `memory_limit` to leave some free."),
    "max_pipeline_bubble_ratio": _FEWER_MICROS,
    "max_pipeline_unbalance_ratio": ("the best cut is always taken", "Set `stage_cuts` to make another."),
    "update_freq": ("Trainer accumulates gradients", "Pass `accumulate_grad_batches` to Trainer."),
}


_TAKEN = (
    *(
        "mem_constraint",
        "recompute_modules",
        "load_plan_path",
        "save_plan_path",
        "verbose",
        "explore_pipeline",
        "pipeline_pivots",
    ),
    *PIPELINE_FIELDS,
)
"""Keys of ``pas_config`` that are options of the strategy here."""


@dataclass(frozen=True)
class ComputeConfig:
    """The target of a compilation, with nnScaler's field names.

    Example:
        >>> ComputeConfig(2, 4).plan_ngpus
        2
    """

    plan_ngpus: int | None = option(
        None, help="Ranks of one plan unit, which work on one batch together.", types=(int,)
    )
    runtime_ngpus: int | None = option(
        None, help="All ranks; a multiple of plan_ngpus. By default the world size.", types=(int,)
    )
    constant_folding: bool = option(
        False, help="Compile for the traced batch size; any other size gets its own program.", types=(bool,)
    )
    trace_strategy: str = option(
        "cuda_run_cpu_offload",
        help="Accepted without effect: tracing follows shapes and runs no operator.",
        choices=TRACE_STRATEGIES,
    )
    use_zero: bool = option(
        False,
        help="Shard parameters, gradients and optimizer state over the units.",
        types=(bool,),
    )
    zero_ngroups: int = option(
        1, help="Shard them within each of this number of groups of units only.", types=(int,)
    )
    zero_use_reduce_scatter: bool = option(
        False, help="Accepted with use_zero, which always reduces gradients so.", types=(bool,)
    )
    inference_only: bool = option(
        False, help="Validate, test and predict only; fit is refused.", types=(bool,)
    )
    use_end2end: bool = option(
        False,
        help="Accepted with policies that may make stages, whose steps are always end to end.",
        types=(bool,),
    )
    use_async_reducer: bool = option(
        False,
        help="Accepted without effect: gradients are always reduced during backward, with the same numbers.",
        types=(bool,),
    )
    reducer_bucket_cap_mb: float | None = option(
        None, help="Size of the buckets that reduce gradients, in MiB; 25 by default.", types=(int, float)
    )
    pas_config: Mapping[str, Any] = option(
        {}, help="Options of the policy; keys that begin with '_' are for your own policy.", types=(Mapping,)
    )
    user_config: Mapping[str, Any] = option(
        {}, help="Other values that change the graph; the key of reuse contains them.", types=(Mapping,)
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_sizes()
        check_zero_groups(self.zero_ngroups, self.use_zero)
        if self.zero_use_reduce_scatter and not self.use_zero:
            raise OptionError(
                "zero_use_reduce_scatter=True without use_zero.", remedy="Set `use_zero=True` as well."
            )
        _check_pas_config(self.pas_config)

    def _check_sizes(self) -> None:
        for name in ("plan_ngpus", "runtime_ngpus", "zero_ngroups", "reducer_bucket_cap_mb"):
            value = getattr(self, name)
            if value is not None and (value <= 0 or isinstance(value, bool)):
                raise OptionError(f"{name}={value!r} is not positive.", remedy="Pass a positive number.")
        if self.plan_ngpus and self.runtime_ngpus and self.runtime_ngpus % self.plan_ngpus:
            raise OptionError(
                f"plan_ngpus={self.plan_ngpus} does not divide runtime_ngpus={self.runtime_ngpus}.",
                remedy="Choose a divisor: units of plan_ngpus ranks are replicated over all ranks.",
            )

    def strategy_options(self) -> dict[str, Any]:
        """Return the options of `NnScalerOptions` that these fields and ``pas_config`` set.

        Example:
            >>> ComputeConfig(2, pas_config={"pipeline_pivots": "a,b"}).strategy_options()
            {'plan_ngpus': 2, 'stage_cuts': ('a', 'b')}
        """
        pas = self.pas_config
        found: dict[str, Any] = {}
        if self.plan_ngpus is not None:
            found["plan_ngpus"] = self.plan_ngpus
        if self.use_zero:
            found["use_zero"] = True
        if self.zero_ngroups != 1:
            found["zero_ngroups"] = self.zero_ngroups
        if (memory := pas.get("mem_constraint", -1)) != -1:
            found["memory_limit"] = memory * _GIB
        for key, name in (("load_plan_path", "load_plan"), ("save_plan_path", "save_plan")):
            if key in pas:
                found[name] = str(pas[key])
        for key, name in (("recompute_modules", "recompute"), ("pipeline_pivots", "stage_cuts")):
            if names := pas.get(key):
                found[name] = tuple(names.split(",") if isinstance(names, str) else names)
        found |= {name: pas[name] for name in PIPELINE_FIELDS if pas.get(name) is not None}
        if pas.get("explore_pipeline") is False:
            found["pp_size"] = 1
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, as plain data."""
        return asdict(self)


def compute_config_from(value: object) -> ComputeConfig:
    """Return a `ComputeConfig` from one, from a mapping with its fields, or from None.

    Raises:
        OptionError: The value is of another type, or names an unknown field.

    Example:
        >>> compute_config_from({"plan_ngpus": 2}).plan_ngpus
        2
    """
    if value is None:
        return ComputeConfig()
    if isinstance(value, ComputeConfig):
        return value
    if not isinstance(value, Mapping):
        raise OptionError(
            f"compute_config is of type {type(value).__name__}.",
            remedy="Pass a nnx_nnscaler.ComputeConfig, or a dict of its fields.",
        )
    known = [item.name for item in fields(ComputeConfig)]
    for key in value:
        if key not in known:
            raise _unknown("compute_config", key, known)
    return ComputeConfig(**value)


def check_zero_groups(zero_ngroups: int | None, use_zero: bool | None) -> None:
    """Refuse groups of ZeRO without ZeRO.

    Raises:
        OptionError: The options ask for several groups.
    """
    if zero_ngroups not in (None, 1) and not use_zero:
        raise OptionError(
            f"zero_ngroups={zero_ngroups} without use_zero.", remedy="Set `use_zero=True` as well."
        )


def _check_pas_config(pas_config: Mapping[str, Any]) -> None:
    for key in pas_config:
        if not isinstance(key, str) or not key.startswith("_"):
            _check_key(key)


def _check_key(key: Any) -> None:
    if key in _TAKEN:
        return
    if key in _REFUSED:
        reason, remedy = _REFUSED[key]
        raise OptionError(f"pas_config[{key!r}] is not taken: {reason}.", remedy=remedy)
    raise _unknown("pas_config", key, list(_TAKEN))


def _unknown(owner: str, key: Any, known: list[str]) -> OptionError:
    near = get_close_matches(str(key), known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return OptionError(f"{owner} has no field {key!r}.", remedy=f"{hint}Its fields are: {', '.join(known)}.")
