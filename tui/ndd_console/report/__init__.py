"""A run's record as one page: collected in one pass, put into blocks, rendered as HTML or as plain text."""
