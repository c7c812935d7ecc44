"""What engines do around attention (ranks, adapters, caches elsewhere, drafts): a table of what works with
this backend, and servers that show it.
"""
