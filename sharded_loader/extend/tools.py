"""Checks, errors, texts, limits of the machine, files: what satellites use of `sharded_loader.base`.

For the library's own satellites: these names may change in any version. They stand in ``tools.pyi``.
"""

from sharded_loader import listed

__all__, __dir__, __getattr__ = listed(__name__, __file__)
