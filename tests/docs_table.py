"""The blocks of the documentation that CI does not run, each with the reason; `test_docs_code` checks them.

An entry has the page (or `*`), the beginning of a command or of a line of the block (empty: the whole page),
and the reason. A test that is named in a reason has to know the page.
"""

from __future__ import annotations

Entry = tuple[str, str, str]

_CONFORMANCE = "takes a minute in processes of its own; its options are parsed, conformance tests run it"
_HF = "needs models of transformers; run by packages/nnx-checkpoint/tests/foreign/test_hf_docs.py"
_CKPT = "compared by packages/nnx-checkpoint/tests/cli/test_ckpt_docs.py"

NOT_RUN: list[Entry] = [
    ("*", "pip install nnx-", "installs; `nox -s wheels isolation` do that with what was built here"),
    ("*", "pip install packages/", "installs; `nox -s isolation` does that with wheels"),
    (
        "README.md",
        "python3 -m venv .venv",
        "makes an environment; held by tests/test_repository.py, run by CI",
    ),
    (
        "README.md",
        "nnx plan",
        "traces Llama 7B for half a minute; packages/nnx-core/tests/planning plan smaller models",
    ),
    ("*", "nnx conformance", _CONFORMANCE),
    (
        "docs/writing-a-backend.md",
        "",
        "makes an environment and a project in it; packages/nnx-core/tests/cli/test_new.py follows the page",
    ),
    (
        "docs/migration/lightninglite.md",
        "",
        "run in order, both halves of a difference, by packages/nnx-lite/tests/test_lite_examples.py",
    ),
    ("docs/checkpoints.md", "nnx ckpt", _CKPT),
    ("docs/hugging-face.md", "nnx ckpt", _HF),
    ("docs/hugging-face.md", "trainer = Trainer(", _HF),
    ("docs/hugging-face.md", "def maps():", _HF),
    ("docs/machines.md", "torchrun", "run on two nodes by tests/nodes/test_nodes.py"),
    ("docs/machines.md", "MASTER_ADDR=", "run on two nodes by tests/nodes/test_nodes.py"),
    (
        "docs/machines.md",
        "nnx run --on ray",
        "run on three raylets by packages/nnx-ray/tests/test_bad_input.py",
    ),
    (
        "docs/elastic.md",
        "nnx run --elastic",
        "starts groups; packages/nnx-torchft/tests start and kill some",
    ),
    ("packages/nnx-torchft/README.md", "nnx run --elastic", "starts groups; the package's tests start some"),
    (
        "docs/planning.md",
        "cd benchmarks",
        "plans a model of benchmarks/; packages/nnx-core/tests/planning plan others",
    ),
    (
        "docs/planning.md",
        "nnx plan plan_models:GPT",
        "plans a model of benchmarks/; packages/nnx-core/tests/planning plan others",
    ),
    ("docs/planning.md", "python benchmarks/plan_truth.py", "takes minutes; the page has its results"),
    ("docs/elastic.md", "python benchmarks/kill_ranks.py", "takes minutes; the page has its results"),
    (
        "docs/backends/hivemind.md",
        "class Line(",
        "trains for minutes; packages/nnx-hivemind/tests/test_swarm.py starts such peers",
    ),
    (
        "docs/backends/hivemind.md",
        "python train.py",
        "trains for minutes; packages/nnx-hivemind/tests/test_swarm.py starts such peers",
    ),
    (
        "docs/backends/hivemind.md",
        "PL_INITIAL_PEERS=",
        "joins a swarm; packages/nnx-hivemind/tests/test_swarm.py starts such peers",
    ),
    ("docs/machines.md", "ray start", "starts a cluster that stays; tests start theirs"),
    (
        "docs/memory-checkpoints.md",
        "nnx run",
        "restarts a script; packages/nnx-core/tests/lightning/test_memory_restarts.py does so",
    ),
    ("docs/memory-checkpoints.md", "TORCH_DISABLE", "run on nodes by tests/nodes/test_memory.py"),
    ("docs/recipes.md", "logger = WandbLogger(", "needs wandb; run by hand, with the module of the page"),
    (
        "docs/recipes.md",
        "logger = MLFlowLogger(",
        "needs mlflow-skinny; run by hand, with the module of the page",
    ),
    ("docs/start/index.md", "python3 -m venv", "makes an environment, as README's first command"),
    ("docs/start/index.md", ".venv/bin/pip", "installs, as README's first command"),
    ("docs/start/index.md", "source .venv", "changes the shell"),
    ("docs/start/first-run.md", "python examples/", "trains; tests/test_examples.py compares the page"),
    (
        "docs/start/first-run.md",
        "nnx ckpt",
        "looks at the checkpoint of a run; tests/test_examples.py makes one",
    ),
    ("docs/start/resume.md", "python examples/", "trains; tests/test_examples.py compares the page"),
    (
        "docs/start/choose.md",
        "nnx plan",
        "names a script; packages/nnx-core/tests/planning plan others",
    ),
    (
        "docs/gallery.md",
        "python examples/",
        "takes minutes; tests/test_examples.py runs gallery.md's in a small form",
    ),
    (
        "docs/index.md",
        "nnx plan",
        "traces Llama 7B for half a minute; packages/nnx-core/tests/planning plan others",
    ),
    ("docs/recipes.md", "srun python train.py", "needs a cluster; tests set SLURM's variables"),
    (
        "docs/command-line.md",
        "nnx ",
        "compared by packages/nnx-core/tests/cli/test_command_line_docs.py",
    ),
    ("docs/conformance.md", "report = run_conformance(", _CONFORMANCE),
    ("docs/conformance.md", "def steps_counted(", "would register a check with the suite of all later tests"),
]
"""Shell commands, and Python blocks."""

NEEDS = {"docs/start/your-model.md": ("sklearn",)}
"""Packages of examples/requirements.txt without which a page is skipped."""

NOT_COMPARED: list[Entry] = [
    ("docs/machines.md", "TorchTrainer(", "run by packages/nnx-ray/tests/test_ray_train.py"),
    ("docs/machines.md", "CheckpointError:", "an error that tests/nodes/test_nodes.py brings about"),
    ("docs/checkpoint-format.md", "last.ckpt/", "an overview of the files, which the page's reader opens"),
    ("docs/checkpoint-format.md", "{", "the first bytes of a manifest, which the page's reader checks"),
    ("docs/planning.md", "3,961,728 parameters", "printed for a model of benchmarks/"),
    (
        "docs/planning.md",
        "plan: predicted",
        "printed for a model of benchmarks/; tests/test_check_plan.py has others",
    ),
    (
        "docs/diff.md",
        "a  ddp@1: 3 steps",
        "printed for examples/train_padded.py, as tests/test_diff_runs.py checks",
    ),
    ("docs/diff.md", "nnx diff train.py", "command lines; the tests of nnx diff run others"),
    ("docs/guard.md", "              guard(tensor, part)", "a drawing of the states"),
    ("docs/lite.md", "self.save(", "one line of a loop beside one line of a module, both in test_lite_docs"),
]
"""Blocks of text, and the reasons not to compare them with the output of the block before them."""


def reason_not_to_run(page: str, code: str) -> str:
    """Return the reason not to run this command or block; empty if it is run."""
    return _reason(NOT_RUN, page, code)


def reason_not_to_compare(page: str, text: str) -> str:
    """Return the reason not to compare this output; empty if it is compared."""
    return _reason(NOT_COMPARED, page, text)


def _reason(table: list[Entry], page: str, text: str) -> str:
    lines = text.splitlines()
    found = (
        why
        for where, start, why in table
        if where in ("*", page) and any(line.startswith(start) for line in lines)
    )
    return next(found, "")
