"""`python -m jaxserve.offline`."""

import sys

from jaxserve.offline.cli import main

if __name__ == "__main__":
    sys.exit(main())
