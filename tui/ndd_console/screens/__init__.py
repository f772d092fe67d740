"""The screens: each has a table of keys, and shows rows in Textual's widgets; the live screen paints a canvas."""
