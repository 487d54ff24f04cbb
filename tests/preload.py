"""What the server that forks test ranks has loaded."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning.pytorch  # noqa: F401
import torch.distributed
import torch.profiler  # noqa: F401

import lightning_chakra.callback  # noqa: F401
