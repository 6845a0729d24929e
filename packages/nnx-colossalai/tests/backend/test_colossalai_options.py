"""The options of the colossalai strategies: accepted values, refused values and the reasons."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from nnx_colossalai.model import constraints_of
from nnx_colossalai.options import ColossalAIOptions
from nnx_colossalai.plan.spec import Tier
from nnx_core.errors import OptionError
from nnx_core.options import bytes_of


def test_listing_the_options_imports_neither_torch_nor_lightning() -> None:
    code = (
        "import sys, nnx_colossalai, nnx_colossalai.plugin, nnx_colossalai.options;"
        "nnx_colossalai.plugin.nnx_strategies();"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"NNX_AUTOLOAD": "0"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        ("1.5 KiB", 1536),
        ("1e9", 10**9),
        ("512", 512),
        ("512 B", 512),
        ("2T", 2 * 10**12),
        (2**34, 2**34),
        (1e9, 10**9),
        (None, None),
    ],
)
def test_sizes_are_bytes_or_text_with_a_unit(text: Any, expected: int | None) -> None:
    assert bytes_of(text, name="device_memory") == expected
    assert ColossalAIOptions(device_memory=text).device_bytes == expected
    assert ColossalAIOptions(host_memory=text).host_bytes == expected


@pytest.mark.parametrize(
    "size", ["24 bananas", "", "GiB", "-1", "iB", "5 iB", 0, -5, float("inf"), float("nan"), True, "1 GiB/s"]
)
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(OptionError, match=r"host_memory=.* is not a size in bytes\. Pass a positive number"):
        ColossalAIOptions(host_memory=size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_chunk": False}, r"use_chunk=False is not supported"),
        ({"use_chunk": 1}, r"use_chunk=1 is of type int"),
        ({"chunk_search_n_grids": 1024}, r"chunk_search_n_grids=1024: chunks are exactly as large"),
        ({"placement_policy": "const"}, r"placement_policy='const' is unknown\. .*offload_fraction"),
        ({"placement_policy": "gpu"}, r"placement_policy='gpu' is unknown\. Use one of 'auto', 'cuda'"),
        ({"tiers": {"blocks.0": "disk"}}, r"tiers=\{'blocks\.0': 'disk'\} is not a tier"),
        (
            {"enable_distributed_storage": False, "placement_policy": "cpu"},
            r"enable_distributed_storage=False contradicts placement_policy='cpu'",
        ),
        (
            {"enable_distributed_storage": False, "placement_policy": "sharded"},
            r"contradicts placement_policy='sharded'",
        ),
        ({"chunk_size": 0}, r"chunk_size=0 is not a size\. Pass a positive number of elements"),
        ({"chunk_size": True}, r"chunk_size=True is not a size"),
        ({"min_chunk_size": -1}, r"min_chunk_size=-1 is not a size\. Pass a positive number of bytes"),
        ({"chunk_size": 8, "chunk_search_range": 8}, r"chunk_size=8 and chunk_search_range=8 conflict"),
        ({"min_chunk_size": 8, "min_num_params": 8}, r"min_chunk_size=8 and min_num_params=8 conflict"),
        (
            {"gpu_margin_mem_ratio": 1.5},
            r"gpu_margin_mem_ratio=1\.5 is not a share\. Pass a number from 0 to 1",
        ),
        ({"offload_fraction": -0.1}, r"offload_fraction=-0\.1 is not a share"),
        ({"stream_fraction": float("nan")}, r"stream_fraction=nan is not a share"),
        ({"growth_factor": 1}, r"growth_factor=1 is out of its range"),
        ({"backoff_factor": 1}, r"backoff_factor=1 is out of its range"),
        ({"growth_interval": 0}, r"growth_interval=0 is out of its range"),
        ({"hysteresis": 0}, r"hysteresis=0 is out of its range"),
        ({"min_scale": 0}, r"min_scale=0 is out of its range"),
        ({"max_scale": 0.5}, r"max_scale=0\.5 is out of its range"),
        ({"initial_scale": 2.0**33}, r"initial_scale=8589934592\.0 is out of its range"),
        ({"overlap": "later"}, r"overlap='later' is not allowed\. Use one of 'exact', 'none'"),
        ({"cpu_adam": "apex"}, r"cpu_adam='apex' is not allowed"),
        (
            {"plan": __file__, "offload_fraction": 0.5, "placement_policy": "cpu"},
            r"plan='.*' sets all tiers, so offload_fraction, placement_policy would have",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ColossalAIOptions(**options)


def test_every_option_says_what_it_changes() -> None:
    helps = {field.name: field.metadata["help"] for field in fields(ColossalAIOptions)}
    assert all(text.endswith(".") and len(text) > 15 for text in helps.values()), helps


def test_patterns_of_names_are_spelled_out_and_the_last_counts() -> None:
    options = ColossalAIOptions(tiers={"blocks.*": "streamed", "blocks.1": "sharded", "": "gathered"})
    tiers = constraints_of(options, ["blocks.0", "blocks.1", "head", ""]).tiers
    assert tiers == {"blocks.0": Tier.STREAMED, "blocks.1": Tier.SHARDED, "": Tier.GATHERED}


def test_the_arguments_of_old_scripts_become_constraints() -> None:
    options = ColossalAIOptions(placement_policy="auto", gpu_margin_mem_ratio=0.25, overlap="none")
    constraints = constraints_of(options, [""])
    assert (constraints.policy, constraints.gpu_margin_ratio, constraints.overlapped) == ("auto", 0.25, False)
    assert constraints_of(ColossalAIOptions(enable_distributed_storage=False), [""]).policy == "gathered"
