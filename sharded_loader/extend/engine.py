"""The part of the seam for messages, pools, memory, devices, streams and the loader itself.

For the library's own satellites: these names may change in any version. They stand in ``engine.pyi``.
"""

from sharded_loader import listed

__all__, __dir__, __getattr__ = listed(__name__, __file__)
