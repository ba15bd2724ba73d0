"""The batch planner for notebooks: `planner` has the widget, `model` computes what it shows, `html` draws it."""
