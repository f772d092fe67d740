"""`python -m benchmarks.faults`: see `qa.faults`."""

import sys

from qa.faults.__main__ import main

sys.exit(main())
