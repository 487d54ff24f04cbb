"""``python -m lightning_chakra.cli``."""

import sys

from lightning_chakra.cli import main

if __name__ == "__main__":
    sys.exit(main())
