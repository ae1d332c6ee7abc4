"""`python -m jaxserve.offline`."""

import os
import sys

from jaxserve.offline.cli import EXIT_SIGNALLED, main

if __name__ == "__main__":
    code = main()
    if code > EXIT_SIGNALLED:
        # Everything is on disk. Threads that compile cannot be cancelled, and would hold the process for a minute.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
