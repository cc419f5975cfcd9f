"""How samples become a batch: the default rules, the functions to compose others from, nested structures.

Nothing here imports torch when it is imported: a worker process whose dataset needs no torch must not pay for it.
"""
