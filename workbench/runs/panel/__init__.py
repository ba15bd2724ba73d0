"""Shows a run live in a notebook: `follow.py` reads what is new, `html.py` makes HTML of it, `panel.py` holds the widgets."""
