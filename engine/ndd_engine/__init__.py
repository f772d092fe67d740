"""The library of ndd-console: trains, times, records. Imports no user interface."""

import warnings

__version__ = "0.4.0"

# torch says on first use that numpy is missing; nothing here needs it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
