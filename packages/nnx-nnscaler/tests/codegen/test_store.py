"""The folder of generated programs keeps complete files, and refuses others."""

import json
import threading

import pytest

from nnx_core.errors import PlanError
from nnx_nnscaler.compile.store import Entry, Store, key_of

MADE_FROM = {"fingerprint": "abc", "policy": "tp"}
KEY = key_of(MADE_FROM)
ENTRY = Entry(source="def forward(rt, m, w, c): ...\n", plan="{}", graph='{"é": 1}')


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, owner="package.Model", instance="first")


def test_what_was_written_is_read_again(store):
    path = store.write(KEY, ENTRY, MADE_FROM)
    assert store.read(KEY) == ENTRY
    assert path == store.path(KEY)
    assert path.read_text() == ENTRY.source


def test_nothing_was_written(store):
    assert store.read(KEY) is None
    assert store.find_graph({"fingerprint": "abc"}) is None


def test_the_folder_tells_class_instance_and_key(store, tmp_path):
    assert store.write(KEY, ENTRY, MADE_FROM) == tmp_path / "package.Model" / "first" / KEY / "forward.py"
    assert sorted(path.name for path in store.path(KEY).parent.iterdir()) == [
        "forward.py",
        "graph.json",
        "meta.json",
        "plan.json",
    ]
    meta = json.loads((store.path(KEY).parent / "meta.json").read_text())
    assert meta["made_from"] == MADE_FROM


def test_names_that_are_no_file_names_stay_apart(tmp_path):
    folders = {Store(tmp_path, owner=owner).folder for owner in ("f.<locals>.M", "f._locals_.M", "../M", "M")}
    assert len(folders) == 4
    assert all(folder.parent.parent == tmp_path for folder in folders)


def test_another_instance_has_a_folder_of_its_own(store, tmp_path):
    store.write(KEY, ENTRY, MADE_FROM)
    assert Store(tmp_path, owner="package.Model", instance="second").read(KEY) is None


def test_writing_again_replaces_and_leaves_nothing_behind(store):
    store.write(KEY, ENTRY, MADE_FROM)
    other = Entry(source="# other\n", plan="{}", graph="{}")
    store.write(KEY, other, MADE_FROM)
    assert store.read(KEY) == other
    assert [path.name for path in store.folder.iterdir()] == [KEY]


@pytest.mark.parametrize("file", ["forward.py", "plan.json", "graph.json"])
@pytest.mark.parametrize("damage", ["edited", "truncated", "missing", "binary"])
def test_a_changed_file_is_refused_by_name(store, file, damage):
    path = store.write(KEY, ENTRY, MADE_FROM).parent / file
    text = path.read_text()
    if damage == "missing":
        path.unlink()
    elif damage == "binary":
        path.write_bytes(b"\xff\xfe")
    else:
        path.write_text(text + "#" if damage == "edited" else text[:-1])
    reason = "was changed after" if damage in ("edited", "truncated") else "cannot be read"
    with pytest.raises(PlanError, match=f"cannot reuse .*{file}.*{reason}.*reuse='override'"):
        store.read(KEY)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 99}', "format is 99 instead of 1"),
        ('{"format": 1}', "lacks 'made_from'"),
        ('{"format": 1, "made_from": {"policy": "dp"}, "sha256": {}}', "another key"),
    ],
)
def test_a_foreign_or_broken_description_is_refused(store, text, reason):
    (store.write(KEY, ENTRY, MADE_FROM).parent / "meta.json").write_text(text)
    with pytest.raises(PlanError, match=reason):
        store.read(KEY)


def test_a_folder_copied_under_another_key_is_refused(store):
    folder = store.write(KEY, ENTRY, MADE_FROM).parent
    folder.rename(folder.with_name(key_of({"policy": "dp"})))
    with pytest.raises(PlanError, match="another key"):
        store.read(key_of({"policy": "dp"}))


def test_a_graph_is_found_under_any_policy_that_was_traced_from_the_same(store):
    store.write(KEY, ENTRY, MADE_FROM)
    assert store.find_graph({"fingerprint": "abc"}) == ENTRY.graph
    assert store.find_graph({"fingerprint": "other"}) is None


def test_a_broken_graph_is_refused(store):
    (store.write(KEY, ENTRY, MADE_FROM).parent / "graph.json").write_text("{}")
    with pytest.raises(PlanError, match=r"cannot reuse .*graph\.json"):
        store.find_graph({"fingerprint": "abc"})


def test_many_writers_and_readers_at_once_see_whole_programs_only(store):
    entries = [Entry(f"# {i}\n" * 200, f'{{"i": {i}}}', f'{{"i": {i}}}') for i in range(4)]
    problems, stop = [], threading.Event()

    def write(entry):
        try:
            for _ in range(15):
                store.write(KEY, entry, MADE_FROM)
        except Exception as error:
            problems.append(error)

    def read():
        while not stop.is_set():
            try:
                found = store.read(KEY)
            except Exception as error:
                problems.append(error)
            else:
                problems.extend([found] if found is not None and found not in entries else [])

    writers = [threading.Thread(target=write, args=(entry,)) for entry in entries]
    reader = threading.Thread(target=read)
    reader.start()
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    stop.set()
    reader.join(30)
    assert not problems
    assert store.read(KEY) in entries
    assert [path.name for path in store.folder.iterdir()] == [KEY]
