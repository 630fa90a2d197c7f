"""One photo through one model, and a page of what can be seen of it."""
