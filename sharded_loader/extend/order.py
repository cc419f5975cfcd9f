"""Random numbers, tables, states, samplers of other libraries: what satellites use of `randomness` and `sampling`.

For the library's own satellites: these names may change in any version. They stand in ``order.pyi``.
"""

from sharded_loader import listed

__all__, __dir__, __getattr__ = listed(__name__, __file__)
