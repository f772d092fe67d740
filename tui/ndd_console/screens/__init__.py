"""The screens: each turns keys into commands and values into rows on its canvas."""
