"""The single-launch MiniMax-M3 decode layer as a workbench: build, run, verify, sweep, report."""
