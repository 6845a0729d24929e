"""The example in four stages gives equal losses, and each block of the migration page works."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from jobs.lite_jobs import run_blocks, run_stage, stage
from nnx_conformance.pool import WorkerPool
from nnx_core.errors import NnxError
from nnx_lite import DeepSpeedPlugin, LightningLite
from nnx_test_helpers.repository import from_repository

PAGE = from_repository(__file__, "docs/migration/lightninglite.md")
STAGES = ("stage2_lite", "stage3_fabric", "stage4_trainer")
EPOCHS = 2
IMPORTS = {
    "from pytorch_lightning.lite import LightningLite": "from nnx.lite import LightningLite",
    "from pytorch_lightning.plugins import DeepSpeedPlugin": "from nnx.lite import DeepSpeedPlugin",
}


# --- four stages --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def losses_of_plain_pytorch() -> list[float]:
    return run_stage("stage1_plain", "auto", 1, EPOCHS)


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_gives_exactly_the_losses_of_plain_pytorch_on_one_process(
    losses_of_plain_pytorch: list[float], name: str
) -> None:
    assert losses_of_plain_pytorch[-1] < 0.5 * losses_of_plain_pytorch[0]
    assert run_stage(name, "auto", 1, EPOCHS) == losses_of_plain_pytorch


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_auto"])
@pytest.mark.parametrize("name", STAGES)
def test_each_stage_on_two_processes_gives_the_losses_of_one(
    pool: WorkerPool, losses_of_plain_pytorch: list[float], name: str, strategy: str
) -> None:
    for losses in pool.run(run_stage, name, strategy, 2, EPOCHS, world_size=2):
        assert losses == pytest.approx(losses_of_plain_pytorch, abs=1e-6)


# --- the migration page -------------------------------------------------------------------------------


def test_the_page_shows_what_the_stages_print(
    losses_of_plain_pytorch: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    stage("task").show(losses_of_plain_pytorch)
    shown = re.findall(r"^\$ python examples/lite/(\w+)\.py.*\n(.*)$", PAGE.read_text(), re.MULTILINE)
    line = capsys.readouterr().out.strip()
    assert shown == [(name, line) for name in ("stage1_plain", *STAGES)]


@dataclass(frozen=True)
class Block:
    """A piece of the page: its section, its line, and its code before and after (equal unless a diff)."""

    section: str
    line: int
    old: str
    new: str

    @property
    def place(self) -> str:
        return f"{PAGE.name}:{self.line}"


def read_page() -> list[Block]:
    blocks, section, language = [], "", None
    for number, line in enumerate(PAGE.read_text().splitlines(), start=1):
        fence = re.match(r"```(\w*)$", line)
        if fence and language is None:
            language, start, body = fence[1], number, []
        elif fence:
            if language in ("python", "diff"):
                blocks.append(Block(section, start, half(body, "-", language), half(body, "+", language)))
            language = None
        elif language is not None:
            body.append(line)
        elif line.startswith("## "):
            section = line[3:]
    return blocks


def half(lines: list[str], side: str, language: str) -> str:
    """The old or the new half of a difference; of other code, all of it."""
    if language == "python":
        return "\n".join(lines)
    return "\n".join(line[1:] for line in lines if not line or line[0] in (" ", side))


BLOCKS = read_page()


def calls_of(source: str) -> list[str]:
    """The flags of every Lite that is made, as they are written."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    lites = [node for node in found if isinstance(node.func, ast.Name) and node.func.id in LITES]
    return [", ".join(ast.unparse(keyword) for keyword in node.keywords) for node in lites]


LITES = ("Lite", "Collectives")
CALLS = [flags for block in BLOCKS for flags in calls_of(block.new) if "plugins" not in flags]
ABSENT = "'gpu'", "'tpu'", "gpus=", "tpu_cores="


def on_cpu(source: str) -> str:
    """Return the source with two CPU processes in place of devices that a test machine lacks."""
    for pattern, replacement in (
        (r"""accelerator=["'][gt]pu["']""", "accelerator='cpu'"),
        (r"num_nodes=32", "num_nodes=1"),
        (r"""\bdevices=(\[1, 4\]|["']1, 4["']|["']?-1["']?|8)""", "devices=2"),
        (r"gpus=\d", "devices=2"),
        (r"tpu_cores=8", "devices=2, accelerator='cpu'"),
    ):
        source = re.sub(pattern, replacement, source)
    return source


def make(flags: str) -> LightningLite:
    names = {"LightningLite": LightningLite, "DeepSpeedPlugin": DeepSpeedPlugin}
    return eval(f"LightningLite({flags})", names)


def test_the_imports_are_all_that_differs_and_the_table_names_each() -> None:
    changed = [block for block in BLOCKS if block.old != block.new]
    assert len(changed) == 5
    for block in changed:
        expected = block.old
        for old, new in IMPORTS.items():
            expected = expected.replace(old, new)
        assert block.new == expected, block.place
    for old, new in IMPORTS.items():
        assert f"| `{old}` | `{new}` |" in PAGE.read_text()


def test_the_blocks_of_the_page_run_in_order_on_two_processes(pool: WorkerPool, tmp_path: Path) -> None:
    runnable = [b for b in BLOCKS if b.section != "Flags" and "deepspeed" not in b.new]
    assert len(runnable) == len(BLOCKS) - 4
    code = [(block.place, on_cpu(block.new)) for block in runnable]
    first, second = pool.run(run_blocks, code, str(tmp_path), world_size=2)
    assert ("on rank 0 only" in first, "on rank 0 only" in second) == (True, False)
    assert (first.count("Train Loss: "), second.count("Train Loss: ")) == (1, 0)


@pytest.mark.parametrize("flags", CALLS)
def test_every_flag_of_the_page_is_taken(flags: str) -> None:
    if "deepspeed" in flags.lower():
        pytest.importorskip("deepspeed")
    lite = make(on_cpu(flags))
    assert isinstance(lite, LightningLite) and lite.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("flags", [flags for flags in CALLS if any(word in flags for word in ABSENT)])
def test_what_the_machine_has_not_is_said_before_any_process_starts(flags: str) -> None:
    if "DeepSpeedPlugin" in flags:
        pytest.importorskip("deepspeed")  # it says so itself
    with pytest.raises(NnxError, match="(?i)tpu" if "tpu" in flags else "(?i)gpu|cuda"):
        make(flags)


def test_the_page_shows_a_cluster_environment_that_lite_takes() -> None:
    block = next(block for block in BLOCKS if "MyCluster" in block.new)
    namespace = {"Lite": LightningLite}
    exec(block.new, namespace)
    environment = namespace["lite"].strategy.cluster_environment
    assert environment.main_port == 29500
    assert isinstance(environment.inner, namespace["MyCluster"])
