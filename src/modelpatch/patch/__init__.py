"""Replace classes of a model while it is being built."""
