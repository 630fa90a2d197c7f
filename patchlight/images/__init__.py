"""From files to the model's input."""
