"""What a model attended to, computed from its own forward pass, and what can be read from it."""
