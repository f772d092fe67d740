"""`python -m benchmarks.faults`: see `qa.faults`."""

import sys

from qa.faults.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
