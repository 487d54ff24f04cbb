"""A plain PyTorch loop, alone or under torchrun: both traces of steps 10 and 11.

python loop.py
torchrun --nproc-per-node 2 loop.py
"""

import os

import torch

from lightning_chakra import profile_window

if __name__ == "__main__":
    model: torch.nn.Module = torch.nn.Linear(32, 2)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_window("traces", collect_chakra=True) as window:
        for _ in range(15):
            model(torch.randn(4, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            window.step()
    for trace in window.traces:
        print(f"{trace.kind}: steps {trace.first_step}-{trace.last_step}, {trace.bytes} bytes, {trace.path}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
