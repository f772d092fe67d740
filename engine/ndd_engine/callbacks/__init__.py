"""Callbacks for frameworks: `ndd_engine.callbacks.transformers` and `ndd_engine.callbacks.lightning`.

Each observes the training from its begin to its end, and records what the framework knows. They are not needed under
`ndd-console run`, which adds the same by itself.
"""
