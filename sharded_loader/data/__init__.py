"""What is read and how samples become a batch: datasets, batchify, and the structures that batches have.

Nothing in this package imports torch when it is imported, because a worker process whose dataset needs no
torch must not pay for it (1 s and 150 MB each).
"""
