"""The screens: each handles keys and draws rows on a canvas."""
