"""Every block of code in the documentation runs, or is in a table with the reason not to run it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import typer

import docs_table
from jobs import docs_jobs
from jobs.docs_blocks import LANGUAGES, PAGES, ROOT, Block, blocks_of, same_output, words
from nnx_checkpoint.cli.command import _application
from nnx_conformance.pool import JobError, WorkerPool

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES if blocks_of(page)]
DEFAULT = ("README.md", "docs/choosing.md")
"""Pages that README's test command runs; `nox -s full` runs all."""
SHOWN_ONLY = {
    command
    for block in BLOCKS
    if block.language in ("bash", "console")
    for command in block.commands()
    if command.startswith("nnx ") and docs_table.reason_not_to_run(block.page, command)
}
"""Commands of nnx that are not run; their options are parsed."""
TABLES = {"NOT_RUN": docs_table.NOT_RUN, "NOT_COMPARED": docs_table.NOT_COMPARED}


@pytest.fixture(scope="module")
def made(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that the pages name, as two ranks of `fsdp_auto` write them."""
    folder = tmp_path_factory.mktemp("made")
    pool.run(docs_jobs.make_checkpoints, str(folder), world_size=2)
    return folder


@pytest.mark.parametrize(
    "page", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in NAMES]
)
def test_every_block_of_a_page_runs(page: str, made: Path, pool: WorkerPool, tmp_path: Path) -> None:
    for module in docs_table.NEEDS.get(page, ()):
        pytest.importorskip(module, reason="see examples/requirements.txt")
    folder = tmp_path / "page"
    shutil.copytree(made, folder)
    pool.run(docs_jobs.run_page, page, str(folder), world_size=2, timeout=180)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_every_block_says_its_language(block: Block) -> None:
    assert block.language in LANGUAGES


@pytest.mark.parametrize(
    ("name", "entry"), [(name, entry) for name, table in TABLES.items() for entry in table]
)
def test_every_entry_of_the_tables_is_about_something_that_is_there(
    name: str, entry: docs_table.Entry
) -> None:
    page, start, reason = entry
    texts = [
        text
        for block in BLOCKS
        if page in ("*", block.page)
        for text in (block.commands() if block.language in ("bash", "console") else [block.text])
    ]
    assert any(line.startswith(start) for text in texts for line in text.splitlines())
    assert reason


def test_every_page_and_every_test_that_a_table_names_exist() -> None:
    for page, _, reason in [entry for table in TABLES.values() for entry in table]:
        assert page in ("*", *NAMES)
        for test in re.findall(r"[\w/-]+/test_\w+\.py", reason):
            assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), (page, test)


@pytest.mark.parametrize("command", sorted(SHOWN_ONLY))
def test_the_options_of_a_command_that_is_not_run_exist(command: str) -> None:
    arguments = words(command)[1:]
    parsed = typer.main.get_command(_application(arguments))
    while arguments and isinstance(getattr(parsed, "commands", None), dict):
        verb, *arguments = arguments
        parsed = parsed.commands[verb]
    parsed.make_context(command, arguments)


def test_every_prelude_belongs_to_a_page() -> None:
    pages = {name.removesuffix(".md").replace("/", "_").lower() for name in NAMES} | {"everywhere"}
    assert {file.stem for file in docs_jobs.PRELUDES.glob("*.py")} <= pages


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("```python\n1 / 0\n```", "ZeroDivisionError"),
        ("```python\nprint('a b')\n```\n\n```text\na c\n```", "shown, but not printed: a c"),
        ("```console\n$ nnx show fsdp_auto\nname: fsdp_manual\n```", "not printed: name: fsdp_manual"),
        ("```bash\nnnx show no_such_strategy\n```", "no_such_strategy"),
        ("```bash\nfalse\n```", "exit code 1"),
        ("```yaml\ntrainer: {strategy: no_such_strategy, max_epochs: many}\n```", "max_epochs"),
        ("```toml\n[a\n```", "TOMLDecodeError"),
    ],
)
def test_a_block_that_does_not_work_is_found(text: str, seen: str, pool: WorkerPool, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(JobError, match=r"(?s)page\.md:\d+.*" + seen):
        pool.run(docs_jobs.run_page, str(page), str(tmp_path), world_size=1)


@pytest.mark.parametrize(
    ("shown", "printed", "wrong"),
    [
        ("a 1.5 MB", "a  2,000 MB", ""),
        ("a\n...\nd", "a\nb\nc\nd", ""),
        ("a ... d", "a b c d", ""),
        ("a\nd", "a\nb\nd", "d"),
        ("a", "", "a"),
        ("a\n...\ne", "a\nb", "e"),
    ],
)
def test_outputs_are_compared_but_for_numbers_and_what_is_left_out(
    shown: str, printed: str, wrong: str
) -> None:
    assert same_output(shown, printed) == wrong
