"""The operations that users call (attention, append, sampling, merging of states, selection), and their
binding to the host library. jit/ finds and compiles kernels.
"""
