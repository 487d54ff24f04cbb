"""Output folders behind fsspec URLs: a real S3 server on the loopback address, and memory."""

import gzip
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger

from lightning_chakra import ChakraProfilerCallback
from lightning_chakra.recording import storage
from lightning_chakra.recording.layout import RawTrace, RawWindow
from lightning_chakra.recording.writer import TraceWriter
from tests import harness, programs

moto_server = pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

PAIR = ["chakra/rank-0.json.gz", "pytorch_profile/rank-0.json.gz"]
SHORT = {"wait": 0, "warmup": 0, "active": 2, "collect_chakra": True}


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The environment in which s3fs finds the server."""
    running = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    running.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def bucket(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The URL of an empty bucket."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{abs(hash(request.node.nodeid)) % 10**12}"
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # each instance knows one server
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def memory() -> Iterator[str]:
    """The URL of an empty folder in memory."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield "memory://out"
    fs.store.clear()


def objects(url: str) -> list[str]:
    """Everything below ``url``, relative to it."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(path[len(root) :].lstrip("/") for path in fs.find(root))


def read(url: str) -> Any:
    with fsspec.open(url, "rb") as file:
        return json.loads(gzip.decompress(file.read()))


def told(recorded: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in recorded if w.category.__name__ == "ChakraProfilerWarning"]


def upload_by(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another function upload files to S3."""
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "_put_file", function)
    s3fs.S3FileSystem.clear_instance_cache()  # each instance binds it when it is made


def a_window(folder: Path, url: str) -> RawWindow:
    """A raw window of one complete Kineto file, meant for ``url``."""
    own = folder / "step-00000000"
    own.mkdir(parents=True)
    raw = own / "rank-0.json"
    raw.write_text(json.dumps({"traceEvents": [{"name": "x" * 40}] * 2000, "traceName": "rank-0.json"}))
    return RawWindow(0, 1, False, str(own), (RawTrace("kineto", str(raw), url),))


def test_a_training_publishes_to_s3_and_a_second_one_beside_it(bucket: str) -> None:
    for _ in range(2):
        programs.train({"dirpath": f"{bucket}/job", **SHORT}, model=programs.Model(4))
    assert objects(f"{bucket}/job") == sorted([*PAIR, *(f"run-1/{name}" for name in PAIR)])
    for name in objects(f"{bucket}/job"):
        assert read(f"{bucket}/job/{name}")


def test_ranks_agree_on_the_folder_in_s3(bucket: str, server: dict[str, str]) -> None:
    for _ in range(2):
        results = harness.run(
            programs.train,
            {"dirpath": f"{bucket}/job", "wait": 0, "warmup": 0},
            {"devices": 2, "strategy": "ddp"},
            ranks=2,
            env=server,
        )
        assert [result["offences"] for result in harness.succeed(results)] == [[], []]
    names = [f"pytorch_profile/rank-{rank}.json.gz" for rank in (0, 1)]
    assert objects(f"{bucket}/job") == sorted([*names, *(f"run-1/{name}" for name in names)])


def test_default_root_dir_in_s3(bucket: str) -> None:
    programs.train(SHORT, {"default_root_dir": f"{bucket}/root"}, programs.Model(4))
    assert objects(f"{bucket}/root") == PAIR


def test_the_folder_of_a_logger_in_s3(bucket: str) -> None:
    logger = CSVLogger(f"{bucket}/logs", name="name", version=0)
    programs.train(SHORT, {"logger": logger, "default_root_dir": f"{bucket}/root"}, programs.Model(4))
    assert set(PAIR) <= set(objects(f"{bucket}/logs/name/version_0"))


def test_memory(memory: str) -> None:
    for _ in range(2):
        programs.train({"dirpath": memory, "repeat": 2, **SHORT}, model=programs.Model(4))
    windows = [f"{step}/{name}" for step in ("step-00000000", "step-00000002") for name in PAIR]
    assert objects(memory) == sorted([*windows, *(f"run-1/{name}" for name in windows)])


def test_one_upload_for_each_file(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    calls: list[str] = []
    call = s3fs.S3FileSystem._call_s3

    async def counted(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        return await call(self, method, *args, **kwargs)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    writer = TraceWriter(lambda trace: None)
    writer.submit(a_window(tmp_path, f"{bucket}/rank-0.json.gz"))
    writer.close()
    assert writer.take_errors() == []
    assert [name for name in calls if name not in ("head_object", "list_objects_v2", "list_buckets")] == ["put_object"]
    assert objects(bucket) == ["rank-0.json.gz"]


def test_what_exists_in_the_store_is_not_overwritten(bucket: str, tmp_path: Path) -> None:
    fs, path = fsspec.core.url_to_fs(f"{bucket}/rank-0.json.gz")
    fs.pipe_file(path, b"earlier")
    writer = TraceWriter(lambda trace: None)
    window = a_window(tmp_path, f"{bucket}/rank-0.json.gz")
    writer.submit(window)
    writer.close()
    assert "exists" in writer.take_errors()[0].reason
    assert fs.cat_file(path) == b"earlier"
    assert os.path.exists(window.files[0].path)


def test_a_cut_upload_is_taken_back(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cut(self: Any, part: str, path: str, **kwargs: Any) -> None:
        await self._pipe_file(path, b"cut")

    upload_by(cut, monkeypatch)
    writer = TraceWriter(lambda trace: None)
    window = a_window(tmp_path, f"{bucket}/rank-0.json.gz")
    writer.submit(window)
    writer.close()
    assert "only 3 of" in writer.take_errors()[0].reason
    assert objects(bucket) == []
    assert sorted(os.listdir(window.folder)) == ["rank-0.json"]


def test_a_failing_upload_is_one_warning_and_the_raw_file_stays(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Any, part: str, path: str, **kwargs: Any) -> None:
        raise PermissionError("the store says no")

    upload_by(refuse, monkeypatch)
    scratch = tmp_path / "scratch"
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        options = {"dirpath": f"{bucket}/job", "scratch_dir": scratch, **SHORT, "collect_chakra": False}
        result = programs.train(options, model=programs.Model(4))
    assert result["batches"] == 4
    (message,) = told(recorded)
    (raw,) = scratch.rglob("rank-0.json")
    assert "the store says no" in message
    assert str(raw) in message
    assert json.loads(raw.read_text())["traceEvents"]
    assert objects(bucket) == []


def test_a_bucket_that_does_not_exist_is_one_warning_for_each_file(bucket: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        options = {"dirpath": "s3://no-such-bucket/job", "scratch_dir": tmp_path / "scratch", **SHORT}
        result = programs.train(options, model=programs.Model(4))
    assert result["batches"] == 4
    messages = told(recorded)
    assert sorted("pytorch_profile" in message for message in messages) == [False, True], messages
    assert all("was not published" in message for message in messages)


@pytest.mark.parametrize("url", ["nope://bucket/job", "s3://bucket/job"])
def test_an_impossible_protocol_is_told_at_setup(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if url.startswith("s3"):
        monkeypatch.setattr(fsspec, "get_filesystem_class", _without_s3fs)
    with pytest.raises(MisconfigurationException, match=f"cannot write to {url}.*(nope|[Ii]nstall s3fs)"):
        programs.train({"dirpath": url, **SHORT}, model=programs.Model(4))


def _without_s3fs(protocol: str) -> Any:
    raise ImportError("Install s3fs to access S3")


def test_an_impossible_protocol_ends_every_rank(tmp_path: Path) -> None:
    results = harness.run(
        programs.train, {"dirpath": "nope://job", **SHORT}, {"devices": 2, "strategy": "ddp"}, ranks=2, timeout=60
    )
    assert [(result.exitcode, "cannot write to nope://job" in result.err) for result in results] == [(1, True)] * 2


def test_local_paths_need_no_protocol(tmp_path: Path) -> None:
    storage.check(str(tmp_path))


def unreadable_on(rank: int, folder: str) -> dict[str, Any]:
    """A training in which one rank cannot read the output folder."""
    messages: list[str] = []
    if os.environ["LOCAL_RANK"] == str(rank):
        storage.entries = _refuse
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        result = programs.train_with(
            ChakraProfilerCallback(folder, wait=0, warmup=0, barrier_timeout=30), {"devices": 2, "strategy": "ddp"}
        )
        messages = told(recorded)
    return {**result, "messages": messages}


def _refuse(folder: str) -> list[str]:
    raise PermissionError(13, "Permission denied", folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_one_rank_cannot_read_stops_the_profiling_on_all(rank: int, out: Path) -> None:
    results = harness.succeed(harness.run(unreadable_on, rank, str(out), ranks=2, timeout=25))
    for result in results:
        assert (result["batches"], result["traces"], len(result["messages"])) == (14, [], 1)
    assert "Permission denied" in results[rank]["messages"][0]
    assert "another rank" in results[1 - rank]["messages"][0]
