"""Folders of photos: the runner, its results, and the page that shows them."""
