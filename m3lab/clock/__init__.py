"""Modelled time for an interpreted run."""
