"""The environment variable that adds the callback."""

from importlib.metadata import version
from typing import Any

import pytest
from lightning.pytorch import Trainer
from packaging.version import Version
from pytest_mock import MockerFixture

from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.autoload import VARIABLE, callbacks_for_pytorch_lightning, callbacks_from_environment
from lightning_chakra.recording.messages import ChakraProfilerWarning
from tests import harness


def _ours(trainer: Trainer) -> list[ChakraProfilerCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, ChakraProfilerCallback)]


def test_a_trainer_gets_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "profile_ranks=0-7:8 wait=50 collect_chakra=true dirpath='/a b'")
    (callback,) = _ours(Trainer(accelerator="cpu", logger=False))
    assert callback.settings.ranks == (range(0, 8, 8),)
    assert callback.schedule.wait == 50
    assert callback.collect_chakra
    assert callback.dirpath == "/a b"


@pytest.mark.parametrize("value", ["1", "true"])
def test_on_alone_takes_the_defaults(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    (callback,) = callbacks_from_environment()
    assert callback.schedule == ChakraProfilerCallback().schedule


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    assert _ours(Trainer(accelerator="cpu", logger=False)) == []


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("wiat=50", "cannot read 'wiat=50'.*wait"),
        ("wait", "cannot read 'wait'"),
        ("wait=3 active=2 wait=4", "`wait` is given twice"),
        ("wait=soon", "`wait` must be a number, not 'soon'"),
        ("collect_chakra=maybe", "`collect_chakra` must be true or false"),
        ("active=0", "active=0"),
        ("active=1.5", "`active` must be an integer"),
        ("profile_ranks=1-", "profile_ranks='1-'"),
        ("barrier_timeout=no", "barrier_timeout"),
        ("dirpath='a", "No closing quotation"),
    ],
)
def test_a_wrong_value_is_one_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, value: str, told: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=f"{VARIABLE}.*{told}") as caught:
        callbacks_from_environment()
    assert caught.value.__cause__ is None


def _modules_of_a_trainer() -> list[str]:
    import sys

    for name in [name for name in sys.modules if name.startswith("lightning_chakra")]:
        del sys.modules[name]
    Trainer(accelerator="cpu", logger=False)
    return sorted(name for name in sys.modules if name.startswith("lightning_chakra"))


def test_unset_imports_nothing_beyond_the_check() -> None:
    (modules,) = harness.succeed(harness.run(_modules_of_a_trainer))
    assert modules == ["lightning_chakra", "lightning_chakra._version", "lightning_chakra.autoload"]


def _pytorch_lightning_trainer() -> Any:
    import pytorch_lightning

    return [type(c).__name__ for c in pytorch_lightning.Trainer(accelerator="cpu", logger=False).callbacks]


@pytest.mark.skipif(
    Version(version("pytorch-lightning")) < Version("2.6"), reason="it takes no callback of lightning.pytorch"
)
def test_pytorch_lightning_asks_too() -> None:
    (names,) = harness.succeed(harness.run(_pytorch_lightning_trainer, env={VARIABLE: "1"}))
    assert "ChakraProfilerCallback" in names


def test_an_old_pytorch_lightning_gets_none(monkeypatch: pytest.MonkeyPatch, mocker: MockerFixture) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    mocker.patch("lightning_chakra.autoload.version", return_value="2.5.6")
    with pytest.warns(ChakraProfilerWarning, match="LIGHTNING_CHAKRA is set, and a Trainer of pytorch_lightning 2.5.6"):
        assert callbacks_for_pytorch_lightning() == []
    mocker.patch("lightning_chakra.autoload.version", return_value="2.10.0")
    assert len(callbacks_for_pytorch_lightning()) == 1
