from pathlib import Path

import pytest

from tests.cli import captured


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good capture of two ranks, and plain torch.profiler's folder in ``plain``. Read-only."""
    return captured.record(tmp_path_factory.mktemp("recorded"))


@pytest.fixture
def capture(recorded: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return captured.copy(recorded, tmp_path / "capture")
