"""`python -m benchmarks.gpu`: see `qa.gpu`."""

import sys

from qa.gpu.__main__ import main

sys.exit(main())
