"""A loop over a loader inside `torch.compile`: Dynamo compiles neither the loader nor what the loader calls."""

import sys

import pytest
import torch
from conftest import METHODS

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.last


def hooks(index):
    """The number of a sample, and whether Dynamo's hook is set in the thread that reads it."""
    hook = sys.modules.get("torch._C._dynamo.eval_frame")
    if hook is None:
        return index, 0
    found = hook.set_eval_frame(None)
    hook.set_eval_frame(found)
    return index, int(found is not None)


HOOKS = SimpleDataset(range(12)).transform(hooks)


def total(loader):
    found = torch.zeros(2, dtype=torch.int64)
    for index, hooks in loader:
        found = found + torch.stack([index.sum(), hooks.sum()])
    return found


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield torch.compile(total, backend="eager")
    torch._dynamo.reset()


@METHODS
@pytest.mark.slow
@pytest.mark.parametrize("kind", [DataLoader, ShardedDataLoader])
def test_workers_have_no_hook(compiled, kind, method):
    by_method = {"num_workers": 1, "start_method": method}
    given = by_method if kind is DataLoader else {"pool": ProcessPool(1, start_method=method)}
    assert compiled(kind(HOOKS, 4, **given)).tolist() == [66, 0]


@pytest.mark.parametrize("kind", [DataLoader, ShardedDataLoader])
@pytest.mark.parametrize("given", [{}, {"num_workers": 2, "thread_pool": True}], ids=["inline", "threads"])
def test_what_the_loader_calls_is_not_compiled(compiled, kind, given):
    loader = kind(HOOKS, 4, **given)
    for _ in range(2):
        assert compiled(loader).tolist() == [66, 0]


@pytest.mark.parametrize("kind", [DataLoader, ShardedDataLoader])
def test_a_dataset_may_call_what_it_has_compiled(compiled, kind):
    graphs = []
    doubled = torch.compile(lambda x: 2 * x, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    data = SimpleDataset(range(12)).transform(lambda index: (doubled(torch.tensor(index)), 0))
    assert compiled(kind(data, 4)).tolist() == [132, 0]
    assert graphs or torch.__version__.startswith("2.4.")  # which leaves it uncompiled
