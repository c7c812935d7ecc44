"""Tiny random models of each family with special attention needs: both engines serve them on a CPU, and
float32 answers are compared with transformers' own code.
"""
