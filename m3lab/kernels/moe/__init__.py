"""Stages 4 and 5: router, routing, experts."""
