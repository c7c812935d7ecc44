"""Engine features around attention (ranks, adapters, caches elsewhere, drafts): a table of those that work
with this backend, and servers that prove it.
"""
