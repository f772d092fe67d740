"""The built-in workloads: what is trained, on which data. This package itself imports without torch."""
