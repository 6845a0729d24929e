"""Options of the nnscaler strategies. Only the standard library, so that `nnx show` does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nnx_core.errors import OptionError
from nnx_core.options import check_choice, check_options, option
from nnx_nnscaler.compute_config import PIPELINE_FIELDS, ComputeConfig, check_zero_groups, compute_config_from

POLICIES = ("dp", "zero", "tp", "data", "autodist", "pp", "hybrid")
PIPELINES = ("pp", "hybrid")
SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Schedules of pipelines, with torch's names."""
V_SHAPED = ("zbv", "dualpipev")
"""Schedules with two stages on each rank; the first rank has the first and the last stage."""


@dataclass(frozen=True, kw_only=True)
class NnScalerOptions:
    """Options of planning and running a model."""

    compute_config: ComputeConfig | Mapping[str, Any] | None = option(
        None,
        help="nnx_nnscaler.ComputeConfig, or a dict of its fields: nnScaler's own way to set sizes and ZeRO.",
    )
    policy: str | Callable[..., Any] = option(
        "autodist",
        help="Split of operators within a unit: 'autodist' lets a cost model choose, also stages; 'tp' "
        "splits layers; 'data' splits the batch; 'dp' splits nothing; 'zero' is 'dp' with use_zero; 'pp' "
        "cuts the model into stages; 'hybrid' also splits their operators. A function narrows the strategies "
        "to choose from.",
    )
    pas_policy: str | Callable[..., Any] | None = option(None, help="nnScaler's own name of `policy`.")
    plan_ngpus: int | None = option(
        None,
        help="Ranks of one plan unit, which work on one batch together; units are replicated. By default 1 "
        "for the policies dp and zero, else the ranks of a node.",
        types=(int,),
    )
    use_zero: bool | None = option(
        None,
        help="Shard parameters, gradients and optimizer state over the units: less memory for more "
        "communication. By default only with policy 'zero'.",
        types=(bool,),
    )
    zero_ngroups: int | None = option(
        None,
        help="Shard them within each of this number of groups of units only: more memory for less "
        "communication between groups.",
        types=(int,),
    )
    pp_size: int | None = option(
        None,
        help="Ranks of a unit that work on different stages at the same time. By default all with policy "
        "'pp'; with 'hybrid' 2, or the smallest divisor of the ranks. With 'autodist', 1 excludes stages.",
        types=(int,),
    )
    pipeline_nstages: int | None = option(
        None,
        help="Stages of a pipeline, a multiple of pp_size, so that each of these ranks has one or several. "
        "By default one.",
        types=(int,),
    )
    pipeline_nmicros: int | None = option(
        None,
        help="Microbatches of a batch, at least pp_size and a divisor of the batch. A smaller batch becomes "
        "fewer. By default four for each rank along the pipe, and more if only then a plan fits into the "
        "memory.",
        types=(int,),
    )
    pipeline_scheduler: str | None = option(
        None,
        help="Order of stages and microbatches on a rank. 'gpipe', the default, runs the complete batch "
        "forward before backward. For the other schedules, `training_step` is traced.",
        choices=(*SCHEDULES, None),
    )
    stage_cuts: Sequence[str] | str | None = option(
        None,
        help="Names of the submodules that the second and later stages begin with, such as 'blocks.6'. By "
        "default the longest stage becomes as short as the memory allows.",
    )
    timeline_file: str | None = option(
        None,
        help="Measure the actions of each rank in training steps 4 to 6, and write them to this file: one "
        "trace for chrome://tracing, Perfetto and nnx_nnscaler.pipeline.picture.",
        types=(str,),
    )
    gen_savedir: str = option("./.nnscaler", help="Directory of plans and the generated code.", types=(str,))
    reuse: str = option(
        "match",
        help="'match' reuses code in gen_savedir for the same model, shapes, policy, versions and machine; "
        "'override' compiles again; 'moo' reuses matching code and replaces broken files; 'graph' reuses the "
        "graph and plans again.",
        choices=("match", "override", "moo", "graph"),
    )
    instance_name: str | None = option(
        None, help="Name that tells instances of one class apart in gen_savedir.", types=(str,)
    )
    memory_limit: int | float | None = option(
        None,
        help="Bytes that a plan may use on each rank; by default 80% of the device's memory on CUDA and no "
        "limit on CPU.",
        types=(int, float),
    )
    recompute: Iterable[str] | None = option(
        None,
        help="Patterns of submodule names, such as 'blocks.*', whose activations backward recomputes.",
    )
    fp32_masters: bool = option(
        False,
        help="With precision '16-true' or 'bf16-true', step float32 copies of the parameters, which keep "
        "small updates: 4 more bytes for each parameter of a rank.",
        types=(bool,),
    )
    constraints: Mapping[str, str] | None = option(
        None,
        help="Required strategies: pattern of a submodule's or parameter's name to a strategy's name.",
        types=(Mapping,),
    )
    load_plan: str | None = option(None, help="Run the plan in this file, without planning.", types=(str,))
    save_plan: str | None = option(None, help="Write the plan to this file as well.", types=(str,))
    verify: bool | None = option(
        None,
        help="Compare the first program with the module's eager forward and backward on the traced inputs. "
        "It needs a CPU run without autocast, half precision or fallbacks to eager. It takes the time of a "
        "step, and a copy of the model for each rank of a unit. By default nnx compares small models without "
        "stages, and falls back to eager if they differ. True compares any model, and a difference is an "
        "error.",
        types=(bool,),
    )

    def __post_init__(self) -> None:
        for name, value in self._normalized().items():
            object.__setattr__(self, name, value)  # only here: a frozen dataclass refuses plain assignment
        check_options(self)
        self._check_policy()
        self._check_numbers()
        self._check_pipeline()

    def _normalized(self) -> dict[str, Any]:
        """Return the fields whose values were given in other forms, in the normalized form.

        Raises:
            OptionError: `compute_config` contradicts an option.
        """
        config = compute_config_from(self.compute_config)
        policy = self.policy if self.pas_policy is None else self.pas_policy
        found: dict[str, Any] = {"compute_config": config, "policy": policy, "pas_policy": None}
        for name in ("recompute", "stage_cuts"):
            value = getattr(self, name)
            found[name] = (value,) if isinstance(value, str) else value if value is None else tuple(value)
        for name, value in config.strategy_options().items():
            own = found.get(name, getattr(self, name))
            if own is not None and own != value:
                raise OptionError(
                    f"{name}={own!r} contradicts {name}={value!r} of compute_config.",
                    remedy="Give it in one of them only.",
                )
            found[name] = value
        if found.get("use_zero", self.use_zero) is None:
            found["use_zero"] = policy == "zero"
        return found

    def _check_policy(self) -> None:
        policy = self.policy
        if callable(policy):
            return
        check_choice("policy", policy, POLICIES)
        if policy == "zero" and self.use_zero is False:
            raise OptionError(
                "policy='zero' contradicts use_zero=False.", remedy="Use policy='dp' for no ZeRO."
            )

    def _check_numbers(self) -> None:
        of_pipelines = ("pp_size", "pipeline_nstages", "pipeline_nmicros")
        for name in ("plan_ngpus", "zero_ngroups", "memory_limit", *of_pipelines):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0 or math.isinf(value)):
                raise OptionError(f"{name}={value!r} is not positive.", remedy="Pass a positive number.")
        check_zero_groups(self.zero_ngroups, self.use_zero)

    def _check_pipeline(self) -> None:
        if self.policy not in PIPELINES:
            if self.config.use_end2end and self.policy != "autodist":
                raise OptionError(
                    f"use_end2end=True with policy={self.policy!r}, which has no stages.",
                    remedy="Leave it out: forward may return anything, and the loss stays in your code.",
                )
            chooses = self.policy == "autodist"
            why = "which chooses stages itself" if chooses else "which has no stages"
            for name in (*PIPELINE_FIELDS, "stage_cuts", "timeline_file"):
                value = getattr(self, name)
                if value is not None and not (chooses and (name, value) == ("pp_size", 1)):
                    raise OptionError(
                        f"{name}={value!r} with policy={self.policy!r}, {why}.",
                        remedy="Set policy='pp' or 'hybrid', or leave it out.",
                    )
            return
        for name in (*PIPELINE_FIELDS, "stage_cuts"):
            value = getattr(self, name)
            if self.load_plan is not None and value is not None:
                raise OptionError(
                    f"{name}={value!r} with load_plan={self.load_plan!r}, which decides it already.",
                    remedy="Leave one of them out.",
                )
        stages, cuts = self.pipeline_nstages, self.stage_cuts
        if stages is not None and cuts is not None and len(cuts) != stages - 1:
            raise OptionError(
                f"stage_cuts names {len(cuts)} submodules, but {stages} stages need {stages - 1}.",
                remedy="Name the first submodule of each stage but the first.",
            )

    def pipe_shape(self, unit_size: int) -> tuple[int, int]:
        """Return the ranks along the pipe and the stages, in a unit of some ranks; (1, 1) without a pipeline.

        Raises:
            OptionError: The numbers do not fit together.

        Example:
            >>> NnScalerOptions(policy="hybrid").pipe_shape(8)
            (2, 2)
        """
        if self.policy not in PIPELINES or unit_size == 1:
            return 1, 1
        divisor = next(number for number in range(2, unit_size + 1) if unit_size % number == 0)
        ranks = self.pp_size or (unit_size if self.policy == "pp" else divisor)
        if unit_size % ranks or ranks == 1 or (self.policy == "pp" and ranks != unit_size):
            raise OptionError(
                f"pp_size={ranks} with units of {unit_size} ranks and policy={self.policy!r}.",
                remedy="With 'pp' it is plan_ngpus, with 'hybrid' a divisor of it that is larger than 1.",
            )
        each = 1 if self.schedule in ("gpipe", "1f1b", "zero_bubble") else 2
        chosen = ranks * each if self.stage_cuts is None else len(self.stage_cuts) + 1
        stages = self.pipeline_nstages or chosen
        if stages % ranks:
            raise OptionError(
                f"{stages} stages cannot be distributed evenly over {ranks} ranks.",
                remedy=f"Set pipeline_nstages, or stage_cuts, to a multiple of {ranks}.",
            )
        self._check_schedule(stages // ranks)
        if self.pipeline_nmicros is not None and self.pipeline_nmicros < ranks:
            raise OptionError(
                f"pipeline_nmicros={self.pipeline_nmicros} is less than the {ranks} ranks along the pipe, so "
                "some ranks would never have work.",
                remedy=f"Set it to {ranks} or more, or leave it out.",
            )
        return ranks, stages

    @property
    def schedule(self) -> str:
        """`pipeline_scheduler`, or its default."""
        return self.pipeline_scheduler or "gpipe"

    def _check_schedule(self, each: int) -> None:
        """Refuse a number of stages for each rank that the schedule cannot order."""
        schedule = self.schedule
        wanted = "1" if schedule == "1f1b" else "2" if schedule in V_SHAPED else "2 or more"
        fits = {"1": each == 1, "2": each == 2, "2 or more": each > 1}[wanted]
        if schedule not in ("gpipe", "zero_bubble") and not fits:
            raise OptionError(
                f"pipeline_scheduler={schedule!r} with {each} stages for each rank, but it needs {wanted}.",
                remedy="Change pipeline_nstages, or use '1f1b' for one stage each, 'interleaved' for more.",
            )
        if self.recompute and schedule in ("zero_bubble", *V_SHAPED):
            raise OptionError(
                f"recompute with pipeline_scheduler={schedule!r}, which computes gradients in two turns.",
                remedy="Use 'interleaved' or '1f1b'.",
            )

    @property
    def config(self) -> ComputeConfig:
        """`compute_config`, normalized."""
        assert isinstance(self.compute_config, ComputeConfig)
        return self.compute_config

    def unit_size(self, *, world_size: int, local_world_size: int) -> int:
        """Return the number of ranks of a plan unit in this world.

        Raises:
            OptionError: The requested sizes do not fit the world.

        Example:
            >>> NnScalerOptions(policy="tp").unit_size(world_size=16, local_world_size=8)
            8
        """
        wanted = self.config.runtime_ngpus
        if wanted is not None and wanted != world_size:
            raise OptionError(
                f"runtime_ngpus={wanted}, but {world_size} ranks are running.",
                remedy="Leave it out, or start that many: `devices` x `num_nodes` of Trainer or Fabric.",
            )
        size = self.plan_ngpus
        if size is None:
            size = 1 if self.policy in ("dp", "zero") else local_world_size
            return size if world_size % size == 0 else 1
        if world_size % size:
            raise OptionError(
                f"plan_ngpus={size} does not divide the {world_size} ranks that are running.",
                remedy="Choose a divisor: units of plan_ngpus ranks are replicated over all ranks.",
            )
        return size

    def zero_size(self, *, units: int) -> int:
        """Return the number of units that shard a parameter; 1 without ZeRO.

        Raises:
            OptionError: `zero_ngroups` does not divide the units.
        """
        if not self.use_zero:
            return 1
        groups = self.zero_ngroups or 1
        if units % groups:
            raise OptionError(
                f"zero_ngroups={groups} does not divide the {units} units.",
                remedy="Choose a divisor of the number of ranks divided by plan_ngpus.",
            )
        return units // groups

    def with_world(self, world_size: int) -> NnScalerOptions:
        """Return these options with `runtime_ngpus` set, as keys and plans record them."""
        config = replace(self.config, runtime_ngpus=world_size)
        return replace(self, compute_config=config)
