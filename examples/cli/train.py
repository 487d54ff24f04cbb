"""A LightningCLI application. The callback needs no code here: it is named in profile.yaml or on the command line.

python train.py fit --config profile.yaml
python train.py fit --config profile.yaml --trainer.callbacks.profile_ranks=0
"""

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

if __name__ == "__main__":
    LightningCLI(DemoModel, BoringDataModule, save_config_kwargs={"overwrite": True})
