import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("LIGHTNING_CHAKRA_TRACES", Path(__file__).parents[3] / "shared" / "traces"))

# Two ranks on this machine, as in docs/tools.md.
TRAINING = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_chakra import ChakraProfilerCallback

callback = ChakraProfilerCallback(sys.argv[1], wait=1, warmup=1, active=3, collect_chakra=True, collect_shapes=True)
trainer = Trainer(
    max_steps=6, accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback], logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(BoringModel())
"""


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """The folder of a training on two ranks with our callback: ``traces/`` in it holds the traces."""
    folder = tmp_path_factory.mktemp("two-ranks")
    script = folder / "train.py"
    script.write_text(TRAINING)
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "traces")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path[1:]])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def gpu_pair(tmp_path_factory):
    """A public pair of traces of an A100, laid out as ours: two runs of one program whose numbers all match."""
    kineto, chakra = SHARED / "hta" / "nccl_data.json.gz", SHARED / "param-et" / "resnet_1gpu_et.json.gz"
    if not kineto.exists() or not chakra.exists():
        pytest.skip(f"the public traces are not in {SHARED}")
    folder = tmp_path_factory.mktemp("gpu")
    for source, name in ((kineto, "pytorch_profile"), (chakra, "chakra")):
        target = folder / "traces" / name / "rank-0.json.gz"
        target.parent.mkdir(parents=True)
        target.write_bytes(source.read_bytes())
    return folder


@pytest.fixture(scope="session")
def plain_trace(two_ranks, tmp_path_factory):
    """The execution trace of rank 0, uncompressed."""
    path = tmp_path_factory.mktemp("plain") / "rank-0.json"
    path.write_bytes(gzip.decompress((two_ranks / "traces" / "chakra" / "rank-0.json.gz").read_bytes()))
    return path
