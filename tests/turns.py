"""Which tests a run takes: what README's command runs, a share of the rest, or everything.

A test with the mark `full` is one of many of its kind: it makes a matrix complete, plants one more fault of a
group, or tries a promise under one more strategy. The environment variable NNX_MATRIX says what is taken:

- unset: what has no such mark, from every area something. That is README's command.
- `full`: everything, and the matrices that some tests then make larger. That is `nox -s full`.
- `2/5`: the second fifth of what has the mark, and nothing else. That is how `.ci/run` goes on.

What is named by its node id is always taken.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from nnx_conformance.check import Check, all_checks

__all__ = ["CASES", "FULL", "TURNS", "Turn", "chosen", "mark_what_has_no_turn"]

FULL = os.environ.get("NNX_MATRIX") == "full"


@dataclass(frozen=True)
class Turn:
    """What a class of conformance checks tries by default.

    Attributes:
        first: The number of the first check of the engine's that is tried.
        of: Every so many-th check follows.
        adapter: Whether checks of Lightning's and the adapter's code are tried: once for each adapter.
        whole: Groups or modules of which every check of the engine is tried. User patterns are only tried so:
            those of a module share a few jobs, each of which takes as long for one of them.
    """

    first: int
    of: int
    adapter: bool = False
    whole: tuple[str, ...] = ()

    def has(self, check: Check) -> bool:
        """Whether a check is tried by default."""
        if check.of_adapter:
            return self.adapter
        if check.group in self.whole or check.group == "user_patterns":
            module = check.run.__module__.partition(".checks.")[2]
            return not {check.group, module}.isdisjoint(self.whole)
        return _numbers()[check.name] % self.of == self.first


TURNS = {
    # One strategy of each of three engines; with `TestTiny` they try every check that an engine can break,
    # but for most user patterns.
    "TestFsdpAuto": Turn(
        *(0, 4),
        whole=(
            *("user_patterns.gradients", "user_patterns.state_dicts", "user_patterns.writes_per_rank"),
            *("nodes", "lifecycle"),
        ),
    ),
    "TestNnScalerTp": Turn(1, 4),
    "TestColossalAI": Turn(2, 4),
    "TestColossalAIHabits": Turn(1, 3),  # none but in `full`
    # The same engines with other options.
    "TestFsdpManual": Turn(0, 16),
    "TestFsdpOffload": Turn(1, 24),
    "TestFsdpHybrid": Turn(2, 24),
    "TestNnScalerPp": Turn(1, 16),
    "TestNnScalerDeduped": Turn(3, 24),
    "TestNnScalerZero": Turn(5, 24),
    "TestNnScalerDp": Turn(4, 16),
    "TestColossalAICpu": Turn(7, 24),
    "TestColossalAICuda": Turn(9, 24),
    "TestColossalAIAlone": Turn(0, 10),
    # Engines whose classes name what reaches their code.
    "TestStage1": Turn(1, 5),
    "TestStage2": Turn(2, 5),
    "TestStage3": Turn(0, 7),
    "TestStage3OnTheHost": Turn(3, 5),
    "TestFairscaleFsdp": Turn(0, 8),
    "TestFairscaleFsdpHabits": Turn(1, 3),  # none but in `full`
    "TestFairscaleOss": Turn(1, 5),
    "TestFairscaleSharded": Turn(3, 5),
    # What the checks themselves are tried on: a backend, a raw strategy, and Lightning's own.
    "TestTiny": Turn(3, 4, adapter=True, whole=("checkpoints",)),
    "TestTinyLightning": Turn(3, 6, adapter=True),
    "TestDdp": Turn(4, 6),
}
"""By the class of tests; one that is not here tries everything."""

CASES: dict[str, dict[str, int]] = {
    "packages/nnx-checkpoint/tests/test_hostile.py": {
        "test_a_pickle_that_makes_an_object_of_each_byte_is_refused": 5,
    },
    "tests/test_fuzz.py": {
        "test_a_changed_checkpoint_is_refused_or_read_as_its_files_say": 3,
    },
    "tests/test_docs_code.py": {
        "test_every_block_of_a_page_runs": 5,
    },
    "packages/nnx-checkpoint/tests/test_kills.py": {
        "test_kills_at_random_moments_lose_nothing": 2,
        "test_a_saver_that_is_ended_or_stopped_loses_nothing_and_keeps_nobody": 5,
    },
    "packages/nnx-core/tests/cli/test_hostile_plugins.py": {
        "test_a_hostile_plugin_is_named_and_the_others_are_listed": 3,
    },
    "packages/nnx-core/tests/lightning/test_launching.py": {
        "test_a_process_leaves_its_group_before_the_interpreter_goes": 3,
    },
    "tests/test_resume_matrix.py": {
        "test_every_cell_resumes_exactly": 28,
        "test_states_of_whole_matrices_rows_and_columns_resume_too": 6,
    },
    "packages/nnx-deepspeed/tests/test_resume.py": {
        "test_a_stage_resumes_exactly_what_was_saved": 15,
    },
    "packages/nnx-fairscale/tests/test_resume.py": {
        "test_a_strategy_resumes_exactly_what_was_saved": 9,
    },
    "packages/nnx-colossalai/tests/acceptance/test_historical.py": {
        "test_the_optimizers_of_torch_are_accepted": 8,
        "test_a_sanity_check_before_training_is_no_longer_refused": 8,
        "test_gradients_are_clipped_by_value_and_by_norm": 8,
        "test_the_optimizers_of_colossalai_keep_their_names": 8,
        "test_the_model_is_built_wherever_one_likes": 8,
        "test_fit_and_test_in_16_bits_learn_as_the_plain_loop_does": 8,
        "test_masters_in_mixed_precision_are_those_of_the_plain_loop_to_the_bit": 8,
    },
    "packages/nnx-colossalai/tests/acceptance/test_resume.py": {
        "test_masters_moments_steps_and_loss_scale_resume_to_the_bit": 13,
    },
    "packages/nnx-colossalai/tests/acceptance/test_tier_mixes.py": {
        "test_masters_moments_and_losses_are_the_references_to_the_bit": 12,
    },
    "packages/nnx-colossalai/tests/acceptance/test_tier_mixes_traffic.py": {
        "test_bytes_moved_in_a_step_are_those_of_the_formula": 7,
    },
    "packages/nnx-colossalai/tests/chunks/test_local_engine.py": {"*": 5},
    "packages/nnx-colossalai/tests/chunks/test_local_gradients.py": {"*": 4},
    "packages/nnx-colossalai/tests/chunks/test_local_listening.py": {"*": 4},
    "packages/nnx-colossalai/tests/chunks/test_local_memory.py": {"*": 5},
    "packages/nnx-colossalai/tests/chunks/test_local_pending.py": {"*": 5},
    "packages/nnx-colossalai/tests/optimizers/test_stepper.py": {
        "test_every_optimizer_ends_at_the_bits_of_its_own_step": 3,
        "test_random_delays_change_nothing": 3,
    },
    "packages/nnx-colossalai/tests/plan/test_planner.py": {"*": 3},
    "packages/nnx-colossalai/tests/plan/test_planner_engine.py": {"*": 3},
    "packages/nnx-colossalai/tests/chunks/test_sharded_engine.py": {
        "test_gradients_are_those_of_fsdp2_however_they_come_about": 4,
    },
    "packages/nnx-nnscaler/tests/acceptance/test_defects_of_the_original.py": {
        "test_two_param_groups_train_and_are_clipped": 7,
        "test_validation_takes_the_eval_branch": 5,
        "test_a_smaller_last_batch_works": 7,
        "test_gen_savedir_holds_no_weights_and_no_pickles": 5,
        "test_validate_after_fit_uses_the_trained_weights_and_a_second_fit_goes_on": 5,
        "test_another_plan_world_or_strategy_resumes_without_a_merge": 5,
        "test_names_stay_and_layers_can_be_used_outside_the_forward": 5,
        "test_validate_and_predict_need_no_training_loader": 5,
    },
    "packages/nnx-nnscaler/tests/acceptance/test_losses_equal_one_process.py": {
        "test_two_processes_have_the_losses_of_one": 46,
        "test_four_processes_have_the_losses_of_one": 92,
        "test_units_of_two_are_replicated_over_four": 9,
        "test_dp_is_bit_equal_to_ddp": 4,
    },
    "packages/nnx-nnscaler/tests/acceptance/test_parity_of_models.py": {
        "test_a_unit_computes_what_one_process_computes": 17,
    },
    "packages/nnx-nnscaler/tests/acceptance/test_pipelines.py": {
        "test_a_schedule_has_the_losses_of_one_process": 130,
        "test_what_a_schedule_cannot_do_is_refused_on_every_rank": 1,
        "test_parameters_gradients_and_optimizer_state_take_the_bytes_that_were_predicted": 2,
        "test_what_cannot_be_planned_is_one_error_on_every_rank": 2,
    },
    "packages/nnx-nnscaler/tests/acceptance/test_planted_traps.py": {
        "test_it_trains_and_evaluates_as_one_process_does": 8,
    },
    "packages/nnx-nnscaler/tests/codegen/test_parity.py": {
        "test_a_gpt_with_tied_weights_and_dropout": 5,
        "test_recomputed_submodules_change_nothing": 3,
    },
    "packages/nnx-nnscaler/tests/plan/test_solver.py": {
        "test_the_solver_finds_the_best_of_all_plans": 5,
        "test_least_memory_is_near_the_least_of_all_plans": 2,
    },
    "packages/nnx-nnscaler/tests/probing/test_convolution_rules.py": {"*": 8},
    "packages/nnx-nnscaler/tests/probing/test_convolutional_models.py": {"*": 8},
    "packages/nnx-nnscaler/tests/probing/test_probe.py": {
        "test_the_table_and_trying_agree": 3,
    },
    "packages/nnx-nnscaler/tests/rules/test_random_plans.py": {"*": 3},
    "packages/nnx-nnscaler/tests/rules/test_rule_table.py": {
        "test_every_strategy_gives_the_results_and_gradients_of_the_whole_operator": 6,
    },
    "packages/nnx-nnscaler/tests/runtime/test_reading_alone.py": {
        "test_what_one_rank_reads_alone_is_refused_by_name": 4,
    },
    "packages/nnx-nnscaler/tests/runtime/test_reducer.py": {
        "test_training_equals_ddp_bit_for_bit": 4,
        "test_gradients_are_the_mean_over_the_ranks": 3,
    },
    "packages/nnx-nnscaler/tests/runtime/test_zero.py": {
        "test_training_equals_one_process": 5,
    },
    "packages/nnx-nnscaler/tests/trace/test_trace_forward.py": {
        "test_a_graph_equals_its_model_for_any_batch_size": 3,
    },
    "packages/nnx-nnscaler/tests/trace/test_trace_transformers.py": {
        "test_a_graph_equals_its_model": 8,
    },
    "packages/nnx-fsdp/tests/test_parity.py": {
        "test_fsdp_auto_equals_one_process": 8,
    },
    "packages/nnx-core/tests/lightning/test_averaging.py": {
        "test_a_resumed_average_goes_on_as_if_uninterrupted": 4,
    },
    "packages/nnx-core/tests/lightning/test_exact_resume.py": {
        "test_a_shuffling_run_resumes_exactly_wherever_it_was_interrupted": 5,
    },
}
"""By file, the tests of which every so many-th case is tried by default; ``"*"`` is every other of the file.

Of tests that are not here every sixth case is tried where they run on worker processes, and every one
elsewhere. The tests of a file begin with different cases where there is ``"*"``, so that together they try
every value of a parameter that they share, such as the tiers of a chunk.
"""


@cache
def _numbers() -> dict[str, int]:
    """The place among engines' checks, by which strategies take turns."""
    of_engines = [check for check in all_checks() if not check.of_adapter]
    return {check.name: place for place, check in enumerate(of_engines)}


def mark_what_has_no_turn(items: Sequence[pytest.Item]) -> None:
    """Give the mark to the checks and cases that are not tried by default, by the tables here."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    begun: Counter[str] = Counter()
    for test, cases in tests.items():
        file, *_, name = test.split("::")
        known = CASES.get(file, {})
        usual = 6 if "pool" in getattr(cases[0], "fixturenames", ()) else 1
        of = min(known.get(name, known.get("*", usual)), len(cases))
        first = begun[file] % of if name not in known and "*" in known else 0
        begun[file] += 1
        turn = TURNS.get(getattr(getattr(cases[0], "cls", None), "__name__", ""))
        for place, item in enumerate(cases):
            is_tried = turn.has(item.callspec.params["check"]) if turn else True  # type: ignore[attr-defined]
            if not is_tried or place % of != first:
                item.add_marker("full")


def chosen(items: Sequence[pytest.Item], matrix: str) -> list[pytest.Item]:
    """The tests that a value of NNX_MATRIX takes."""
    if matrix == "full":
        return list(items)
    if not matrix:
        return [item for item in items if not item.get_closest_marker("full")]
    share = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", matrix)
    if share is None or int(share[1]) > int(share[2]):
        raise pytest.UsageError(f"NNX_MATRIX={matrix!r} is neither 'full' nor a share such as '2/5'")
    return _share(items, int(share[1]) - 1, int(share[2]))


def _share(items: Sequence[pytest.Item], number: int, of: int) -> list[pytest.Item]:
    """One of so many shares of what has the mark: of each file what stands together, as it shares jobs."""
    rest: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full"):
            rest.setdefault(item.path, []).append(item)
    return [
        item
        for file, marked in enumerate(rest.values())
        for place, item in enumerate(marked)
        if (place * of // len(marked) + file) % of == number
    ]
