"""The planning of a run: what would run, what it writes, how long it takes. No torch."""
