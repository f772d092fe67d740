"""The report of a run: its record, collected in one pass and rendered as HTML or plain text."""
