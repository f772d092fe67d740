"""`python -m tests.hostile`: see `qa.hostile.attempts`."""

import sys

from qa.hostile.attempts import main

sys.exit(main())
