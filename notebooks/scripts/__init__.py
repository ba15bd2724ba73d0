"""What the notebooks import: checks of their exercises, and the tasks and loops that they look into."""
