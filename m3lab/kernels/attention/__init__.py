"""Stages 0 to 3: selection, split attention, merge, output projection."""
