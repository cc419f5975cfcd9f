"""A seeded transform seeds every object that it refers to, each with a key of its own."""

import functools
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sharded_loader import ConcatDataset, ShardedDataLoader, SimpleDataset, ThreadPool
from sharded_loader.base.errors import notes_of
from sharded_loader.data import seeding
from sharded_loader.data.seeding import owners, reachable
from sharded_loader.randomness.rng import SampleScope, reading


class Owns:
    """As a transform of albumentations."""

    def __init__(self):
        self.seeds = []

    def set_random_seed(self, seed):
        self.seeds.append(seed)

    def __call__(self, image=0):
        return image


class OwnsState(Owns):
    """As a transform of MONAI."""

    set_random_seed = None

    def set_random_state(self, seed=None, state=None):
        self.seeds.append((seed, state))
        return self


class Only32Bits(Owns):
    def set_random_seed(self, seed):
        np.random.RandomState(seed)
        super().set_random_seed(seed)


class SeedOnly(Owns):
    set_random_seed = None

    def set_random_state(self, seed):
        self.seeds.append(seed)


GLOBAL = Owns()


class Slotted:
    __slots__ = ("__hidden", "empty", "inner")

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, image):
        return self.inner(image)


class Holder(SimpleNamespace):
    def __call__(self, image):
        return image

    def method(self, image):
        return image


class OfClass:
    shared = Owns()

    def __call__(self, image):
        return self.shared(image)


class Calls:
    def __call__(self, image):
        return self.step(image)

    def step(self, image):
        return next(GLOBAL(one) for one in [image])


class InModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.aug = GLOBAL


class Delegates:
    """Asks its inner object for whatever it has not itself."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)


def decorated(function):
    @functools.wraps(function)
    def wrapper(image):
        return function(image)

    return wrapper


def by_global(image):
    return GLOBAL(image)


def by_function(image):
    return (lambda one: by_global(one))(image)


def by_default(image, *, aug=GLOBAL):
    return aug(image)


def of_closure(aug):
    return lambda image: aug(image)


@pytest.mark.parametrize(
    ("fn", "paths"),
    [
        (GLOBAL, ["fn"]),
        (by_global, ["fn.globals['GLOBAL']"]),
        (by_function, ["fn.globals['by_global'].globals['GLOBAL']"]),
        (by_default, ["fn.defaults['aug']"]),
        (decorated(by_global), ["fn.closure['function'].globals['GLOBAL']"]),
        (of_closure(GLOBAL), ["fn.closure['aug']"]),
        (functools.partial(by_default, aug=GLOBAL), ["fn.keywords['aug']"]),
        (functools.partial(GLOBAL), ["fn.func"]),
        (Holder(a=GLOBAL).method, ["fn.self.a"]),
        (GLOBAL.__call__, ["fn.self"]),
        (Holder(transforms=[Holder(transforms=(GLOBAL,))]), ["fn.transforms[0].transforms[0]"]),
        (Holder(by={"image": GLOBAL, 2: Owns()}), ["fn.by['image']", "fn.by[2]"]),
        (Slotted(GLOBAL), ["fn.inner"]),
        (OfClass(), ["fn.class.shared"]),
        (Calls(), ["fn.class.step.globals['GLOBAL']"]),
        (Delegates(GLOBAL), ["fn.inner"]),
        (torch.nn.Sequential(torch.nn.Identity(), InModule()), ["fn._modules['1'].aug"]),
        (Holder(model=torch.nn.Linear(2, 2), kind=Owns, module=random, texts=["a"] * 10), []),
        (lambda image: image.GLOBAL, []),
        (np.flip, []),
        (str, []),
    ],
)
def test_objects_are_found_wherever_a_transform_refers_to_them(fn, paths):
    assert [owner.path for owner in owners(fn)] == paths


def test_the_search_goes_nearest_first_and_ends_at_circles_and_its_bounds():
    circle = Holder(data=[[] for _ in range(10_000)], more=list(range(10**6)), z=GLOBAL)
    circle.self = circle
    assert [owner.path for owner in owners(circle)] == ["fn.z"]
    wide = Holder(**{f"a{number}": Holder(b=Holder()) for number in range(5000)}, aa=GLOBAL)
    assert len(owners(wide)) <= 1
    inner = [["far"]]
    root = [inner, {"a": inner}, [1]]

    def paths(**bounds):
        search = reachable(root, lambda obj: ((f"[{n}]", child) for n, child in enumerate(obj)), "x", **bounds)
        return [path for path, _ in search]

    assert paths() == ["x", "x[0]", "x[1]", "x[2]", "x[0][0]"]
    assert paths(deepest=1) == ["x", "x[0]", "x[1]", "x[2]"]
    assert paths(most=2) == ["x", "x[0]"]
    assert paths(deepest=0) == ["x"]


@pytest.fixture
def scope():
    reading.set(made := SampleScope(5, 2))
    made.index = 0
    yield made
    reading.set(None)


def test_each_object_gets_seeds_of_its_own_that_depend_on_the_sample_alone(scope):
    members = [Owns(), Owns()]
    dataset = SimpleDataset(range(4)).transform(Holder(members=members), seeded=True)
    for index in (0, 1, 0, 3):
        scope.index = index
        dataset[index]
    assert members[0].seeds[0] == members[0].seeds[2]
    assert len({*members[0].seeds, *members[1].seeds}) == 6
    assert all(0 <= seed < 2**63 for seed in members[0].seeds) and max(members[0].seeds) > 2**32


def within(inner):
    """A dataset of the user's around another."""
    methods = {"__len__": lambda self: len(self.inner), "__getitem__": lambda self, index: self.inner[index]}
    return type("Within", (SimpleNamespace,), methods)(inner=inner)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: one,
        lambda one: one.take(3),
        lambda one: ConcatDataset([SimpleDataset([1]), one]),
        lambda one: SimpleDataset(within(one)),
    ],
)
def test_no_two_transforms_seed_an_object_with_the_same(scope, wrap):
    own = Owns()
    dataset = wrap(wrap(SimpleDataset(range(4)).transform(own, seeded=True)).transform(own, seeded=True))
    dataset = dataset.transform(own, seeded=True)
    dataset[len(dataset) - 1]
    assert len(set(own.seeds)) == len(own.seeds) == 3


@pytest.mark.parametrize("kind", [Only32Bits, SeedOnly, OwnsState])
def test_a_method_gets_what_it_takes_a_large_seed_a_small_one_or_a_state(scope, kind):
    own = kind()
    dataset = SimpleDataset(range(4)).transform(own, seeded=True)
    for index in range(4):
        scope.index = index
        dataset[index]
    assert len(set(own.seeds)) == 4
    if kind is OwnsState:
        assert all(seed is None and isinstance(state, np.random.RandomState) for seed, state in own.seeds)


def test_outside_a_loader_and_without_seeded_nothing_is_seeded(scope):
    own = Owns()
    pairs = SimpleDataset([(1, 2), (3, 4)])
    pairs.transform_first(own)[0]
    assert not own.seeds
    pairs.transform_first(own, seeded=True)[1]
    assert len(own.seeds) == 1
    reading.set(None)
    pairs.transform_first(own, seeded=True)[0]
    assert len(own.seeds) == 1


def test_objects_are_searched_once_per_batch_and_one_that_cannot_be_seeded_is_named(monkeypatch):
    class Broken(Owns):
        def set_random_seed(self, seed):
            raise RuntimeError("no seed")

    loader = ShardedDataLoader(SimpleDataset(range(4)).transform(Holder(a=[Broken()]), seeded=True), 2)
    with pytest.raises(RuntimeError, match="no seed") as caught:
        next(iter(loader))
    assert "raised while transform(fn, seeded=True) seeded fn.a[0]" in notes_of(caught.value)
    searched = []
    monkeypatch.setattr(seeding, "owners", lambda fn: searched.append(fn) or owners(fn))
    list(ShardedDataLoader(SimpleDataset(range(12)).transform(Owns(), seeded=True), 4))
    assert len(searched) == 3


def test_threads_use_a_shared_object_one_at_a_time():
    class Overlapping(Owns):
        inside = 0
        most = 0
        # A thread that is let in while another is inside says so. None is, so each waits in vain for a moment.
        second = threading.Event()

        def set_random_seed(self, seed):
            Overlapping.inside += 1
            Overlapping.most = max(Overlapping.most, Overlapping.inside)
            if Overlapping.inside > 1:
                self.second.set()

        def __call__(self, image=0):
            self.second.wait(0.02)
            Overlapping.inside -= 1
            return image

    dataset = SimpleDataset(range(12)).transform(Overlapping(), seeded=True)
    with ShardedDataLoader(dataset, 2, pool=ThreadPool(3)) as loader:
        assert sorted(value for batch in loader for value in batch.tolist()) == list(range(12))
    assert Overlapping.most == 1
