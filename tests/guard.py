"""Fixtures of all tests; the guard polices the process after every one."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import preload  # noqa: F401  # sets OMP_NUM_THREADS before torch is loaded anywhere
from tests.police import offences

# Speed is not what the tests are about, and the machine may be busy.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")


# A shell that starts the tests in the background has them ignore Ctrl-C, which some are about.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _guard(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary folder of its own for each test, and nothing left in it or in the process afterwards."""
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert offences() == []


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The output folder of a test."""
    return tmp_path / "out"
