"""From a FlyDSL launcher to a Program, assembly and their figures, with no GPU."""
