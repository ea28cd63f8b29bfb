"""`python -m atoll`: the same as `atoll`."""

import sys

from atoll.cli.main import main

if __name__ == "__main__":  # workers import this module again
    sys.exit(main())
