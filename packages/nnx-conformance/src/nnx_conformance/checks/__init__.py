"""The checks; a function's docstring is the promise that it tries.

A module's name begins with the group of its checks.
"""

MODULES = (
    "numbers_optimizers",
    "numbers_losses",
    "stages",
    "structure_layers",
    "structure_building",
    "names_module",
    "names_callbacks",
    "names_collectives",
    "names_samplers",
    "habits_ranks",
    "habits_gradients",
    "habits_parameters",
    "habits_state_dict",
    "habits_weights_by_hand",
    "habits_written_by_ranks",
    "habits_backward",
    "habits_optimizers",
    "habits_lone_rank",
    "habits_collectives",
    "checkpoints_resuming",
    "checkpoints_contents",
    "checkpoints_accidents",
    "nodes",
    "manners_starting",
    "manners_failures",
    "manners_first_error",
    "manners_residue",
)
"""The modules in the order in which their checks run: what fails first explains most."""
