"""The config that nnx passes to DeepSpeed, and every refusal of options and configs."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy

from nnx_core.errors import OptionError
from nnx_deepspeed.config import make_config
from nnx_deepspeed.options import DeepSpeedOptions
from nnx_test_helpers.repository import from_repository


def config_of(bf16: bool = False, **options: Any) -> dict[str, Any]:
    return make_config(DeepSpeedOptions(**options), bf16=bf16)


def test_what_trainer_does_is_turned_off() -> None:
    config = config_of()
    assert config["gradient_accumulation_steps"] == 1
    assert config["gradient_clipping"] == 0.0
    assert not {"optimizer", "scheduler", "fp16", "bf16"} & set(config)


def test_16_bit_weights_come_from_the_precision_alone() -> None:
    assert config_of(True)["bf16"] == {"enabled": True}
    assert config_of(True)["data_types"] == {"grad_accum_dtype": "fp32"}


def test_offload_sections_appear_only_when_asked_for() -> None:
    assert not {"offload_optimizer", "offload_param"} & set(config_of(stage=3)["zero_optimization"])
    zero = config_of(stage=3, offload_optimizer=True, offload_parameters=True, pin_memory=True)
    assert zero["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert zero["zero_optimization"]["offload_param"]["pin_memory"] is True


def test_a_users_config_wins_section_by_section_and_auto_leaves_the_default(tmp_path: Path) -> None:
    users = {"zero_optimization": {"reduce_bucket_size": 7, "stage": "auto"}, "wall_clock_breakdown": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(users))
    for given in (users, path, str(path)):
        config = config_of(stage=1, config=given)
        assert config["zero_optimization"]["reduce_bucket_size"] == 7
        assert config["zero_optimization"]["stage"] == 1
        assert config["zero_optimization"]["contiguous_gradients"] is True
        assert config["wall_clock_breakdown"] is True


def test_a_users_config_is_not_changed() -> None:
    users = {"zero_optimization": {"overlap_comm": False}, "bf16": {"enabled": "auto"}}
    before = json.dumps(users)
    config_of(True, config=users)
    assert json.dumps(users) == before


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"optimizer": {"type": "Adam"}}, "has 'optimizer', which Trainer or nnx decides"),
        ({"scheduler": {}}, "has 'scheduler'"),
        ({"train_batch_size": 64}, "has 'train_batch_size'.*DataLoader"),
        ({"amp": {"enabled": True}}, "has 'amp'.*precision="),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "has 'torch_autocast'.*precision="),
        ({"tensor_parallel": {"autotp_size": 2}}, "has 'tensor_parallel'.*ZeRO alone"),
        ({"sequence_parallel_size": 2}, "has 'sequence_parallel_size'.*ZeRO alone"),
        ({"zero_optimization": {"mics_shard_size": 2}}, "says mics_shard_size=2, expected -1"),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}},
            "says ratio=0.5, expected 1.*completely or not at all",
        ),
        ({"zero_optimization": True}, "says zero_optimization=True, expected a section"),
        ({"bfloat16": {"enabled": True}}, "says bfloat16.enabled=True; the run's precision contradicts it"),
        ({"gradient_accumulation_steps": 4}, "says gradient_accumulation_steps=4, expected 1"),
        ({"gradient_clipping": 0.5}, "says gradient_clipping=0.5, expected 0"),
        ({"zero_optimization": {"stage": 3}}, "says stage=3, expected 2"),
        ({"bf16": {"enabled": True}}, "says bf16.enabled=True; the run's precision contradicts it"),
        ({"fp16": {"enabled": True}}, "turns fp16 on; its loss scale"),
    ],
)
def test_a_config_that_contradicts_trainer_is_refused(users: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        config_of(config=users)


@pytest.mark.parametrize(
    ("options", "users", "key"),
    [
        ({"reduce_bucket_size": 5}, {"zero_optimization": {"reduce_bucket_size": 7}}, "reduce_bucket_size=7"),
        ({"zero_allow_untested_optimizer": False}, {"zero_allow_untested_optimizer": True}, "says False"),
        (
            {"stage": 3, "offload_optimizer": True},
            {"zero_optimization": {"offload_optimizer": {"device": "none"}}},
            "device='none', an option of the strategy says 'cpu'",
        ),
        ({"block_size": 1}, {"aio": {"block_size": 2}}, "block_size=2"),
    ],
)
def test_a_config_that_contradicts_an_option_that_was_set_is_refused(
    options: dict[str, Any], users: dict[str, Any], key: str
) -> None:
    with pytest.raises(OptionError, match=key):
        config_of(config=users, **options)


def test_a_config_may_repeat_an_option_and_turn_off_what_trainer_decides() -> None:
    users = {
        "zero_optimization": {"reduce_bucket_size": 5, "stage": 2},
        "train_batch_size": "auto",
        "amp": {"enabled": False},
        "fp16": {"enabled": False},
        "gradient_clipping": 0,
    }
    zero = config_of(config=users, reduce_bucket_size=5)["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage"]) == (5, 2)


def test_a_config_that_turns_the_runs_precision_off_is_refused() -> None:
    with pytest.raises(OptionError, match=r"bf16.enabled=False.*precision='bf16-mixed'"):
        config_of(True, config={"bf16": {"enabled": False}})


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "there is no such file"), ("{", "cannot be read"), ("[1]", "holds a list")],
)
def test_a_config_file_that_is_none_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match=message):
        config_of(config=path)


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_are_offloaded_by_stage_3_only(stage: int) -> None:
    with pytest.raises(OptionError, match=f"needs stage 3, this is stage {stage}"):
        DeepSpeedOptions(stage=stage, offload_parameters=True)


@pytest.mark.parametrize(
    "option", [{"stage": 4}, {"config": 3}, {"offload_params_device": "disk"}, {"reduce_bucket_size": "many"}]
)
def test_an_option_of_another_kind_is_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(option))):
        DeepSpeedOptions(**option)


def test_every_argument_of_lightnings_strategy_is_an_option_or_refused_by_the_page() -> None:
    options = set(DeepSpeedOptions.__dataclass_fields__)
    page = from_repository(__file__, "docs/backends/deepspeed.md")
    explained = page.read_text(encoding="utf-8")
    for name in set(inspect.signature(DeepSpeedStrategy.__init__).parameters) - {"self"}:
        assert f"`{name}`" in explained, f"docs/backends/deepspeed.md says nothing about {name}"
        row = next(line for line in explained.splitlines() if line.startswith("|") and f"`{name}`" in line)
        assert (name in options) is ("elsewhere" not in row), row


@pytest.mark.full
def test_importing_lightning_and_listing_strategies_does_not_import_deepspeed() -> None:
    script = (
        "import sys, lightning.pytorch, nnx; names = nnx.StrategyRegistry.names();"
        "assert 'nnx_deepspeed_3' in names, names;"
        "assert 'deepspeed' not in sys.modules and 'nnx_deepspeed.backend' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
