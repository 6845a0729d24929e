"""`nnx diff`: statistics by box, relations of tensors, records of loops, sides, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nnx
from jobs.diff_scripts import SCRIPTS
from nnx_base.box import Box
from nnx_conformance.diff.comparison import Comparer, why_no_twin
from nnx_conformance.diff.job import VARIABLE, Job, load_state, share_of
from nnx_conformance.diff.layouts import PlainLayout
from nnx_conformance.diff.page import as_page
from nnx_conformance.diff.record import RecordError, Run, read_run
from nnx_conformance.diff.recorder import Recorder, digest_rows, write_error
from nnx_conformance.diff.relations import Case, relation
from nnx_conformance.diff.report import as_dict, as_text
from nnx_conformance.diff.session import compare_records, note_ends
from nnx_conformance.diff.sides import Side, run_side, wait
from nnx_conformance.diff.statistics import measure, total
from nnx_conformance.diff.worker import run_job
from nnx_core.cli.schema import schema_of
from nnx_core.errors import OptionError, UnsupportedError

# Statistics.


def whole(tensor: Tensor) -> Any:
    return measure(tensor, Box.whole(tuple(tensor.shape)), tuple(tensor.shape))


@pytest.mark.parametrize("shape", [(), (7,), (6, 5), (4, 3, 2)])
def test_the_statistics_of_boxes_add_up_to_that_of_the_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    found = whole(tensor)
    if shape:
        parts = []
        for index in range(shape[0]):
            box = Box((index, *(0,) * (len(shape) - 1)), (1, *shape[1:]))
            parts.append(measure(tensor[box.slices], box, shape))
        assert total(parts).distance(found) < 1e-12
    assert found.norm == pytest.approx(float(tensor.double().norm()))


def test_a_sketch_sees_moved_elements_and_estimates_distances() -> None:
    tensor = torch.randn(40, 30)
    assert whole(tensor).distance(whole(tensor.roll(1, 0))) > 0.5 * float(tensor.norm())
    other = tensor + 1e-3 * torch.randn(40, 30)
    assert whole(tensor).distance(whole(other)) == pytest.approx(float((tensor - other).norm()), rel=0.6)
    assert whole(tensor).distance(whole(torch.full((40, 30), float("nan")))) == float("inf")


# Relations.

RIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SHARES = [RIGHT * 0.4 + 0.1 * RIGHT.roll(3, 0), RIGHT * 0.6 - 0.1 * RIGHT.roll(3, 0)]
CANDIDATES = {
    "share 0": SHARES[0],
    "share 1": SHARES[1],
    "before": RIGHT.roll(1, 1) ** 2,
    "stale": RIGHT.exp(),
}
WRONG: dict[str, tuple[Callable[[], Tensor], str]] = {
    "zero": (lambda: torch.zeros(8, 8), "zero"),
    "factor": (lambda: RIGHT * 2, "factor"),
    "half the rows": (lambda: torch.cat([RIGHT[:4] * 2, RIGHT[4:]]), "factor"),
    "missing": (lambda: SHARES[0] * 1.0, "missing sum"),
    "own": (lambda: SHARES[1] * 2, "missing sum"),
    "twice": (lambda: SHARES[0] * 2 + SHARES[1], "summed twice"),
    "kept": (lambda: RIGHT + CANDIDATES["before"], "kept"),
    "late": (lambda: CANDIDATES["before"], "stale"),
    "stale": (lambda: RIGHT.exp(), "stale weight"),
    "turned": (lambda: RIGHT.t().clone(), "transposed"),
    "rolled": (lambda: RIGHT.roll(4, 0), "wrong slice"),
    "masked": (lambda: RIGHT * (RIGHT > -0.5), "other mask"),
    "rounded": (lambda: RIGHT.bfloat16().double(), "precision"),
    "random": (lambda: torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).double(), ""),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_relation_of_a_wrong_tensor_is_named(name: str) -> None:
    make, kind = WRONG[name]
    found = relation(Case(RIGHT, make(), 1e-6, CANDIDATES, 2))
    assert (found.kind if found is not None else "") == kind


def test_factors_that_no_reduction_has_are_no_sum() -> None:
    found = relation(Case(RIGHT, 9.0 * SHARES[0] - 8.0 * SHARES[1], 1e-6, CANDIDATES, 2))
    assert found is None or found.kind != "summed twice"


def test_all_terms_of_another_sum_are_an_uneven_mean() -> None:
    found = relation(Case(RIGHT.roll(1, 1).abs(), RIGHT, 1e-6, {**CANDIDATES, "before": RIGHT**3}, 2))
    assert found is not None
    assert found.kind == "uneven mean"


# Records of a plain loop, in one process.


Change = Callable[[nn.Module, int], None]


def train(
    to: Path,
    *,
    change: Change = lambda model, step: None,
    begin: Change = lambda model, step: None,
    steps: int = 3,
) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    begin(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = nnx.record(model, optimizer, to=str(to))
    for step, batch in enumerate(recording.batches(list(torch.randn(3, 8, 4))[:steps])):
        optimizer.zero_grad()
        recording.loss(model(batch).square().mean()).backward()
        change(model, step)
        optimizer.step()


def double_in_step_1(model: nn.Module, step: int) -> None:
    if step == 1:
        for parameter in model.parameters():
            parameter.grad *= 2


def test_equal_loops_agree(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    result = compare_records(tmp_path / "a", tmp_path / "b")
    assert result.same
    assert "agree in 3 steps" in as_text(result)
    nnx.testing.assert_equal_runs(a=tmp_path / "a", b=tmp_path / "b")


def test_the_first_step_and_tensor_that_differ_are_named(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", change=double_in_step_1)
    result = compare_records(tmp_path / "a", tmp_path / "b")
    assert result.verdict is not None
    assert (result.verdict.step, result.verdict.tensor, result.verdict.where) == (1, "0.weight", "gradient")
    assert (result.verdict.kind, round(result.verdict.ratio, 5)) == ("factor N", 2.0)
    with pytest.raises(AssertionError, match=r"step 1, 0\.weight"):
        nnx.testing.assert_equal_runs(a=tmp_path / "a", b=tmp_path / "b")


def test_a_result_is_one_screen_json_of_its_schema_and_a_page_without_network(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    train(tmp_path / "a")
    train(tmp_path / "b", change=double_in_step_1)
    result = compare_records(tmp_path / "a", tmp_path / "b")
    jsonschema.validate(json.loads(json.dumps(as_dict(result))), schema_of("diff"))
    assert len(as_text(result).splitlines()) < 40
    page = as_page(result)
    assert "0.weight" in page
    assert "http" not in page


def test_a_dropped_gradient_is_named_without_a_second_run(tmp_path: Path) -> None:
    def forget(model: nn.Module, step: int) -> None:
        model[2].bias.grad = None  # type: ignore[index,union-attr]

    train(tmp_path / "a")
    train(tmp_path / "b", change=forget)
    verdict = compare_records(tmp_path / "a", tmp_path / "b").verdict
    assert verdict is not None
    assert (verdict.kind, verdict.tensor) == ("dropped gradient", "2.bias")


def test_a_run_that_dies_is_compared_as_far_as_it_went(tmp_path: Path) -> None:
    def fail(model: nn.Module, step: int) -> None:
        if step == 2:
            raise ZeroDivisionError

    train(tmp_path / "a")
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "b", change=fail)
    result = compare_records(tmp_path / "a", tmp_path / "b")
    assert (result.verdict, result.compared.steps) == (None, 2)


def test_the_first_error_of_all_ranks_is_that_of_a_run(tmp_path: Path) -> None:
    write_error(tmp_path, 1, OptionError("bad sample 17.", remedy="Remove it."))
    write_error(tmp_path, 0, RuntimeError("Connection closed by peer"))
    with pytest.raises(RecordError, match=r"recorded no step: OptionError: bad sample 17\. Remove it\.$"):
        read_run(tmp_path, "b")


def test_a_run_with_other_random_numbers_is_no_twin(tmp_path: Path) -> None:
    def add_noise(model: nn.Module, step: int) -> None:
        model[0].weight.data.add_(torch.randn(8, 4))  # type: ignore[index,union-attr,operator]

    train(tmp_path / "a")
    train(tmp_path / "b", begin=add_noise)
    a, b = (read_run(tmp_path / name, name) for name in "ab")
    assert why_no_twin(a, a) == ""
    assert why_no_twin(a, b).startswith("it differs by")


def test_models_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2, 2), "head": torch.zeros(1)}, tmp_path / "state.pt")
    job = Job(directory=str(tmp_path), capture=str(tmp_path))
    with pytest.raises(
        UnsupportedError, match=r"the models differ: head only in the first, bias only in the"
    ):
        load_state(job, nn.Linear(2, 2))


def test_a_directory_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="recorded no step"):
        read_run(tmp_path, "a")


# Records of two ranks that reduce nothing, in one process.


class Scored(nn.Module):
    """Returns its loss beside its output, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"loss": y.square().mean(), "y": y}


def record_ranks(to: Path, size: int) -> Run:
    for rank in range(size):
        torch.manual_seed(3)
        model, batch = nn.ModuleDict({"net": Scored()}), torch.randn(8, 4)
        facts = {"parameters": [name for name, _ in model.named_parameters()]}
        recorder = Recorder(to, PlainLayout(model), rank=(rank, size), share=(rank, size), facts=facts)
        share = share_of(batch, rank, size)
        recorder.begin_batch(share)
        loss = model["net"](share)["loss"]
        loss.backward()
        recorder.end_batch(float(loss.detach()))
        recorder.record_gradients("gradient")
        recorder.end_step([])
        recorder.close()
    return read_run(to, to.name)


def test_ranks_that_differ_from_each_other_do_not_differ_from_themselves(tmp_path: Path) -> None:
    a, b, again = (record_ranks(tmp_path / name, size) for name, size in (("a", 1), ("b", 2), ("c", 2)))
    assert Comparer(b, again, None, by_rank=True).compare().finding is None
    finding = Comparer(a, b, None).compare().finding
    assert finding is not None
    assert (finding.kind, finding.origin.name) == (
        "gradient",
        "net.layer.weight",
    )  # not net[loss] of each share


def test_buffers_are_those_that_the_hooks_after_a_step_leave(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    recorder = Recorder(tmp_path, PlainLayout(model), rank=(0, 1), share=(0, 1), outputs=False)
    for value in (3.0, 5.0):  # as on_train_batch_end would set it, the last step's too
        recorder.begin_batch(torch.ones(4, 2))
        recorder.end_batch(0.0)
        recorder.end_step([])
        model.running_mean.fill_(value)
    recorder.close()
    run = read_run(tmp_path, "run")
    norms = [run.entries(step, "buffer")["running_mean"].pieces[0].statistic.norm for step in (0, 1)]
    assert norms == pytest.approx([3 * 2**0.5, 5 * 2**0.5])


def record_losses(to: Path, losses: list[float]) -> None:
    for rank, loss in enumerate(losses):
        model, ranks = nn.Sequential(nn.Linear(2, 1, bias=False)), (rank, len(losses))
        nn.init.ones_(model[0].weight)
        recorder = Recorder(to, PlainLayout(model), rank=ranks, share=ranks)
        batch = torch.ones(4 // len(losses), 2)
        recorder.begin_batch(batch)
        model(batch)
        recorder.end_batch(loss)
        model[0].weight.grad = torch.tensor([[sum(losses) / len(losses), 1.0]])
        recorder.record_gradients("gradient")
        recorder.end_step([])
        recorder.close()


def test_a_rank_whose_loss_is_zero_is_named(tmp_path: Path) -> None:
    record_losses(tmp_path / "a", [2.0])
    record_losses(tmp_path / "b", [2.0, 0.0])
    verdict = compare_records(tmp_path / "a", tmp_path / "b").verdict
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("missing sum", (1,))
    assert "lacks the share of rank 1, whose loss is 0" in str(verdict)


# Processes.


def test_the_last_words_of_a_side_that_records_nothing_are_in_the_error(tmp_path: Path) -> None:
    job = Job(directory=str(tmp_path), capture="")
    with pytest.raises(RecordError, match=r"recorded no step: -m nnx_conformance\.diff\.worker"):
        run_side(Side.parse("@1", python="/bin/echo"), job, name="b", timeout=60)
    with pytest.raises(OptionError, match=r"there is no interpreter '\.venv2/bin/python'"):
        run_side(Side.parse("@1", python=".venv2/bin/python"), job, name="b", timeout=60)


def test_a_run_that_does_not_end_and_one_that_fails_are_no_equal_runs(tmp_path: Path) -> None:
    assert wait([subprocess.Popen(["sleep", "60"])], 0.1) == "rank 0: no end within 0.1 s"
    assert wait([subprocess.Popen(["sh", "-c", "exit 3"])], 60) == "rank 0: exit code 3"
    assert wait([subprocess.Popen(["true"])], 60) == ""
    train(tmp_path / "a")
    train(tmp_path / "b", steps=2)
    a, b = (read_run(tmp_path / name, name) for name in "ab")
    assert note_ends(a, b) == [
        "Run b ended early: the script ended after 2 steps, and the other side's after 3."
    ]
    assert b.error


# Scripts, in this process and on one rank.


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_is_recorded_without_a_changed_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPTS[kind], encoding="utf-8")
    for name, words in (("a", ()), ("b", ("again",))):
        job = Job(
            directory=str(tmp_path / name),
            capture=str(tmp_path / "captured"),
            captures=name == "a",
            script=str(script),
            words=words,
            strategy="" if kind == "plain" else "auto",
        )
        job.write(tmp_path / f"{name}.json")
        monkeypatch.setenv(VARIABLE, str(tmp_path / f"{name}.json"))
        run_job(job)
    a, b = (read_run(tmp_path / name, name) for name in "ab")
    compared = Comparer(a, b, None).compare()
    assert (a.finished, b.finished, compared.finding) == (3, 3, None)
    assert set(compared.table) >= {"weight", "output", "loss", "gradient", "update"}
    assert ("clipped" in compared.table) == (kind != "plain")


def test_a_script_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)", encoding="utf-8")
    job = Job(directory=str(tmp_path), capture=str(tmp_path), script=str(tmp_path / "train.py"))
    with pytest.raises(OptionError, match=r"ended without `Trainer.fit`"):
        run_job(job)
    with pytest.raises(OptionError, match="there is no script"):
        run_job(Job(directory="", capture="", script="absent.py"))


# Batches and sides.


def test_a_batch_is_divided_by_rows() -> None:
    batch = {"x": torch.arange(8).view(4, 2), "names": list("abcd"), "scale": torch.tensor(2.0)}
    shares = [share_of(batch, index, 2) for index in range(2)]
    assert torch.equal(torch.cat([share["x"] for share in shares]), batch["x"])
    assert [share["names"] for share in shares] == [["a", "b"], ["c", "d"]]
    rows = [row for share in shares for row in digest_rows([share["x"]])[1]]
    assert rows == digest_rows([batch["x"]])[1]


def test_a_batch_that_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(OptionError, match="a global batch of 3 samples cannot be divided by 2 ranks"):
        share_of(torch.zeros(3, 1), 0, 2)


def test_batches_beyond_the_memory_limit_are_refused(tmp_path: Path) -> None:
    job = Job(directory="", capture=str(tmp_path), captures=True, limit=100)
    with pytest.raises(OptionError, match=r"3 global batches have 192 bytes, and --memory allows 100"):
        job.capture_batches(lambda: [torch.zeros(4, 4)] * 9, accumulate=1)
    with pytest.raises(OptionError, match="have 0 batches"):
        job.capture_batches(lambda: [], accumulate=1)


def test_batches_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    job = Job(directory="", capture=str(tmp_path), captures=True)
    with pytest.raises(OptionError, match=r"a batch of type dict cannot be saved for the other runs: "):
        job.capture_batches(lambda: [{"x": torch.zeros(4), "change": lambda x: x}], accumulate=1)


@pytest.mark.parametrize("text", ["ddp@", "ddp@0", "@@", "ddp@2@3"])
def test_a_side_that_is_written_wrongly_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"is no side\. Write strategy@processes:precision"):
        Side.parse(text)


def test_a_side_has_a_twin_in_float64() -> None:
    assert str(Side.parse("fsdp_auto@2:bf16-mixed").twin) == "ddp@2:64-true"
    assert str(Side.parse("ddp").twin) == "auto@1:64-true"


# The command.


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    from nnx_checkpoint.cli.command import main

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["nnx", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        return int(caught.value.code or 0), printed.out, printed.err

    return run


def test_two_checkpoints_are_compared_with_the_relation_of_the_first_weight(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    left = {"a.weight": torch.ones(2, 3), "b.weight": torch.randn(3, 3)}
    torch.save({"state_dict": left}, tmp_path / "a.ckpt")
    torch.save({"state_dict": {**left, "b.weight": left["b.weight"].t()}}, tmp_path / "b.ckpt")
    code, printed, _ = command("diff", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt"))
    assert code == 1
    assert "First weight that differs: b.weight, which is transposed" in printed
    assert command("diff", str(tmp_path / "a.ckpt"), str(tmp_path / "a.ckpt"))[0] == 0


def test_one_checkpoint_alone_is_refused(command: Callable[..., Any], tmp_path: Path) -> None:
    code, _, error = command("diff", str(tmp_path / "a.ckpt"))
    assert code == 1
    assert "is compared with nothing" in error
