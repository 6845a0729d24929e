"""The order in which the suite runs its files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from longest_first import FILES, ROOT, ordered


def test_every_listed_file_exists() -> None:
    assert [name for name in FILES if not (ROOT / name).is_file()] == []
    assert len(set(FILES)) == len(FILES)


def test_listed_files_come_first_and_the_others_stay_as_they_are() -> None:
    names = ["b/test_y.py", FILES[1], "a/test_x.py", FILES[0], FILES[1]]
    items = [SimpleNamespace(path=ROOT / name) for name in names]
    found = [str(item.path.relative_to(ROOT)) for item in ordered(items)]
    assert found == [FILES[0], FILES[1], FILES[1], "b/test_y.py", "a/test_x.py"]


def test_the_suite_is_ordered_and_xdist_leaves_it_so(request: pytest.FixtureRequest) -> None:
    assert list(request.session.items) == ordered(request.session.items)
    assert not request.config.getoption("loadscopereorder", False)
