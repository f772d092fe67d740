"""`python3 -m benchmarks.gpu.setup VENV [options]`: see `qa.gpu.setup`."""

import sys

from qa.gpu.setup import main

sys.exit(main(sys.argv[1:]))
