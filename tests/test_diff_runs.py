"""`nnx diff` on real ranks: planted faults, healthy strategies, and scripts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import nnx
from faults.diff import FAULTS, HELD_BACK
from faults.diff_bench import Bench, right_parameter
from faults.diff_models import MODELS
from jobs.diff_scripts import SCRIPTS
from nnx_conformance.diff.verdict import Verdict
from nnx_conformance.pool import WorkerPool
from nnx_conformance.subject import Subject

_DEFAULT = ("one parameter is not reduced", "forward uses a stale weight", "the rate is halved")
_CASES = [
    pytest.param(n, marks=() if n in _DEFAULT else pytest.mark.full)
    for n in FAULTS
    if n and n not in HELD_BACK
]


@pytest.fixture(scope="module")
def bench(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(pool, "MLP", tmp_path_factory.mktemp("diff"), {})


@pytest.mark.parametrize("name", _CASES)
def test_a_planted_fault_is_found_and_named(bench: Bench, name: str) -> None:
    model = MODELS["MLP"]
    options = {"fault": name, "target": model.target, "vector": model.elementwise}
    verdict = bench.verdict(Subject("faults.diff:Faulty", options=options), 2)
    assert verdict is not None
    assert verdict.kind in FAULTS[name].kinds, str(verdict)
    assert right_parameter(FAULTS[name], verdict, model), str(verdict)


def test_the_sentence_names_step_tensor_and_rank(bench: Bench) -> None:
    model = MODELS["MLP"]
    options = {"fault": "the last rank adds nothing to one sum", "target": model.target, "vector": ""}
    verdict: Verdict | None = bench.verdict(Subject("faults.diff:Faulty", options=options), 2)
    assert str(verdict).startswith(
        "step 0, layers.2.weight: the gradient lacks the share of rank 1 (ratio 0."
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "fsdp_auto",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("nnscaler_zero", "nnscaler_tp", "nnscaler_pp")),
        *(pytest.param(n, marks=pytest.mark.full) for n in ("colossalai", "nnx_deepspeed_2")),
    ],
)
def test_a_healthy_strategy_raises_no_alarm(bench: Bench, name: str) -> None:
    b, compared = bench.compare(Subject(name), 2)
    assert compared.finding is None
    assert (b.error, compared.steps) == ("", 3)


@pytest.mark.full
@pytest.mark.parametrize("name", ["ddp", "fsdp_auto", "nnscaler_zero", "nnx_deepspeed_2"])
def test_flipped_signs_of_adam_in_bfloat16_raise_no_alarm(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    _, compared = Bench(pool, "AdamGPT", tmp_path, {}, "bf16-mixed").compare(Subject(name), 2)
    assert compared.finding is None


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPTS[request.param], encoding="utf-8")
    return path


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "a", "b"),
    [
        ("trainer", "ddp@1", "ddp@2"),
        ("model_parallel", "ddp@1", "script@2"),
        ("fabric", "ddp@1", "ddp@2"),
        ("fabric", "ddp@1", "fsdp_auto@2"),
        ("plain", "@1", "@2"),
    ],
    indirect=["script"],
)
def test_a_script_is_compared_without_a_changed_line(script: Path, a: str, b: str) -> None:
    result = nnx.testing.assert_equal_runs(script, a=a, b=b, timeout=200)
    assert result.compared.steps == 3
    assert result.compared.largest["gradient"] < 1e-5


@pytest.mark.full
def test_a_mean_over_the_tokens_of_each_rank_is_found_as_on_the_page() -> None:
    pytest.importorskip("transformers")
    root = Path(__file__).resolve().parents[1]
    script, settings = root / "examples" / "train_padded.py", {"a": "ddp@1", "b": "ddp@2", "timeout": 200}
    with pytest.raises(
        AssertionError, match=r"uneven mean: step 0, loss: the loss differs by 0\.0"
    ) as caught:
        nnx.testing.assert_equal_runs(script, **settings)
    page = without_numbers((root / "docs" / "diff.md").read_text(encoding="utf-8"))
    for line in str(caught.value).splitlines():
        assert without_numbers(line) in page
    nnx.testing.assert_equal_runs(script, words=("--count",), **settings)


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.e-]*", "#", text)


@pytest.mark.full
@pytest.mark.parametrize("script", ["plain"], indirect=True)
def test_a_wrong_loss_of_a_plain_loop_is_found(script: Path) -> None:
    settings: dict[str, Any] = {"words": ("double",), "timeout": 200}
    with pytest.raises(AssertionError, match=r"factor N: step 0, 0\.weight: the gradient has the factor 2"):
        nnx.testing.assert_equal_runs(script, a="@1", b="@2", **settings)
