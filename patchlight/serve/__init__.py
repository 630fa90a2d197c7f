"""The page and its API: one process, on this machine, with the model loaded once."""
