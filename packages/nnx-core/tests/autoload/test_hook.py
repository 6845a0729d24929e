"""The import hook alone, on pretend modules in place of Lightning's."""

import sys
import warnings

import pytest

import _nnx_autoload

FAKE = "fake_lightning_strategies"


@pytest.fixture
def hook(monkeypatch, tmp_path):
    """The hook with one pretend target, and its calls to register."""
    registered = []
    monkeypatch.setattr(_nnx_autoload, "TARGETS", (FAKE,))
    monkeypatch.setattr(_nnx_autoload, "failures", [])
    monkeypatch.setattr("nnx_core.lightning.registration.fill", registered.append)
    monkeypatch.setattr(
        sys, "meta_path", [entry for entry in sys.meta_path if entry is not _nnx_autoload._FINDER]
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{FAKE}.py").write_text("value = 1\n")
    yield registered
    sys.modules.pop(FAKE, None)


def test_a_module_is_registered_once_it_has_been_executed(hook):
    _nnx_autoload.install()
    assert hook == []
    module = __import__(FAKE)
    assert hook == [FAKE]
    assert module.value == 1
    assert "exec_module" not in vars(module.__loader__)


def test_a_module_that_is_there_already_is_registered_at_once_and_only_once(hook):
    __import__(FAKE)
    _nnx_autoload.install()
    _nnx_autoload.install()
    _nnx_autoload.autoload()
    assert hook == [FAKE]


def test_a_module_that_fails_to_import_is_registered_when_it_succeeds(hook, tmp_path):
    source = tmp_path / f"{FAKE}.py"
    source.write_text("raise RuntimeError('not yet')")
    _nnx_autoload.install()
    with pytest.raises(RuntimeError, match="not yet"):
        __import__(FAKE)
    assert hook == []
    source.write_text("value = 22222222\n")
    __import__(FAKE)
    assert hook == [FAKE]


@pytest.mark.parametrize("setting", ["0", "1", None])
def test_the_environment_decides_whether_import_torch_installs_it(hook, monkeypatch, setting):
    monkeypatch.delenv("NNX_AUTOLOAD", raising=False)
    if setting is not None:
        monkeypatch.setenv("NNX_AUTOLOAD", setting)
    _nnx_autoload.autoload()
    assert (_nnx_autoload._FINDER in sys.meta_path) == (setting != "0")


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(2)])
def test_a_failure_is_remembered_and_warned_about_but_never_raised(hook, monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr("nnx_core.lightning.registration.fill", fail)
    _nnx_autoload.install()
    with pytest.warns(
        UserWarning, match=f"nnx could not register its strategies in {FAKE}: .* Run `nnx doctor`"
    ):
        __import__(FAKE)
    assert _nnx_autoload.failures == [f"{FAKE}: {type(error).__name__}: {error}"]


def test_a_failure_is_not_raised_even_where_warnings_are_errors(hook, monkeypatch):
    monkeypatch.setattr("nnx_core.lightning.registration.fill", lambda name: 1 / 0)
    _nnx_autoload.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        __import__(FAKE)
    assert len(_nnx_autoload.failures) == 1


def test_a_loader_that_serves_several_modules_is_wrapped_for_the_target_only(hook):
    executed = []

    class Loader:
        def exec_module(self, module):
            executed.append(module.__name__)

    class Module:
        def __init__(self, name):
            self.__name__ = name

    loader = Loader()
    _nnx_autoload._call_after_execution(loader, FAKE)
    loader.exec_module(Module("neighbour"))
    assert hook == []
    loader.exec_module(Module(FAKE))
    loader.exec_module(Module("another"))
    assert hook == [FAKE]
    assert executed == ["neighbour", FAKE, "another"]


def test_a_loader_that_cannot_be_wrapped_still_loads_its_module(hook, monkeypatch):
    monkeypatch.setattr(_nnx_autoload, "_call_after_execution", lambda loader, name: loader.nonsense)
    _nnx_autoload.install()
    with pytest.warns(UserWarning, match="AttributeError"):
        assert __import__(FAKE).value == 1


def test_other_modules_are_none_of_its_business(hook):
    assert _nnx_autoload._FINDER.find_spec("json") is None
    assert _nnx_autoload._FINDER.find_spec("no_such_module_at_all") is None
