"""Training on several ranks: how they share the model."""
