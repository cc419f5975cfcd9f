"""How samples become a batch: the functions to pass as ``ShardedDataLoader(batchify_fn=...)``.

>>> from sharded_loader.batchify import Pad, Stack, Tuple
>>> tokens, label = Tuple(Pad(pad_val=0), Stack())([([1, 2, 3], 0), ([4], 1)])
>>> tokens.tolist(), label.tolist()
([[1, 2, 3], [4, 0, 0]], [0, 1])
"""

from sharded_loader.batching.functions import Dict, List, NamedTuple, Stack, Tuple, default_batchify_fn
from sharded_loader.batching.pad import Pad

__all__ = ["Dict", "List", "NamedTuple", "Pad", "Stack", "Tuple", "default_batchify_fn"]
