"""Adapters of the engines: the only code that imports an engine."""
