"""The smallest training with the callback: one process, both traces of steps 10 and 11."""

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_chakra import ChakraProfilerCallback

if __name__ == "__main__":
    callback = ChakraProfilerCallback("traces", collect_chakra=True)
    Trainer(max_steps=15, callbacks=[callback], logger=False, enable_checkpointing=False).fit(BoringModel())
    for trace in callback.traces:
        print(f"{trace.kind}: steps {trace.first_step}-{trace.last_step}, {trace.bytes} bytes, {trace.path}")
