"""Measures a change against the present: paired blocks in processes of their own, the ladder, the claims."""
