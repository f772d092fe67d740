"""One optimizer step: precision, optimizer, timed parts, and the step as a CUDA graph."""
