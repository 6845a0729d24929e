"""``nnx search``: what it finds, in which order, and what it says where it finds nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nnx_checkpoint.cli.command import main
from nnx_core.plugins import refresh

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


def test_every_word_has_to_match(found: Callable[..., list[str]]) -> None:
    assert {"fsdp_hybrid", "fsdp_auto"} <= set(found("fsdp2"))
    assert found("fsdp2", "nodes") == ["fsdp_hybrid"]


def test_names_of_the_past_come_last_unless_one_was_asked_for(search: Search) -> None:
    def statuses(*words: str) -> list[str]:
        return [result["status"] for result in json.loads(search(*words, "--json")[1])["results"]]

    past = [status == "historical" for status in statuses("sharded")]
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
    assert rows["NAME"].split() == ["NAME", "STATUS", "TO", "GET", "IT", "DESCRIPTION"]
    assert (
        "not installed  pip install nnx-fairscale  fairscale's FullyShardedDataParallel"
        in rows["fairscale_fsdp"]
    )
    assert "historical     use fsdp_auto              it was fairscale's ShardedDDP" in rows["ddp_sharded"]


def test_a_broken_plugin_is_sent_to_the_doctor(site: Any, search: Search) -> None:
    site.add("nnx-deepspeed", "import does_not_exist")
    _, output, _ = search("nnx_deepspeed_3_cpu")
    assert "broken" in output.splitlines()[1]
    assert " nnx doctor " in output.splitlines()[1]


def test_json_has_what_was_searched_for_and_found(search: Search) -> None:
    code, output, error = search("the", "slow", "links", "--json")
    assert (code, error) == (0, "")
    content = json.loads(output)
    assert content["words"] == ["slow", "links"]
    assert [result["name"] for result in content["results"]] == ["fsdp_hybrid"]
    assert content["results"][0]["action"] == ""
    assert content["suggestions"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fspd"], "Nothing is known of 'fspd'.\nDid you mean 'fsdp'?\n"),
        (["fspd_auto"], "Nothing is known of 'fspd_auto'.\nDid you mean 'fsdp_auto'?\n"),
        (["colosalai"], "Nothing is known of 'colosalai'.\nDid you mean 'colossalai'"),
        (["xylophone"], "Nothing is known of 'xylophone'.\n`nnx list --all` shows every name.\n"),
        (
            ["bagua", "tiny"],
            "Nothing is known of 'bagua' 'tiny'.\nEvery word has to match: try fewer of them.\n",
        ),
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
