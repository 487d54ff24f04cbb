"""Record two steps of a training that shards its parameters with FSDP2, on two CPU ranks (gloo) or on GPUs.

python fsdp2.py
python fsdp2.py --accelerator gpu --devices 8

The callback does not know how a model is sharded: nothing here differs from transformer_ddp.py but the strategy and
``configure_model``. The all-gathers and reduce-scatters of FSDP2 are in the traces.
"""

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from transformer_ddp import TinyTransformer, parse_arguments, train


class ShardedTransformer(TinyTransformer):
    """The same transformer; each encoder layer is gathered when it is used."""

    def configure_model(self) -> None:
        """Shard the parameters over the ranks of the data-parallel mesh."""
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.encoder.layers, self.embedding, self.head):
            fully_shard(module, mesh=mesh)


if __name__ == "__main__":
    options = parse_arguments(__doc__, "traces")
    strategy = ModelParallelStrategy(data_parallel_size=options.devices * options.nodes, tensor_parallel_size=1)
    for trace in train(ShardedTransformer(), options, strategy).traces:
        print(f"{trace.kind}: steps {trace.first_step}-{trace.last_step}, {trace.bytes} bytes, {trace.path}")
