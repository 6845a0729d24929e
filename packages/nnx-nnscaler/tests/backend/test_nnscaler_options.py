"""Options of the nnscaler strategies and `ComputeConfig`: every field has an effect or is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nnx_core.errors import OptionError
from nnx_nnscaler import ComputeConfig, NnScalerOptions
from nnx_nnscaler.compute_config import compute_config_from


def test_options_are_listed_without_torch():
    code = "import sys, nnx_nnscaler; assert 'torch' not in sys.modules and 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"NNX_AUTOLOAD": "0"}, timeout=60)


def test_sizes_come_from_the_world_unless_they_are_given():
    assert NnScalerOptions().unit_size(world_size=16, local_world_size=8) == 8
    assert NnScalerOptions(policy="dp").unit_size(world_size=16, local_world_size=8) == 1
    assert NnScalerOptions(policy="zero").unit_size(world_size=16, local_world_size=8) == 1
    assert NnScalerOptions(plan_ngpus=2).unit_size(world_size=16, local_world_size=8) == 2
    config = ComputeConfig(4, 16)
    assert NnScalerOptions(compute_config=config).unit_size(world_size=16, local_world_size=8) == 4


def test_the_original_names_and_places_of_options_are_taken():
    options = NnScalerOptions(
        pas_policy="tp",
        compute_config={
            "plan_ngpus": 2,
            "use_zero": True,
            "zero_ngroups": 2,
            "zero_use_reduce_scatter": True,
            "trace_strategy": "meta",
            "pas_config": {
                "mem_constraint": 2,
                "recompute_modules": "blocks.0,blocks.1",
                "load_plan_path": "plan.json",
                "save_plan_path": "to.json",
                "_mine": object(),
            },
        },
    )
    assert (options.policy, options.pas_policy, options.plan_ngpus) == ("tp", None, 2)
    assert (options.use_zero, options.zero_ngroups) == (True, 2)
    assert options.memory_limit == 2 * 1024**3
    assert options.recompute == ("blocks.0", "blocks.1")
    assert (options.load_plan, options.save_plan) == ("plan.json", "to.json")
    assert options.zero_size(units=8) == 4


def test_autodist_may_choose_stages_unless_it_is_told_not_to():
    config = {"use_end2end": True, "pas_config": {"explore_pipeline": True}}
    assert NnScalerOptions(compute_config=config).pp_size is None
    assert NnScalerOptions(compute_config={"pas_config": {"explore_pipeline": False}}).pp_size == 1


def test_policy_zero_is_dp_with_zero():
    assert NnScalerOptions(policy="zero").zero_size(units=4) == 4
    assert NnScalerOptions(policy="dp").zero_size(units=4) == 1
    assert NnScalerOptions(policy="dp", use_zero=True).zero_size(units=4) == 4


def test_a_mapping_and_a_compute_config_say_the_same():
    assert compute_config_from({"plan_ngpus": 2, "constant_folding": True}) == ComputeConfig(
        2, constant_folding=True
    )
    assert compute_config_from(None) == ComputeConfig()
    assert ComputeConfig(2, user_config={"a": 1}).as_dict()["user_config"] == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"plan_ngpus": 0}, r"plan_ngpus=0 is not positive"),
        ({"plan_ngpus": "2"}, r"plan_ngpus='2' is of type str"),
        ({"plan_ngpus": 3, "runtime_ngpus": 4}, r"plan_ngpus=3 does not divide runtime_ngpus=4"),
        ({"trace_strategy": "fast"}, r"trace_strategy='fast' is not allowed"),
        ({"zero_ngroups": 2}, r"zero_ngroups=2 without use_zero"),
        ({"zero_use_reduce_scatter": True}, r"zero_use_reduce_scatter=True without use_zero"),
        ({"reducer_bucket_cap_mb": -1}, r"reducer_bucket_cap_mb=-1 is not positive"),
        (
            {"pas_config": {"pipeline_nmicros": 4}},
            r"pipeline_nmicros=4 with policy='autodist', which chooses",
        ),
        ({"pas_config": {"max_pipeline_bubble_ratio": 0.2}}, r"Set `pipeline_nmicros`"),
        ({"pas_config": {"update_freq": 4}}, r"Trainer accumulates gradients.*accumulate_grad_batches"),
        ({"pas_config": {"use_bf16": True}}, r"the precision is Trainer's.*bf16-mixed"),
        ({"pas_config": {"mem_constrain": 4}}, r"pas_config has no field.*Did you mean 'mem_constraint'"),
        ({"plan_ngpu": 2}, r"compute_config has no field 'plan_ngpu'\. Did you mean 'plan_ngpus'"),
    ],
)
def test_a_compute_config_that_makes_no_sense_is_refused_with_a_remedy(fields, message):
    with pytest.raises(OptionError, match=message) as caught:
        NnScalerOptions(compute_config=fields)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "pp", "load_plan": "x", "pp_size": 2}, r"pp_size=2 with load_plan='x', which decides it"),
        (
            {"policy": "tp", "compute_config": {"use_end2end": True}},
            r"use_end2end=True with policy='tp', which has no stages",
        ),
        ({"policy": "pp", "pipeline_scheduler": "fast"}, r"pipeline_scheduler='fast' is not allowed"),
        ({"policy": "pp", "pipeline_nstages": 0}, r"pipeline_nstages=0 is not positive"),
        (
            {"policy": "hybrid", "pipeline_nstages": 4, "stage_cuts": ["a"]},
            r"stage_cuts names 1 submodules, but 4 stages need 3",
        ),
        ({"stage_cuts": ["a"]}, r"stage_cuts=\('a',\) with policy='autodist', which chooses stages"),
        ({"policy": "tp", "pp_size": 1}, r"pp_size=1 with policy='tp', which has no stages"),
        ({"timeline_file": "t.json"}, r"timeline_file='t.json' with policy='autodist', which chooses stages"),
        ({"policy": "autodis"}, r"policy='autodis' is not allowed"),
        ({"policy": "zero", "use_zero": False}, r"policy='zero' contradicts use_zero=False"),
        ({"zero_ngroups": 2}, r"zero_ngroups=2 without use_zero"),
        ({"reuse": "always"}, r"reuse='always' is not allowed"),
        ({"memory_limit": 0}, r"memory_limit=0 is not positive"),
        ({"plan_ngpus": -2}, r"plan_ngpus=-2 is not positive"),
        ({"compute_config": 2}, r"compute_config is of type int"),
        ({"compute_config": {"plan_ngpus": 2}, "plan_ngpus": 4}, r"plan_ngpus=4 contradicts plan_ngpus=2"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_a_remedy(options, message):
    with pytest.raises(OptionError, match=message) as caught:
        NnScalerOptions(**options)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("options", "unit", "expected"),
    [
        ({}, 4, (4, 4)),
        ({"pipeline_nstages": 8}, 4, (4, 8)),
        ({"stage_cuts": ["b", "c", "d"]}, 2, (2, 4)),
        ({"policy": "hybrid"}, 6, (2, 2)),
        ({"policy": "hybrid"}, 9, (3, 3)),
        ({"policy": "hybrid", "compute_config": {"pas_config": {"pp_size": 4}}}, 8, (4, 4)),
        ({}, 1, (1, 1)),
    ],
)
def test_the_shape_of_a_pipeline_follows_from_the_unit(options, unit, expected):
    assert NnScalerOptions(**{"policy": "pp", **options}).pipe_shape(unit) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_nstages": 6}, r"6 stages cannot be distributed evenly over 4 ranks"),
        ({"pp_size": 2}, r"pp_size=2 with units of 4 ranks and policy='pp'"),
        ({"policy": "hybrid", "pp_size": 1}, r"pp_size=1 with units of 4 ranks and policy='hybrid'"),
        ({"policy": "hybrid", "pp_size": 3}, r"pp_size=3 with units of 4 ranks"),
        ({"pipeline_nmicros": 2}, r"pipeline_nmicros=2 is less than the 4 ranks along the pipe"),
    ],
)
def test_a_pipeline_that_does_not_fit_its_unit_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        NnScalerOptions(**{"policy": "pp", **options}).pipe_shape(4)


def test_sizes_that_do_not_fit_the_world_are_refused():
    with pytest.raises(OptionError, match=r"plan_ngpus=3 does not divide the 4 ranks"):
        NnScalerOptions(plan_ngpus=3).unit_size(world_size=4, local_world_size=4)
    with pytest.raises(OptionError, match=r"runtime_ngpus=8, but 4 ranks are running"):
        NnScalerOptions(compute_config=ComputeConfig(2, 8)).unit_size(world_size=4, local_world_size=4)
    with pytest.raises(OptionError, match=r"zero_ngroups=3 does not divide the 4 units"):
        NnScalerOptions(policy="zero", zero_ngroups=3).zero_size(units=4)
