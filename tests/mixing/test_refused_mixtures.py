"""What cannot be mixed, shuffled or cut into windows is refused in words, where it is given."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from samples import NoLength
from stream_samples import Parts
from torch.utils.data import IterableDataset, Subset

from sharded_loader import ArrayDataset, ShardedDataLoader, ShuffleBuffer, TokenWindows, interleave
from sharded_loader.mixing.schedule import MOST, whole_numbers

TEN = [[(number, index) for index in range(10)] for number in range(2)]


def mixed(**arguments):
    return interleave(TEN, **arguments)


def read(datasets, **arguments):
    return list(interleave(datasets, **arguments))


def planned(weights=(3, 2, 1), **more):
    return ShardedDataLoader(interleave([range(50), range(9), range(17)], list(weights), 5, 96, True), 12, **more)


def windows(tokens, length=2, **more):
    return TokenWindows(tokens, length, **more)


def buffered(change, length=20):
    samples = iter(ShuffleBuffer(lambda: iter(range(20)), 4))
    next(samples)
    other = iter(ShuffleBuffer(lambda: iter(range(length)), 4))
    return other.load_state_dict({**samples.state_dict(), **change})


class NoIndex(IterableDataset):
    """Iterable data."""

    def __iter__(self):
        return iter("ab")


class OnlyItems:
    def __getitem__(self, index):
        return index


def schedule(*changes):
    return partial(mixed, weights=list(changes))


NINE, ONES = np.arange(9), [1, 1]
ONCE = partial(next, itertools.cycle([iter([1, 2])]))
BLOCK = {"block": 2, "source": {"pass": 0, "taken": 8}}
REFUSED = [
    # datasets
    (lambda: interleave([]), ValueError, "was given no datasets: give at least one"),
    *(
        (partial(interleave, one), TypeError, f"needs a list of datasets, not an? {type(one).__name__}")
        for one in (
            *(5, "ab", {"a": [1]}, np.zeros((2, 2)), torch.zeros(2, 2), ArrayDataset([1])),
            *(NoIndex(), interleave([NoLength([])])),
        )
    ),
    (lambda: interleave([[1], NoIndex]), TypeError, r"\[1\] is the class NoIndex itself: give an object of it"),
    (lambda: interleave([[1], "name"]), TypeError, r"datasets\[1\] is a str, not a dataset: give what it names"),
    (lambda: interleave([[1], iter([1])]), TypeError, r"\[1\] is a list_iterator.*once: give a function that makes a"),
    (lambda: interleave([(n for n in [1])]), TypeError, "a generator, which can be read only once.*begins again"),
    (lambda: interleave([{1}]), TypeError, r"datasets\[0\] is a set, whose order is not defined: give sorted\("),
    *((partial(interleave, [one]), TypeError, "which cannot be read: give") for one in (object(), OnlyItems())),
    (lambda: interleave([[1], []]), ValueError, r"datasets\[1\], a list, gave no samples: leave it out, or give it"),
    *(
        (partial(read, [NoLength([1]), NoLength([])], stop=stop), ValueError, r"\[1\], a NoLength, gave no samples")
        for stop in ("first_exhausted", "all_exhausted")
    ),
    (partial(read, [range(9), ONCE], stop="all_exhausted"), ValueError, "gave no samples: .*read again"),
    # arguments
    (lambda: mixed(stop="never"), ValueError, 'stop=\'never\'.: give "first_exhausted", "all_exhausted" or "each'),
    *(
        (partial(mixed, stop=stop), ValueError, r"give .* or the number of samples of the mixture")
        for stop in (0, True)
    ),
    *((partial(mixed, seed=seed), TypeError, f"seed must be an integer, got {seed}") for seed in (1.5, None)),
    (lambda: mixed(shuffle="yes"), TypeError, r"shuffle='yes'\): give True or False"),
    (lambda: mixed(weigths=ONES), TypeError, r"interleave has no argument 'weigths'; did you mean 'weights'\?"),
    *(
        (partial(interleave, [[1], NoLength([2])], **more), TypeError, "a NoLength, is read in its own order only. ")
        for more in ({"shuffle": True}, {"weights": [(0, ONES), (5, [2, 1])], "stop": "each_once"})
    ),
    *((partial(whole_numbers, n * [1], 3), ValueError, f"{n} weights for 3 datasets: give one") for n in (0, 2)),
    *(
        (partial(whole_numbers, weights, 3), ValueError, "give a list of finite numbers of 0 or more")
        for weights in ([1, -1, 1], [1, math.nan, 1], [1, math.inf, 1], [1, None, 1], "123", 5)
    ),
    pytest.param(
        partial(whole_numbers, None, MOST + 1), ValueError, "65,537 .*: give .* at most", marks=pytest.mark.slow
    ),
    (lambda: whole_numbers([0, 0.0, 0], 3), ValueError, "0 datasets have a weight above 0: give at least one"),
    (lambda: interleave([[1]] * 501, stop="each_once"), ValueError, "501 datasets, .*: give up to 500, or join"),
    # schedules
    (schedule((5, ONES)), ValueError, r"weights\[0\] begins at sample 5, and is the first one: a schedule"),
    (schedule((0, ONES), (9, [1, 0]), (3, ONES)), ValueError, r"\[2\] begins at sample 3, after 9: .*back"),
    (schedule((0, ONES), (0, [1, 0])), ValueError, r"weights\[1\] begins at sample 0, after 0"),
    (schedule((0, ONES), (9, [0, 0])), ValueError, "0 datasets have a weight above 0 from sample 9 on: give"),
    (schedule((0, ONES), (9, [1])), ValueError, "1 weights for 2 datasets"),
    (schedule((0, ONES), 5), ValueError, r"weights\[1\] is 5: in a schedule, give pairs \(sample, weights\)"),
    (schedule((0, ONES), (1.5, ONES)), ValueError, r"weights\[1\] is \(1.5, \[1, 1\]\): in a schedule"),
    (schedule((0, ONES), (2**62, ONES)), ValueError, r"weights\[1\] begins at sample 4611686018427387904"),
    (
        lambda: mixed(weights=[(0, ONES), (2, [1, 0])], stop="all_exhausted"),
        ValueError,
        r"datasets\[1\] has the weight 0 at the end of the schedule, before its last sample was read",
    ),
    (
        lambda: mixed(weights=[(0, [1, 0]), (50, [0, 1])], stop="each_once"),
        ValueError,
        r"at sample 10, only datasets with the weight 0 have samples left, such as datasets\[1\]: give it a weight",
    ),
    # buffers
    (lambda: ShuffleBuffer(iter("abc"), 2), TypeError, "can be read only once"),
    (lambda: ShuffleBuffer("abc", 2), TypeError, "ShuffleBuffer: the dataset is a str, not a dataset"),
    (lambda: ShuffleBuffer(Parts, 2), TypeError, "is the class Parts itself"),
    (lambda: ShuffleBuffer(Parts(), 0), ValueError, "size must be at least 1"),
    (lambda: buffered({"size": 5}), ValueError, "size was 5, and is 4"),
    (lambda: buffered({"seed": 5}), ValueError, "seed was 5, and is 0"),
    (lambda: buffered({"given": -1}), ValueError, "'given' must be at least 0"),
    (lambda: buffered({"given": 3, **BLOCK}, 9), ValueError, "fewer samples"),
    (lambda: buffered({"given": 13}, 12), ValueError, "fewer samples"),
    (lambda: buffered(BLOCK, 7), ValueError, "ShuffleBuffer: the dataset"),
    (lambda: iter(ShuffleBuffer(Parts(), 2)).load_state_dict(None), TypeError, "must be a dict"),
    (lambda: len(ShuffleBuffer(Parts(), 2)), TypeError, "has no len"),
    (lambda: ShardedDataLoader(Parts(), 2, shuffle=True), ValueError, "ShuffleBuffer"),
    # token windows
    (lambda: windows(NINE, 0), ValueError, "length must be at least 1, got 0"),
    (lambda: windows(NINE, 4, stride=0), ValueError, "stride must be at least 1, got 0"),
    (lambda: windows(NINE, 4, stried=2), TypeError, "did you mean 'stride'"),
    *((partial(windows, np.arange(n), n), ValueError, f"only {n} tokens; a window needs {n + 1}") for n in (9, 1)),
    (lambda: windows(np.zeros((3, 3), np.int32)), ValueError, r"shape \(3, 3\): give one dimension"),
    (lambda: windows(np.zeros(9, np.float32)), TypeError, "is of float32: token ids are uint16"),
    (lambda: windows(np.zeros(9, np.int32), dtype="uint16"), ValueError, "is of int32, and dtype='uint16'"),
    (lambda: windows([]), ValueError, "0 files"),
    *((partial(windows, tokens), TypeError, "give a path") for tokens in ([1, 2, 3], None)),
    (lambda: windows(NINE, documents=[4, 4]), ValueError, "have 8 tokens, and the array of 9 tokens has 9"),
    *(
        (partial(windows, NINE, documents=documents), ValueError, "flat list of lengths|have 0 tokens")
        for documents in (True, [10, -1], [4.5, 4.5], [], 9)
    ),
    (lambda: windows(NINE, 8, documents=[4, 5]), ValueError, "no document that is long enough"),
    *((partial(windows, [NINE] * 2, documents=one), ValueError, "2 files and documents of 1") for one in ([[9]], 9)),
    (lambda: windows(NINE, vocab_size=2), ValueError, "token id 2, and vocab_size is 2"),
    (lambda: windows(np.array([3, -1, 2]), vocab_size=9), ValueError, "token id -1"),
    (lambda: windows(np.zeros(9, np.uint16), vocab_size=70_000), ValueError, "uint16, too small for vocab_size"),
    # weights that are set
    *(
        (
            partial(ShardedDataLoader(dataset, 4, **more).set_weights, [1, 1, 1]),
            TypeError,
            "set_weights needs what interleave",
        )
        for dataset, more in (
            (range(9), {}),
            (interleave([range(9)] * 3), {}),  # of fixed weights
            (interleave([range(9)] * 3, stop=20, shuffle=True), {"shuffle": True}),
            (Subset(interleave([range(9)] * 3, stop=20, shuffle=True), range(20)), {}),
            (interleave([range(9)] * 3, stop=20, shuffle=True).take(20), {}),
            (interleave([range(9), range(9).__iter__]), {}),
        )
    ),
]


@pytest.mark.parametrize(("call", "error", "said"), REFUSED)
def test_what_cannot_be_read_is_refused_in_words(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_attributes_of_the_users_and_numpys_numbers_and_ids_below_the_vocabulary_are_taken():
    users = type("Users", (list,), {"_inside": 5})
    assert len(interleave([users([1, 2]), [3, 4]])) == 4
    assert interleave([NoLength([1])], seed=np.int64(3)).state_dict()["seed"] == 3
    assert len(windows(NINE, vocab_size=8)) == 4


@pytest.mark.parametrize("options", [{"steps_per_epoch": 3}, {"last_batch": "rollover"}], ids=str)
def test_a_shuffled_mixture_that_cannot_know_its_epoch_is_rejected(options):
    one = mixed(stop=100, shuffle=True)
    within = interleave([one, [(2, 0)]], shuffle=True, stop=20)
    for dataset, more in [(one.take(9), {}), (one, {"shuffle": True}), (within, {})]:
        with pytest.raises(ValueError, match="would begin another order before all of its samples were read"):
            ShardedDataLoader(dataset, 3, **options, **more)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([1, 2], "set_weights: 2 weights for 3 datasets"),
        ([0, 0, 0], "set_weights: 0 datasets have a weight above 0"),
        ([1, -1, 1], r"set_weights\(weights=\[1, -1, 1\]\): give a list of finite numbers of 0 or more"),
        ([1, 1, 1], r"datasets\[2\] had the weight 0 when the mixture was made, and is never read"),
    ],
)
def test_weights_that_do_not_fit_are_rejected_and_change_nothing(weights, said):
    loader = planned((1, 1, 0))
    before = loader.state_dict()
    with pytest.raises(ValueError, match=said):
        loader.set_weights(weights)
    assert loader.state_dict() == before


def test_a_state_of_another_mixture_is_rejected_and_changes_nothing():
    loader = planned()
    loader.set_weights([1, 0, 1])
    before = loader.state_dict()
    for text in ("[[0, 0, [1, 1]]]", "[[0, 0, 5]]", "nonsense", "[5]"):
        state = before | {"sampler_arguments": before["sampler_arguments"] | {"MixtureSampler.set_weights": text}}
        with pytest.raises(ValueError, match="the weights of the state do not fit the mixture"):
            loader.load_state_dict(state)
        assert loader.state_dict() == before
    loader = planned()
    next(iter(loader))
    datasets = [range(50), range(9), range(17)]
    for given, said in (
        ({"weights": (1, 1, 1), "stop": 96, "shuffle": True}, "weights of the MixtureSampler changed after"),
        ({"weights": (3, 2, 1), "stop": "all_exhausted", "shuffle": True}, "the dataset had 96 samples"),
        ({"weights": [(0, (3, 2, 1))], "stop": 96}, "shuffle of the MixtureSampler was True, and is False"),
    ):
        with pytest.raises(ValueError, match=said):
            ShardedDataLoader(interleave(datasets, seed=5, **given), 12).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"seed": 8}, ValueError, "of another mixture: seed was 8, and is 7. Make the mixture with the same"),
        ({"weights": [1, 2]}, ValueError, r"weights was \(1, 2\), and is \(1, 1\)"),
        ({"stop": "all_exhausted"}, ValueError, "stop was 'all_exhausted', and is 'first_exhausted'"),
        ({"schedule": 3}, ValueError, "took turns by another schedule"),
        ({"position": -1}, ValueError, "its 'position' must be at least 0, got -1: give what state_dict"),
        ({"position": "1"}, ValueError, "its 'position' must be an integer"),
        ({"sources": []}, ValueError, "it was one of 0 datasets"),
        ({"sources": None}, ValueError, "its 'sources' is None; it must be a list"),
        ({"sources": [{}, {}]}, ValueError, "its 'sources' has no 'pass'"),
        (None, TypeError, "the state is None, a NoneType; it must be a dict"),
    ],
)
def test_a_state_that_does_not_fit_a_mixture_in_order_is_rejected_and_changes_nothing(change, error, said):
    stream = NoLength(range(5))
    stream.set_epoch = epochs = [].append
    mixture = interleave([stream, range(5)], seed=7)
    list(itertools.islice(iter(mixture), 2))
    before = mixture.state_dict()
    with pytest.raises(error, match=said):
        mixture.load_state_dict(None if change is None else before | {"epoch": 9} | change)
    assert mixture.state_dict() == before and 9 not in epochs.__self__
    with pytest.raises(ValueError, match="interleave: the state has no 'schedule'"):
        mixture.load_state_dict({})
