"""The examples run, and write what they say."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.reading import check_pair, files

EXAMPLES = Path(__file__).parents[1] / "examples"


def _run_file(path: Path, arguments: list[str], folder: Path) -> None:
    """Run an example as ``python path arguments`` in ``folder`` does."""
    os.chdir(folder)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _run(name: str, *arguments: str, folder: Path, ranks: int = 1, **options: Any) -> str:
    results = harness.run(_run_file, EXAMPLES / name, list(arguments), folder, ranks=ranks, **options)
    harness.succeed(results)
    return results[0].out


def _pairs(*ranks: int) -> list[str]:
    return sorted(f"{kind}/rank-{rank}.json.gz" for kind in ("chakra", "pytorch_profile") for rank in ranks)


def test_boring(tmp_path: Path) -> None:
    out = _run("boring.py", folder=tmp_path)
    assert files(tmp_path) == [f"traces/{name}" for name in _pairs(0)]
    check_pair(tmp_path / "traces", 0, [10, 11])
    assert "kineto: steps 10-11" in out


def test_loop(tmp_path: Path) -> None:
    out = _run("loop.py", folder=tmp_path)
    assert files(tmp_path) == [f"traces/{name}" for name in _pairs(0)]
    check_pair(tmp_path / "traces", 0, [10, 11])
    assert "kineto: steps 10-11" in out


@pytest.mark.parametrize(
    ("arguments", "steps", "kinds"),
    [
        (["--config", str(EXAMPLES / "cli" / "profile.yaml")], [10, 11], ["chakra", "pytorch_profile"]),
        (
            ["--config", str(EXAMPLES / "cli" / "profile.yaml"), "--trainer.callbacks.wait=3"],
            [4, 5],
            ["chakra", "pytorch_profile"],
        ),
        (
            [
                "--trainer.max_steps=8",
                "--trainer.logger=false",
                "--trainer.enable_checkpointing=false",
                "--trainer.callbacks+=lightning_chakra.ChakraProfilerCallback",
                "--trainer.callbacks.dirpath=traces",
                "--trainer.callbacks.wait=2",
            ],
            [3, 4],
            ["pytorch_profile"],
        ),
    ],
    ids=["yaml", "yaml and override", "command line alone"],
)
def test_lightning_cli(arguments: list[str], steps: list[int], kinds: list[str], tmp_path: Path) -> None:
    profile = (EXAMPLES / "cli" / "profile.yaml").read_text(encoding="utf-8")
    assert 'profile_ranks: "0-7:8"' in profile  # of a machine with eight ranks; here is one
    config = tmp_path / "profile.yaml"
    config.write_text(profile.replace('"0-7:8"', '"0"'), encoding="utf-8")
    arguments = [str(config) if argument.endswith("profile.yaml") else argument for argument in arguments]
    _run("cli/train.py", "fit", "--trainer.accelerator=cpu", *arguments, folder=tmp_path)
    assert files(tmp_path / "traces") == [f"{kind}/rank-0.json.gz" for kind in kinds]
    if "chakra" in kinds:
        check_pair(tmp_path / "traces", 0, steps)


@pytest.mark.parametrize("name", ["transformer_ddp.py", "fsdp2.py"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    _run(name, "--output", "traces", folder=tmp_path, ranks=2)
    assert files(tmp_path) == [f"traces/{name}" for name in _pairs(0, 1)]
    for rank in range(2):
        kineto, _ = check_pair(tmp_path / "traces", rank, [10, 11])
        names = {event.get("name") for event in kineto["traceEvents"]}
        collective = "gloo:all_reduce" if name == "transformer_ddp.py" else "c10d::_allgather_base_"
        assert collective in names


SCRIPTS = sorted(EXAMPLES.glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_shellcheck(script: Path) -> None:
    assert os.access(script, os.X_OK)
    checker = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([checker, script], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


def _run_script(name: str, *arguments: str, folder: Path, **env: str) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    inherited = os.environ.get("PYTHONPATH", "")
    own = {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), inherited]), **env}
    own |= {"MASTER_PORT": str(harness.free_port()), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        ["bash", str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**clean, **own},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-6000:]


def test_two_nodes_on_loopback_under_torchrun(tmp_path: Path) -> None:
    _run_script("torchrun.sh", "--output", "traces", folder=tmp_path)
    assert files(tmp_path) == [f"traces/{name}" for name in _pairs(0, 1)]
    assert check_pair(tmp_path / "traces", 1, [10, 11])[0]["lightning_chakra"]["world_size"] == 2


# What srun does, by means of torchrun: a task for each rank of one machine, which finds itself in SLURM variables.
SRUN = """#!/usr/bin/env bash
set -euo pipefail
tasks=$SLURM_NTASKS_PER_NODE
while [[ $1 == --* ]]; do
    [[ $1 == --ntasks=* ]] && tasks=${1#--ntasks=}
    shift
done
export SLURM_NTASKS=$tasks
if ((tasks == 1)); then exec "$@"; fi
exec "$PYTHON" -m torch.distributed.run --nproc-per-node "$tasks" --no-python bash -c '
    export SLURM_PROCID=$RANK SLURM_LOCALID=$LOCAL_RANK SLURM_NODEID=0
    unset RANK LOCAL_RANK WORLD_SIZE GROUP_RANK TORCHELASTIC_RUN_ID
    exec "$@"' bash "$@"
"""


def test_the_body_of_the_slurm_script(tmp_path: Path) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN, encoding="utf-8")
    srun.chmod(0o755)
    scratch = tmp_path / "scratch"
    _run_script(
        "slurm.sh",
        folder=tmp_path,
        PATH=os.pathsep.join([str(srun.parent), os.environ["PATH"]]),
        SLURM_SUBMIT_DIR=str(EXAMPLES.parent),
        SLURM_JOB_ID="4711",
        SLURM_NNODES="1",
        SLURM_NTASKS_PER_NODE="2",
        ACCELERATOR="cpu",
        TRACES=str(tmp_path / "traces"),
        SCRATCH=str(scratch),
    )
    # one rank of the machine
    assert files(tmp_path / "traces") == _pairs(0)
    kineto, _ = check_pair(tmp_path / "traces", 0, [10, 11])
    assert kineto["lightning_chakra"]["world_size"] == 2
    assert list(scratch.iterdir()) == []
