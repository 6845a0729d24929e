"""``nnx search``: its results, their order, and its message if nothing matches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nnx_checkpoint.cli.command import main
from nnx_core.cli.search import PAGES
from nnx_core.names.discovery import refresh
from nnx_test_helpers.repository import from_repository

Search = Callable[..., tuple[int, str, str]]


@pytest.fixture
def search(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, clean_names: Any) -> Search:
    """Run the command in this process; returns exit code, standard output and error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nnx", "search", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def found(search: Search) -> Callable[..., list[str]]:
    """The names that a search finds, the best first."""

    def run(*words: str) -> list[str]:
        results = json.loads(search(*words, "--json")[1])["results"]
        return [result["name"] for result in results]

    return run


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    ("words", "first"),
    [
        (["fsdp_auto"], "fsdp_auto"),
        (["FSDP", "auto"], "fsdp_auto"),
        (["offload"], "fsdp_offload"),
        (["tensor", "parallel"], "nnscaler_tp"),
        (["tensor_parallel", "single", "layers"], "nnscaler_tp"),
        (["slow", "links", "between", "the", "nodes"], "fsdp_hybrid"),
        (["zero"], "nnscaler_zero"),
        (["deepspeed", "zero", "3"], "nnx_deepspeed_3"),
        (["fairscale"], "fairscale_fsdp"),
        (["lightning-colossalai"], "colossalai"),
        (["nnx-tiny"], "tiny"),
        (["bagua"], "bagua"),
        (["gaudi"], "hpu_ddp"),
        (["lightning-habana"], "hpu_ddp"),
        (["ddp"], "ddp"),
        (["horovod"], "horovod"),
    ],
)
def test_the_first_hit(found: Callable[..., list[str]], words: list[str], first: str) -> None:
    assert found(*words)[0] == first


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("words", [["out", "of", "memory"], ["oom"], ["not", "fit"], ["larger", "model"]])
def test_a_question_for_memory_is_not_answered_by_what_saves_none(
    found: Callable[..., list[str]], words: list[str]
) -> None:
    assert "fsdp_auto" in found(*words)
    assert not {"nnscaler_dp", "ddp", "ddp2", "horovod"} & set(found(*words))


# What people look for, and the strategies and pages of which one has to be among the first three.
PHRASES = {
    "oom": "fsdp_auto fsdp_offload colossalai",
    "out of memory": "fsdp_auto fsdp_offload colossalai",
    "gpu memory too small": "colossalai_cpu fsdp_offload fsdp_auto colossalai",
    "model larger than gpu memory": "colossalai fsdp_auto fsdp_offload",
    "model does not fit on one gpu": "fsdp_auto nnx_deepspeed_3",
    "single gpu": "colossalai fsdp_auto nnscaler_tp",
    "slow network": "fsdp_hybrid",
    "slow interconnect between nodes": "fsdp_hybrid",
    "multi-node": "fsdp_hybrid",
    "train on several machines": "fsdp_hybrid",
    "llm": "fsdp_auto colossalai nnscaler_tp fsdp_offload",
    "large language model": "fsdp_auto colossalai nnscaler_tp fsdp_offload",
    "tensor parallel": "nnscaler_tp",
    "megatron": "nnscaler_tp nnscaler",
    "pipeline parallelism": "nnscaler_pp",
    "fp8": "docs/limits.md",
    "tutorial": "docs/start/index.md",
    "sequence parallel": "docs/backends/nnscaler.md nnscaler",
    "zero": "nnscaler_zero nnx_deepspeed_3 nnx_deepspeed_1 nnx_deepspeed_2",
    "zero stage 3": "nnx_deepspeed_3",
    "zero3": "nnx_deepspeed_3",
    "deepspeed": "nnx_deepspeed_1 nnx_deepspeed_2 nnx_deepspeed_3",
    "fsdp": "fsdp_auto",
    "cpu offload": "fsdp_offload nnx_deepspeed_3_cpu colossalai_cpu",
    "offload optimizer to cpu": "fsdp_offload nnx_deepspeed_3_cpu colossalai_cpu",
    "sharded ddp": "fairscale_sharded",
    "data parallel": "nnscaler_dp",
    "ranks diverge debug": "docs/divergence.md",
    "automatic parallelism": "nnscaler nnscaler_deduped",
    "gradient checkpointing": "fsdp_auto fsdp_manual",
    "mixed precision": "docs/options.md",
    "resume training from checkpoint": "docs/checkpoints.md",
    "convert checkpoint": "docs/formats.md",
    "merge checkpoint into one file": "docs/formats.md",
    "save to s3": "docs/checkpoints.md",
    "slurm": "docs/recipes.md",
    "huggingface": "docs/recipes.md",
    "finetune with lora": "docs/recipes.md",
    "hsdp": "fsdp_hybrid",
    "colossalai gemini": "colossalai",
    "muon optimizer": "docs/optimizers.md",
    "write my own strategy": "docs/writing-a-backend.md",
    "memory budget": "colossalai",
    "batch size": "docs/choosing.md",
    "wrap layers by hand": "fsdp_manual",
    "tensorboard logging": "docs/recipes.md",
    "own pytorch loop without lightning": "docs/lite.md",
}


@pytest.mark.full
def test_phrases_of_users_lead_to_what_they_need(found: Callable[..., list[str]]) -> None:
    missed = [
        phrase
        for phrase, right in PHRASES.items()
        if not set(right.split()) & set(found(*phrase.split())[:3])
    ]
    assert len(PHRASES) >= 40
    assert len(missed) <= len(PHRASES) // 8, missed


def test_what_has_more_of_the_words_goes_first(found: Callable[..., list[str]]) -> None:
    assert {"fsdp_hybrid", "fsdp_auto"} <= set(found("fsdp2"))
    assert found("fsdp2", "nodes")[0] == "fsdp_hybrid"


def test_pages_that_are_found_exist() -> None:
    assert [page for page in PAGES if not from_repository(__file__, page).is_file()] == []


def test_names_of_the_past_come_last_unless_one_was_asked_for(search: Search) -> None:
    def statuses(*words: str) -> list[str]:
        return [result["status"] for result in json.loads(search(*words, "--json")[1])["results"]]

    past = [status == "historical" for status in statuses("pipeline")]
    assert 0 < sum(past) < len(past)
    assert past == sorted(past)
    assert statuses("ddp_sharded")[0] == "historical"


def test_what_is_installed_goes_before_what_fits_as_well_and_is_not(
    site: Any, found: Callable[..., list[str]]
) -> None:
    site.hide("nnx-fairscale")
    assert found("fairscale")[0] == "fairscale_fsdp"
    site.provide("zz", "zz_fairscale")
    refresh()
    assert found("fairscale")[0] == "zz_fairscale"


def test_a_hit_says_how_to_get_it(site: Any, search: Search) -> None:
    site.hide("nnx-fairscale")
    code, output, error = search("fairscale")
    assert (code, error) == (0, "")
    rows = {line.split()[0]: line for line in output.splitlines()}
    assert "(pip install nnx-fairscale) fairscale's FullyShardedDataParallel" in rows["fairscale_fsdp"]
    _, output, _ = search("ddp_sharded")
    assert "(use fsdp_auto) it was fairscale's ShardedDDP" in output


def test_a_broken_plugin_is_sent_to_the_doctor(site: Any, search: Search) -> None:
    site.add("nnx-deepspeed", "import does_not_exist")
    _, output, _ = search("nnx_deepspeed_3_cpu")
    assert output.splitlines()[0].startswith("nnx_deepspeed_3_cpu  (nnx doctor) ")


def test_json_has_what_was_searched_for_and_found(search: Search) -> None:
    code, output, error = search("the", "slow", "links", "--json")
    assert (code, error) == (0, "")
    content = json.loads(output)
    assert content["words"] == ["slow", "links"]
    assert content["results"][0]["name"] == "bagua"
    assert content["results"][0]["action"] == ""
    assert content["suggestions"] == []


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fspd"], "Nothing is known of 'fspd'.\nDid you mean 'fsdp'?\n"),
        (["fspd_auto"], "Nothing is known of 'fspd_auto'.\nDid you mean 'fsdp_auto'?\n"),
        (["colosalai"], "Nothing is known of 'colosalai'.\nDid you mean 'colossalai'"),
        (["xylophone"], "Nothing is known of 'xylophone'.\n`nnx list --all` shows every name.\n"),
        (["qqqq", "xxxx"], "Nothing is known of 'qqqq' 'xxxx'.\n`nnx list --all` shows every name.\n"),
        (["the"], "Nothing is known of that.\n`nnx list --all` shows every name.\n"),
    ],
)
def test_finding_nothing_is_exit_code_one_with_what_to_try(
    search: Search, words: list[str], said: str
) -> None:
    code, output, error = search(*words)
    assert (code, output) == (1, "")
    assert error.startswith(said)


def test_finding_nothing_is_also_told_as_json(search: Search) -> None:
    code, output, error = search("fspd", "--json")
    assert (code, error) == (1, "")
    assert json.loads(output) == {"words": ["fspd"], "results": [], "suggestions": ["fsdp"]}


def test_searching_for_nothing_is_wrong_usage(search: Search) -> None:
    assert search()[0] == 2
