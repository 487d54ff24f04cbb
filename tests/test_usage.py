"""Where the callback is used: strategies and launchers on real ranks, LightningCLI, and what the ranks say."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger

from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.recording import opening, storage
from tests import harness, programs
from tests.reading import check_pair, files, load

EARLY: dict[str, Any] = {"collect_chakra": True, "wait": 1, "warmup": 1}  # records steps 2 and 3
DDP: dict[str, Any] = {"devices": 2, "strategy": "ddp"}


def _pairs(*ranks: int) -> list[str]:
    return sorted(f"{kind}/rank-{rank}.json.gz" for kind in ("chakra", "pytorch_profile") for rank in ranks)


def _check(root: Path, strategy: str, ranks: tuple[int, ...] = (0, 1), world_size: int = 2) -> None:
    """Steps 2 and 3 of the given ranks and nothing else."""
    assert files(root) == _pairs(*ranks)
    for rank in ranks:
        kineto, _ = check_pair(root, rank, [2, 3])
        assert kineto["lightning_chakra"]["strategy"] == strategy
        assert kineto["lightning_chakra"]["world_size"] == kineto["distributedInfo"]["world_size"] == world_size


# Ranks and folders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "profiled"), [([1], [1]), ([], [0, 1]), ("0-1:2", [0]), ([0, 0], [0])])
def test_ranks_of_a_ddp_training(out: Path, ranks: list[int] | str, profiled: list[int]) -> None:
    callback = {"dirpath": out, "collect_chakra": True, "profile_ranks": ranks}
    results = harness.succeed(harness.run(programs.train, callback, DDP, ranks=2))
    assert [result["batches"] for result in results] == [14, 14]
    assert [result["offences"] for result in results] == [[], []]
    assert [len(result["traces"]) for result in results] == [2 * (rank in profiled) for rank in (0, 1)]
    assert files(out) == _pairs(*profiled)
    for rank in profiled:
        kineto, _ = check_pair(out, rank, [10, 11])
        assert kineto["lightning_chakra"]["profiled_ranks"] == profiled


@pytest.mark.parametrize("ranks", [[0, 2], "1-2"])
def test_a_rank_beyond_the_world_is_an_error_on_every_rank(out: Path, ranks: list[int] | str) -> None:
    results = harness.run(programs.train, {"dirpath": out, "profile_ranks": ranks}, DDP, ranks=2, timeout=60)
    for result in results:
        assert result.exitcode == 1
        assert "`profile_ranks` names rank 2, but this training has world_size=2" in result.err
    assert not out.exists()


def _train_on_own_disk(out: Path, disks: Path) -> dict[str, Any]:
    """What lies in the output folder is on a disk of each machine, under the same path."""
    entries = storage.entries
    disk = disks / os.environ["LOCAL_RANK"]
    opening.storage.entries = lambda path: entries(path.replace(str(out), str(disk)))
    return programs.train({"dirpath": out, **EARLY}, DDP, programs.Model(5))


def test_all_ranks_move_to_the_next_run_when_one_sees_earlier_traces(out: Path, tmp_path: Path) -> None:
    (tmp_path / "1" / "chakra").mkdir(parents=True)
    (tmp_path / "0" / "run-1" / "pytorch_profile").mkdir(parents=True)
    harness.succeed(harness.run(_train_on_own_disk, out, tmp_path, ranks=2))
    assert files(out) == sorted(f"run-2/{name}" for name in _pairs(0, 1))
    for rank in (0, 1):
        check_pair(out / "run-2", rank, [2, 3])


def _train_to_default_folder(root: Path, logger: bool) -> dict[str, Any]:
    trainer = {**DDP, "default_root_dir": root, "logger": CSVLogger(root, name="job") if logger else False}
    return programs.train({**EARLY, "profile_ranks": [1]}, trainer, programs.Model(5))


@pytest.mark.parametrize("logger", [True, False])
def test_some_ranks_write_to_the_default_folder(tmp_path: Path, logger: bool) -> None:
    results = harness.succeed(harness.run(_train_to_default_folder, tmp_path, logger, ranks=2, timeout=60))
    assert [result["batches"] for result in results] == [5, 5]
    root = tmp_path / "job" / "version_0" if logger else tmp_path
    assert [name for name in files(root) if name.endswith(".gz")] == _pairs(1)
    check_pair(root, 1, [2, 3])


def _two_fits(folder: Path) -> list[Any]:
    callback = ChakraProfilerCallback(folder, **EARLY)
    results = [programs.train_with(callback, DDP, programs.Model(5)) for _ in range(2)]
    return [result["offences"] for result in results]


def test_a_second_fit_on_two_ranks(out: Path) -> None:
    assert harness.succeed(harness.run(_two_fits, out, ranks=2)) == [[[], []]] * 2
    assert files(out) == sorted([*_pairs(0, 1), *(f"run-1/{name}" for name in _pairs(0, 1))])
    for rank in (0, 1):
        check_pair(out / "run-1", rank, [2, 3])


def test_accumulation_and_windows_on_two_ranks(out: Path) -> None:
    callback = {"dirpath": out, "collect_chakra": True, "wait": 0, "repeat": 2, "profile_ranks": [0]}
    trainer = {**DDP, "accumulate_grad_batches": 2, "max_epochs": 2}
    results = harness.succeed(harness.run(programs.train, callback, trainer, programs.Model(7), ranks=2))
    assert [result["batches"] for result in results] == [14, 14]
    assert files(out) == [f"step-0000000{first}/{name}" for first in (1, 4) for name in _pairs(0)]
    check_pair(out / "step-00000001", 0, [1, 2])
    check_pair(out / "step-00000004", 0, [4, 5])


# What the ranks say --------------------------------------------------------------------------------------------------


def test_two_lines_of_rank_zero_for_all_ranks_and_nothing_on_stdout(out: Path) -> None:
    callback = {"dirpath": out, **EARLY, "profile_ranks": [1]}
    results = harness.run(programs.train, callback, DDP, programs.Model(5), ranks=2)
    values = harness.succeed(results)
    lines = [[line for line in result.err.splitlines() if "lightning_chakra" in line] for result in results]
    size = sum(trace["bytes"] for trace in values[1]["traces"])
    assert lines[1] == []
    start, end = lines[0]
    assert start == (
        f"lightning_chakra: recording steps 2 to 3 on rank 1 of 2: Kineto traces and Chakra execution traces, to {out}"
    )
    assert end.startswith(f"lightning_chakra: wrote 2 traces, {size / 1000:.1f} kB, to {out}. Open those in ")
    # torch 2.9 itself tells there of each gloo group
    out_lines = [line for result in results for line in result.out.splitlines() if not line.startswith("[Gloo]")]
    assert out_lines == []


# Strategies and launchers --------------------------------------------------------------------------------------------


class Sharded(programs.Model):
    """A model that FSDP2 shards."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def _fsdp2(folder: Path) -> dict[str, Any]:
    from lightning.pytorch.strategies import ModelParallelStrategy

    trainer = {"devices": 2, "strategy": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)}
    result = programs.train({"dirpath": folder, **EARLY}, trainer, model := Sharded(5))
    return {**result, "sharded": type(model.layer.weight).__name__}


def test_fsdp2(out: Path) -> None:
    results = harness.succeed(harness.run(_fsdp2, out, ranks=2))
    assert [(result["sharded"], result["batches"], result["offences"]) for result in results] == [
        ("DTensor", 5, [])
    ] * 2
    _check(out, "ModelParallelStrategy")


def test_ddp_spawn(out: Path) -> None:
    options = {"devices": 2, "strategy": "ddp_spawn"}
    (result,) = harness.run(programs.train, {"dirpath": out, **EARLY}, options, programs.Model(5), timeout=240)
    # All ranks of this launcher are new processes; the one that called fit is none.
    assert harness.succeed([result])[0]["traces"] == []
    _check(out, "DDPStrategy")
    assert result.err.count("lightning_chakra: ") == 2


SCRIPT = """
import sys
from tests import programs
from lightning_chakra import ChakraProfilerCallback

if __name__ == "__main__":
    callback = ChakraProfilerCallback(sys.argv[1], collect_chakra=True, wait=1, warmup=1)
    trainer = dict(devices=int(sys.argv[2]), num_nodes=int(sys.argv[3]), strategy="ddp")
    print(programs.train_with(callback, trainer, programs.Model(5)))
"""


def _environment() -> dict[str, str]:
    root = str(harness.TESTS.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


def test_the_launcher_of_lightning(out: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, script, out, "2", "1"], env=_environment(), capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    _check(out, "DDPStrategy")
    assert ended.stdout.count("'batches': 5") == 2
    assert ended.stderr.count("lightning_chakra: ") == 2


def _torchrun(arguments: list[str]) -> None:
    """What `python -m torch.distributed.run` does on one node, without loading torch again for its agent."""
    from torch.distributed.run import main

    main([*arguments[:1], f"--node-rank={os.environ['NODE']}", *arguments[1:]])


def test_two_nodes_under_torchrun(out: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    arguments += [f"--master-port={harness.free_port()}", str(script), str(out), "1", "2"]
    nodes = [{"NODE": "0"}, {"NODE": "1"}]
    results = harness.run(_torchrun, arguments, ranks=2, env=_environment(), per_rank_env=nodes, timeout=240)
    harness.succeed(results)
    _check(out, "DDPStrategy")
    assert [result.err.count("lightning_chakra: ") for result in results] == [2, 0]


class ShardedByLightning(programs.Model):
    """Built under FSDP1."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=0.01)


def _fsdp1(folder: Path) -> dict[str, Any]:
    trainer = {"accelerator": "gpu", "devices": torch.cuda.device_count(), "strategy": "fsdp"}
    return programs.train({"dirpath": folder, **EARLY}, trainer, ShardedByLightning(5))


def _nccl(folder: Path) -> dict[str, Any]:
    trainer = {"accelerator": "gpu", "devices": torch.cuda.device_count(), "strategy": "ddp"}
    return programs.train({"dirpath": folder, **EARLY}, trainer, programs.Model(5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="FSDP1 and NCCL need a CUDA device")
@pytest.mark.parametrize(("program", "strategy"), [(_fsdp1, "FSDPStrategy"), (_nccl, "DDPStrategy")])
def test_fsdp1_and_nccl(out: Path, program: Any, strategy: str) -> None:
    ranks = torch.cuda.device_count()
    harness.succeed(harness.run(program, out, ranks=ranks, timeout=180, fresh=True))
    _check(out, strategy, tuple(range(ranks)), ranks)
    names = {event["name"] for event in load(out / "pytorch_profile" / "rank-0.json.gz")["traceEvents"]}
    assert any("nccl" in name for name in names) or ranks == 1


# LightningCLI --------------------------------------------------------------------------------------------------------

CLASS = "lightning_chakra.ChakraProfilerCallback"
TRAINER = [
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.max_epochs=1",
    "--trainer.limit_val_batches=0",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_model_summary=false",
    "--model.batches=5",
]


def _cli(folder: Path, *args: str) -> ChakraProfilerCallback:
    arguments = ["fit", f"--trainer.default_root_dir={folder}", *TRAINER, *args]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py"])  # LightningCLI warns when both are given
        cli = LightningCLI(programs.Model, args=arguments, seed_everything_default=False)
    cli.trainer.strategy.teardown()
    (callback,) = [c for c in cli.trainer.callbacks if isinstance(c, ChakraProfilerCallback)]
    return callback


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("0", (range(1),)),
        ("[0]", (range(1),)),
        ("[]", ()),
        ("0-0", (range(1),)),
        ("'0-0:8'", (range(0, 1, 8),)),
        ("'0'", (range(1),)),
        ("0,0", (range(1), range(1))),
    ],
)
def test_cli_from_yaml(out: Path, tmp_path: Path, text: str, ranges: tuple[range, ...]) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(
        f"""
trainer:
  callbacks:
    - class_path: {CLASS}
      init_args:
        dirpath: {out}
        profile_ranks: {text}
        collect_chakra: true
        wait: 1
        barrier_timeout: 60
"""
    )
    callback = _cli(tmp_path, f"--config={config}")
    assert callback.settings.ranks == ranges
    assert callback.barrier_timeout == 60
    _check(out, "SingleDeviceStrategy", (0,), 1)
    # what the run was configured with is saved, and can be read again
    (tmp_path / "config.yaml").rename(again := tmp_path / "again.yaml")
    assert _cli(tmp_path, f"--config={again}").settings.ranks == ranges
    assert files(out) == sorted([*_pairs(0), *(f"run-1/{name}" for name in _pairs(0))])


@pytest.mark.parametrize("name", [CLASS, "ChakraProfilerCallback"])
@pytest.mark.parametrize(("text", "ranges"), [("0", (range(1),)), ("[0]", (range(1),)), ("0-0:8", (range(0, 1, 8),))])
def test_cli_from_the_command_line(out: Path, tmp_path: Path, name: str, text: str, ranges: tuple[range, ...]) -> None:
    callback = _cli(
        tmp_path,
        f"--trainer.callbacks+={name}",
        f"--trainer.callbacks.dirpath={out}",
        f"--trainer.callbacks.profile_ranks={text}",
        "--trainer.callbacks.collect_chakra=true",
        "--trainer.callbacks.wait=1",
        "--trainer.callbacks.step_unit=batch",
    )
    assert callback.settings.ranks == ranges
    assert callback.step_unit == "batch"
    _check(out, "SingleDeviceStrategy", (0,), 1)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("colect_chakra: true", "colect_chakra"),
        ("wait: soon", "wait"),
        ("step_unit: epoch", "step_unit"),
        ("profile_ranks: {}", "profile_ranks"),
        ("profile_ranks: 1-", "cannot read '1-'"),
        ("active: 0", "`active=0` must be at least 1"),
    ],
)
def test_cli_tells_what_is_wrong(
    out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], lines: str, told: str
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(f"trainer:\n  callbacks:\n    - class_path: {CLASS}\n      init_args:\n        {lines}\n")
    with pytest.raises((SystemExit, ValueError)) as caught:
        _cli(out, f"--config={config}")
    assert told in capfd.readouterr().err + str(caught.value)
    assert not out.exists()


def test_cli_as_a_program(out: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from lightning.pytorch.cli import LightningCLI\n"
        "from tests.programs import Model\n"
        "if __name__ == '__main__':\n"
        "    LightningCLI(Model)\n"
    )
    callback = ["callbacks+=" + CLASS, f"callbacks.dirpath={out}", "callbacks.profile_ranks=0", "callbacks.wait=1"]
    arguments = ["fit", f"--trainer.default_root_dir={tmp_path}", *TRAINER, *(f"--trainer.{item}" for item in callback)]
    ended = subprocess.run(
        [sys.executable, script, *arguments, "--trainer.callbacks.collect_chakra=true"],
        env=_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    _check(out, "SingleDeviceStrategy", (0,), 1)


def test_the_callback_may_be_one_among_others(out: Path) -> None:
    result = programs.train({"dirpath": out, **EARLY}, {"callbacks": [pl.callbacks.Timer()]}, programs.Model(5))
    assert result["offences"] == []
    _check(out, "SingleDeviceStrategy", (0,), 1)
