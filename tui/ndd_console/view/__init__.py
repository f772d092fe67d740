"""What the screens show, as pure functions: a value and a size in, rows of styled text out."""
