"""Tiny random models of each family that asks something of attention: served by both engines on a CPU, and
compared in float32 with transformers' own code.
"""
