"""Collation of samples into batches. Does not import torch, so that only workers whose dataset needs it pay for it."""
