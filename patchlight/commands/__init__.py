"""The commands, a function each. torch is imported by those that need it alone, where they do."""
