"""`python -m tests.hostile`: see `qa.hostile`."""

import sys

from qa.hostile.__main__ import main

sys.exit(main())
