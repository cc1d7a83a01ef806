"""`python -m deepinfer` is the command `deepinfer`."""

import sys

from deepinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
