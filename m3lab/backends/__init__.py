"""Where a step is launched."""
