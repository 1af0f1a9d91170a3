"""Measurements of the data plane on the machine where they run: `headrace bench`."""
