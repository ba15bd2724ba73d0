"""Tables, axes, colours and HTML: how results, pictures and panels look."""
