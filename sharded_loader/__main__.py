"""``python -m sharded_loader`` is the command ``sharded-loader``."""

import sys

from sharded_loader.cli import main

if __name__ == "__main__":
    sys.exit(main())
