"""Datasets, and how batches are made of samples: what satellites use of `data` and `batching`.

For the library's own satellites: these names may change in any version. They stand in ``data.pyi``.
"""

from sharded_loader import listed

__all__, __dir__, __getattr__ = listed(__name__, __file__)
