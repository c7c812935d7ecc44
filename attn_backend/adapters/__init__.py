"""Engine glue: the only code that imports an engine."""
