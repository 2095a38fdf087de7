"""Models as functions of (parameters, batch) and a table of their parameters."""
