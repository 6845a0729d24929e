"""Every block of code in the documentation runs, or is in a table with the reason why it does not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import docs_table
from jobs import docs_jobs
from jobs.docs_blocks import LANGUAGES, PAGES, ROOT, Block, blocks_of, same_output
from nnx.testing.pool import JobError, WorkerPool

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES if blocks_of(page)]
TABLES = {"NOT_RUN": docs_table.NOT_RUN, "NOT_COMPARED": docs_table.NOT_COMPARED}


@pytest.fixture(scope="module")
def made(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that the pages name, as two ranks of `fsdp_auto` write them."""
    folder = tmp_path_factory.mktemp("made")
    pool.run(docs_jobs.make_checkpoints, str(folder), world_size=2)
    return folder


@pytest.mark.parametrize("page", NAMES)
def test_every_block_of_a_page_runs(page: str, made: Path, pool: WorkerPool, tmp_path: Path) -> None:
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


def test_every_page_that_the_table_names_exists() -> None:
    named = {page for table in TABLES.values() for page, _, _ in table} - {"*"}
    assert named <= set(NAMES)


def test_every_prelude_belongs_to_a_page() -> None:
    pages = {name.removesuffix(".md").replace("/", "_").lower() for name in NAMES} | {"everywhere"}
    assert {file.stem for file in docs_jobs.PRELUDES.glob("*.py")} <= pages


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
