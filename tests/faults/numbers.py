"""Faults in the numbers of training."""

from __future__ import annotations

from faults import EVERYTHING, Fault

_STRATEGIES = "faults.number_strategies"
_MOMENTUM = ("parameter_groups", "parameter_groups_edited", "parameter_group_added", "scheduler_by_group")
_SEVERAL = ("several_optimizers_clipped", "several_optimizers_toggled", "parts_called_directly")
_ADAM = ("several_optimizers", "several_optimizers_toggled", "parts_called_directly")
_ACCUMULATING = ("accumulation_cut_short", "clip_accumulated", "manual_accumulation_unsynchronized")


def _fault(name: str, strategy: str, caught_by: str, also: tuple[str, ...] = ()) -> Fault:
    registered = strategy.startswith("fault_")
    return Fault(
        name=name,
        target=strategy if registered else f"{_STRATEGIES}:{strategy}",
        imports=(_STRATEGIES,) if registered else (),
        caught_by=caught_by,
        also=also,
    )


FAULTS = [
    _fault("gradients summed, not averaged", "SummedGradients", "losses_float32", EVERYTHING),
    _fault("gradients never zeroed", "KeptGradients", "losses_float32", EVERYTHING),
    _fault("float64 reduced in float32", "fault_float32_reduction", "losses_float64", ("precision_64_true",)),
    _fault("weights not broadcast at the start", "OwnStart", "ranks_start_alike"),
    _fault("only the last accumulated batch averaged", "LastBatchAveraged", "accumulation", _ACCUMULATING),
    _fault("short accumulation divided by its own length", "FullAccumulationsOnly", "accumulation_cut_short"),
    _fault("a second backward overwrites the first", "OverwrittenGradients", "manual_accumulation"),
    _fault("gradients lost in block_backward_sync", "DroppedByHand", "manual_accumulation_unsynchronized"),
    _fault("gradients zeroed in place come back", "OwnSums", "gradients_zeroed_in_place"),
    _fault(
        "clipped by the norm of one rank's shards",
        "NormOfOneRank",
        "clip_by_norm",
        ("clip_accumulated", "manual_clipping", "several_optimizers_clipped", "clip_unscaled"),
    ),
    _fault("clipping by value forgotten", "ValueIgnored", "clip_by_value"),
    _fault("clipped by the norm over all optimizers", "NormOfAll", "several_optimizers_clipped"),
    _fault("clipped before the loss scale is off", "fault_clipped_scaled", "clip_unscaled"),
    _fault("optimizer steps counted twice", "CountsTwice", "adamw", (*_ADAM, "elementwise_optimizers")),
    _fault("momentum lost", "ForgetsMomentum", "sgd_momentum", (*_MOMENTUM, "elementwise_optimizers")),
    _fault(
        "one learning rate for all groups",
        "OneRate",
        "parameter_groups",
        ("parameter_groups_edited", "scheduler_by_group"),
    ),
    _fault("changed weight decay ignored", "FrozenDecay", "parameter_groups_edited"),
    _fault("added parameters not averaged", "KnowsTheFirst", "parameter_group_added"),
    _fault("closure evaluated once", "ClosureOnce", "closure_called_twice"),
    _fault(
        "schedulers ignored",
        "FrozenRate",
        "scheduler_by_step",
        (
            "scheduler_by_epoch",
            "scheduler_by_group",
            "scheduler_on_plateau",
            "manual_optimization",
            "parameter_groups_edited",
        ),
    ),
    _fault("schedulers stepped twice", "ScheduledTwice", "scheduler_by_step", ("scheduler_by_group",)),
    _fault("epoch's scheduler stepped by step", "ScheduledEarly", "scheduler_by_epoch"),
    _fault("one schedule for all groups", "OneSchedule", "scheduler_by_group"),
    _fault("plateau decided by one rank", "OwnMetric", "scheduler_on_plateau"),
    _fault(
        "manual optimization not averaged",
        "AutomaticOnly",
        "manual_optimization",
        (
            "manual_closure",
            "manual_accumulation",
            "manual_accumulation_unsynchronized",
            "forward_without_backward",
            "manual_clipping",
            "several_optimizers",
            *_SEVERAL,
        ),
    ),
    _fault("manual closures not averaged", "NotInManualClosures", "manual_closure"),
    _fault("stale weights after a forward", "StaleWeights", "forward_without_backward"),
    _fault("second optimizer not averaged", "FirstOptimizerOnly", "several_optimizers", _SEVERAL),
    _fault(
        "parts of the root not reduced",
        "RootForwardOnly",
        "parts_called_directly",
    ),
    _fault("bf16-mixed computes in float32", "fault_no_autocast", "precision_bf16_mixed"),
    _fault("bf16-true gives float32 weights back", "fault_widened", "precision_bf16_true"),
    _fault("overflow seen by one rank only", "fault_own_overflow", "overflow_on_one_rank"),
    _fault(
        "declared sharding that does not shard",
        "fault_hoarding",
        "shards_parameters",
        ("shards_gradients", "shards_optimizer"),
    ),
]
