"""Faults in what user code sees and touches between the calls of an engine."""

from __future__ import annotations

from faults import Fault

_STRATEGIES = "faults.habit_strategies"
_CAUGHT = {
    "PairsWhatItHas": (
        *("swapped_experts", "swapped_by_turns", "swapped_while_accumulating", "layer_of_one_rank"),
        *("experts_in_a_list", "experts_of_any_shape", "head_per_task", "branches_per_sample"),
        "skipped_blocks",
    ),
    "HidesGradients": (
        *("clipped_by_hand", "clipped_by_hand_while_accumulating", "clipped_in_manual_optimization"),
        *("logged_gradient_norms", "skipped_large_gradients", "gradients_in_a_callback"),
        *("gradients_in_manual_optimization", "clipped_by_param_groups", "own_optimizer_step"),
        *("gradients_read_on_rank_zero", "descent_by_hand"),
    ),
    "IgnoresChanges": (
        *("configured_clipping", "scaled_gradients", "zeroed_gradients", "assigned_gradients"),
        *("centralized_gradients", "remembered_gradients"),
    ),
    "AveragesBeforeTheStep": ("combined_gradients",),
    "HidesRowsOfState": ("optimizer_state_read",),
    "KeepsItsState": ("optimizer_state_changed",),
    "StepsWithParts": (
        *("lamb", "muon", "muon_for_large_matrices", "muon_with_auxiliary_group", "shampoo", "adafactor"),
        *("gradient_norm_optimizer", "sam_by_closure", "lbfgs"),
    ),
    "StepsBack": ("sam_in_manual_optimization", "updated_targets", "written_weights", "reinitialized_layers"),
    "SharesABatch": ("iterable_split_by_rank", "shuffled_by_rank"),
    "CountsEveryRank": (
        *("contrastive_loss", "contrastive_loss_by_rank", "world_size_in_the_loss", "counted_samples"),
    ),
    "NewParameters": (
        *("gradient_hooks", "post_accumulate_hooks", "attributes_of_parameters", "parameters_in_a_list"),
    ),
    "OwnStorage": ("assigned_targets", "assigned_weights", "vectors_of_parameters"),
    "DropsForwardHooks": ("pruned_layers", "pruned_while_training", "pruned_by_lightning"),
    "OwnWeights": ("functional_call",),
    "TrainsTheOriginal": ("parametrized",),
    "PartsInPlainCode": (
        *("weight_penalty", "orthogonality_penalty", "weight_as_a_number", "weights_read_between_steps"),
        *("logged_weights", "copied_layers", "gradient_of_a_weight", "gradient_penalty"),
        *("weights_read_on_rank_zero", "functional_gradients"),
        "weight_used_elsewhere",
    ),
    "FirstCallOnly": ("layers_called_often",),
    "NeedsItsOwnBackward": ("backward_on_the_loss",),
    "PlainFSDP2": ("split_backward",),
    "LastBackwardOnly": ("two_backward_passes",),
    "RealPartsOnly": ("complex_parameters",),
    "DenseOnly": ("sparse_gradients",),
    "CannotSaveNothing": ("parameter_without_elements",),
    "NeverFreezes": ("frozen_in_mid_run",),
    "BeginsTheStep": ("counted_steps",),
    "OwnBackwardOnly": ("own_backward", "own_backward_while_accumulating"),
}
"""The broken strategies, and the checks that each fails; what else it fails is not looked at."""

FAULTS = [
    Fault(name=f"{check}: {strategy}", target=f"{_STRATEGIES}:{strategy}", caught_by=check, also=("*",))
    for strategy, checks in _CAUGHT.items()
    for check in checks
]
