"""Sweeps: a parameter file, the cases it names, running them, and the folder of what came out."""
