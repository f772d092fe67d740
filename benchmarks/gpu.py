"""`python -m benchmarks.gpu`: see `qa.gpu`."""

import sys

from qa.gpu.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
