"""Mixtures by plan: shares of every n-th sample, weights that change, datasets that drop out, or are shuffled."""

import gc
import itertools
import json
import math
import pickle
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import POOLS, covering, make_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import NoLength
from torch.utils.data import DataLoader, Subset

from sharded_loader import ArrayDataset, InlinePool, RandomSampler, ShardedDataLoader, interleave, sample_rng
from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.pipeline import Entry, Pipeline, Run
from sharded_loader.engine.split import Split
from sharded_loader.instruments.stats import Counts, Meter
from sharded_loader.mixing.schedule import CIRCLE, MOST, MOST_OFF, STEPS, Plan, Schedule, changes_of, whole_numbers

SEEDS = st.integers(-(2**70), 2**70)
SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=5)


@st.composite
def plans(draw):
    """Sizes of sources, changes of their weights, a seed."""
    sizes = draw(SIZES)
    begins = sorted(draw(st.sets(st.integers(1, 90), max_size=3)))
    weights = st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes))
    return sizes, [(begin, draw(weights)) for begin in (0, *begins)], draw(SEEDS)


def column(number, size):
    return [(number, index) for index in range(size)]


@given(plans())
def test_when_sources_drop_out_every_sample_comes_exactly_once_and_each_source_in_its_order(case):
    sizes, changes, seed = case
    plan = Plan(changes_of(changes, len(sizes)), seed, sizes=sizes)
    assert plan.length == sum(sizes)
    sources, numbers = plan.at_many(np.arange(plan.length))
    for source, size in enumerate(sizes):
        assert numbers[sources == source].tolist() == list(range(size))
    assert [plan.owner(position) for position in range(plan.length)] == sources.tolist()


@pytest.mark.slow
@given(plans())
def test_a_change_of_weights_skips_no_sample_and_repeats_none(case):
    sizes, changes, seed = case
    plan = Plan(changes_of(changes, len(sizes)), seed)
    sources, numbers = plan.at_many(np.arange(500))
    for source in range(len(sizes)):
        own = numbers[sources == source]
        assert own.tolist() == list(range(len(own)))
    for wanted in (0, 7, 30):
        for source in range(len(sizes)):
            if (position := plan.position(wanted, source)) < 500:
                assert (sources[position], numbers[position]) == (source, wanted)
            else:
                assert (sources == source).sum() <= wanted


@given(plans(), st.integers(1, 64), st.integers(0, 10**15))
def test_each_rank_has_the_shares_of_a_schedule_from_any_position_on(case, ranks, begin):
    _, changes, seed = case
    changes = [(place * 10**9, weights) for place, weights in changes]
    plan = Plan(changes_of(changes, len(changes[0][1])), seed)
    sources, _ = plan.at_many(begin + ranks * np.arange(1000))
    weights = np.array([weights for place, weights in changes if place <= begin][-1])
    is_within = all(not begin < place < begin + 1000 * ranks for place, _ in changes)
    given = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, 1001)[:, None] * (weights / weights.sum())
    assert not is_within or np.abs(given - shares).max() < 60


def test_the_shares_of_each_piece_are_those_of_its_weights():
    plan = Plan(changes_of([(0, [1, 0, 3]), (400, [1, 1, 0]), (1000, [0, 1, 9])], 3), 0)
    sources, _ = plan.at_many(np.arange(2000))
    counts = [np.bincount(sources[begin:end], minlength=3) for begin, end in ((0, 400), (400, 1000), (1000, 2000))]
    assert np.abs(np.array(counts) - [[100, 0, 300], [300, 300, 0], [0, 100, 900]]).max() <= 4
    # A source that never gets so far stands nowhere.
    assert Plan(changes_of([(0, [1, 1]), (10, [1, 0])], 2), 0).position(9, 1) == math.inf
    # Those that are left when one has dropped out go on in the ratio of their weights.
    late = interleave([column(0, 100), column(1, 3000), column(2, 1000)], [2, 3, 1], stop="each_once")[300:2300]
    counts = Counter(source for source, _ in late)
    assert counts[0] <= 4 and abs(counts[1] - 1500) <= 4


@given(plans(), st.data())
def test_each_once_gives_every_sample_exactly_once_by_index_and_in_order_resumed_anywhere(case, data):
    sizes, changes, seed = case
    datasets = [column(number, size) for number, size in enumerate(sizes)]
    everything = sorted(sum(datasets, []))
    mixed = interleave(datasets, changes, seed, "each_once")
    assert sorted(mixed) == everything and len(mixed) == len(everything)
    # A part without samples drops out at once.
    kinds = [NoLength([]), *(one.__iter__ if number % 2 else NoLength(one) for number, one in enumerate(datasets))]
    streams, other = (interleave(kinds, [1, *changes[0][1]], seed, "each_once") for _ in range(2))
    whole = list(streams)
    assert sorted(whole) == everything
    position = data.draw(st.integers(0, len(whole) - 1))
    list(itertools.islice(iter(streams), position))
    other.load_state_dict(json.loads(json.dumps(streams.state_dict())))
    assert list(other) == whole[position:]


def arrays(*sizes):
    """Datasets that are read in bulk: 10,000 in a number say which one it is."""
    return [ArrayDataset(10_000 * number + np.arange(size)) for number, size in enumerate(sizes)]


def passes_of(mixed, source, size):
    """The whole passes over a dataset."""
    samples = np.asarray(mixed.get_batch(range(len(mixed))))
    own = (samples[samples // 10_000 == source] % 10_000).tolist()
    return [tuple(own[begin : begin + size]) for begin in range(0, len(own) - size + 1, size)]


@given(SIZES, SEEDS)
def test_every_pass_over_a_dataset_has_each_sample_once_in_another_order(sizes, seed):
    mixed = interleave(arrays(*sizes), seed=seed, stop=600, shuffle=True)
    seen = Counter()
    for epoch in range(2):
        mixed.set_epoch(epoch)
        for source, size in enumerate(sizes):
            passes = passes_of(mixed, source, size)
            assert all(sorted(one) == list(range(size)) for one in passes)
            if size >= 15:  # two of 15! orders are not equal by chance
                seen.update((source, one) for one in passes)
    assert not seen or max(seen.values()) == 1


def test_all_orders_of_a_small_dataset_are_equally_likely():
    mixed = interleave(arrays(3, 4), stop=40_000, shuffle=True)
    found = Counter(passes_of(mixed, 0, 3))
    assert len(found) == 6
    expected = sum(found.values()) / 6
    assert sum((count - expected) ** 2 / expected for count in found.values()) < 25  # 5 degrees of freedom: p < 0.0002


def test_a_shuffle_changes_no_turn_and_is_another_one_for_each_dataset_but_the_same_in_every_release():
    datasets = [column(0, 30), column(1, 20)]
    turns = [source for source, _ in interleave(datasets, [2, 1], 5)]
    assert [source for source, _ in interleave(datasets, [2, 1], 5, shuffle=True)] == turns
    mixed = interleave(arrays(30, 30), shuffle=True, stop="all_exhausted")
    assert passes_of(mixed, 0, 30)[0] != passes_of(mixed, 1, 30)[0]
    mixed = interleave([column(0, 5), column(1, 3)], [2, 1], 7, "all_exhausted", True)
    mixed.set_epoch(1)
    assert [10 * source + index for source, index in mixed] == [12, 0, 3, 11, 4, 1, 10, 2]  # runs are resumed


@settings(max_examples=10)
@given(plans(), st.data())
def test_bulk_reads_give_what_single_ones_give(case, data):
    sizes, changes, seed = case
    datasets = [ArrayDataset(100 * number + np.arange(size)) for number, size in enumerate(sizes)]
    stop = data.draw(st.sampled_from(["each_once", 70, "first_exhausted", "all_exhausted"]))
    mixed = interleave(datasets, changes, seed, stop, data.draw(st.booleans()))
    mixed.set_epoch(data.draw(st.integers(0, 10**6))) if hasattr(mixed, "set_epoch") else None
    indices = data.draw(st.lists(st.integers(-len(mixed), len(mixed) - 1), min_size=1, max_size=40))
    assert mixed.__getitems__(indices) == [mixed[index] for index in indices]
    assert np.asarray(mixed.get_batch(indices)).tolist() == [mixed[index] for index in indices]
    assert list(pickle.loads(pickle.dumps(mixed))) == list(mixed)


def test_ten_to_the_twelve_samples_are_shuffled_at_constant_memory():
    mixed = interleave([range(10**12), range(10**12)], shuffle=True, stop="all_exhausted")
    assert len(mixed) >= 2 * 10**12 - 10
    assert len({mixed[10**12 + n] for n in range(100)}) == 100


def mixture(**options):
    return interleave([column(0, 40), column(1, 10)], [3, 1], 2, 100, **options)


def plain(batch):
    return [tuple(sample) for sample in batch]


@pytest.mark.parametrize("wrap", [lambda mixed: mixed.take(60), lambda mixed: Subset(mixed, range(60))])
def test_a_part_of_a_shuffled_mixture_is_told_the_epoch(wrap):
    """By a loader of ours, through our wrappers and torch's."""
    loader = ShardedDataLoader(wrap(mixture(shuffle=True)), 20, batchify_fn=plain)
    first, second = list(loader), list(loader)
    assert sum(first, []) == list(wrap(mixture(shuffle=True)))
    assert first != second


def test_a_random_sampler_over_a_mixture_and_a_split_give_its_samples_of_the_epoch():
    loader = ShardedDataLoader(mixture(shuffle=True), 10, sampler=RandomSampler(100, seed=1), batchify_fn=plain)
    mixed = mixture(shuffle=True)  # another one: the loader would hear what its own is told
    for epoch in range(2):
        found = sum(loader, [])
        mixed.set_epoch(epoch)
        assert Counter(found) == Counter(mixed)
    train, test = mixture(shuffle=True).split([80, 20], seed=1)
    assert Counter([*train, *test]) == Counter(mixture(shuffle=True))


def test_a_mixture_of_shuffled_mixtures_gives_each_sample_once():
    inner = interleave([column(0, 30), column(1, 12)], stop="each_once", shuffle=True)
    mixed = interleave([inner, column(2, 50)], stop="each_once", shuffle=True)
    everything = sorted([*column(0, 30), *column(1, 12), *column(2, 50)])
    loader = ShardedDataLoader(mixed, 10, batchify_fn=plain)
    first, second = sum(loader, []), sum(loader, [])
    assert sorted(first) == sorted(second) == everything and first != second


def test_torchs_loader_reads_the_epoch_that_it_was_told():
    mixed = mixture(shuffle=True)
    found = []
    for epoch in range(2):
        mixed.set_epoch(epoch)
        loader = DataLoader(mixed, batch_size=10, collate_fn=plain, num_workers=2)
        found.append(sum(loader, []))
        assert found[-1] == list(mixed)
    assert found[0] != found[1]


def test_parts_of_iterable_data_change_their_weights_at_the_same_sample_of_all():
    """The unit is a sample of all parts: with two parts, each one changes after half as many."""
    datasets = [lambda: itertools.repeat(0), lambda: itertools.repeat(1)]
    for parts in (1, 2, 4):
        mixed = interleave(datasets, [(0, [1, 0]), (80, [0, 1])], stop=160)
        loader = ShardedDataLoader(mixed, 4, streams=parts)
        assert torch.cat(list(loader)).tolist() == [0] * 80 + [1] * 80, parts


ITERABLE = {
    "schedule": {"weights": [(0, [9, 1]), (40, [1, 9])], "stop": 90},
    "each once": {"weights": [3, 1], "stop": "each_once"},
    "number": {"stop": 70},
}


@pytest.mark.costly(6)
@pytest.mark.parametrize("options", ITERABLE.values(), ids=ITERABLE)
@pytest.mark.parametrize("streams", [1, 2, 3])
def test_a_loader_of_iterable_data_continues_exactly_from_every_batch(options, streams):
    def make():
        mixed = interleave([part_of_numbers, np.arange(1000, 1020)], **options)
        return ShardedDataLoader(mixed, 4, streams=streams)

    loader = make()
    whole, states = [], []
    for batch in loader:
        whole.append(batch.tolist())
        states.append(json.dumps(loader.state_dict()))
    assert len(whole) > 10
    if options["stop"] == "each_once":
        assert sorted(sum(whole, [])) == [*range(60), *range(1000, 1020)]
    for done in range(1, len(whole), 4):
        other = make()
        other.load_state_dict(json.loads(states[done - 1]))
        assert [batch.tolist() for batch in other] == whole[done:]


def part_of_numbers(part, parts):
    return iter(range(part, 60, parts))


def test_a_schedule_may_be_a_dict():
    datasets = [range(100), range(100, 200)]
    pairs = interleave(datasets, weights=[(0, [1, 1]), (20, [9, 1])], seed=3)
    assert list(interleave(datasets, weights={0: [1, 1], 20: [9, 1]}, seed=3)) == list(pairs)


# -- the schedule: shares hold for every n-th sample and every seed, samples are found without a walk ------------------


WEIGHTS = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any)


def furthest(schedule, positions):
    """How many samples a source is away from its share, at most, after any number of these positions."""
    weights = np.array(schedule.weights)
    sources, _ = schedule.at_many(positions)
    given = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, len(positions) + 1)[:, None] * (weights / weights.sum())
    return np.abs(given - shares).max()


@pytest.mark.costly(4)
@pytest.mark.parametrize("weights", [[1, 1], [1, 1, 1], [5, 3, 2], [7, 2, 1], [1000, 1], [13, 8, 5, 3, 2], [1] * 16])
def test_every_nth_sample_has_the_shares_of_the_whole_for_any_n(weights):
    schedule = Schedule(weights, 0)
    for limit, strides in (
        (5, [1]),
        (12, range(2, 17)),
        (10, [32, 64, 128]),
        (45, [17, 24, 41, 48, 56, 59, 60]),
        (80, [72, 99, 112]),
    ):
        for stride in strides:
            assert furthest(schedule, stride // 3 + stride * np.arange(5000)) < limit, stride


@settings(max_examples=settings.default.max_examples // 2)
@given(st.lists(st.floats(0, 1e308), min_size=1, max_size=5).filter(any), SEEDS)
def test_any_weights_give_the_shares_of_whole_numbers_that_are_near_to_them(weights, seed):
    counts = whole_numbers(weights, len(weights))
    assert sum(counts) <= MOST and math.gcd(*counts) == 1
    total = sum(map(Fraction, weights))
    for weight, count in zip(weights, counts, strict=True):
        assert (count > 0) == (weight > 0)
        assert abs(Fraction(count, sum(counts)) - Fraction(weight) / total) <= Fraction(len(weights), MOST)
    assert furthest(Schedule(counts, seed), np.arange(MOST)) < 9


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        (None, [1, 1, 1]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1 / 3, 1 / 3, 1 / 3], [1, 1, 1]),
        ([0.1 + 0.2, 0.3, 0.4], [3, 3, 4]),  # 0.1 + 0.2 is not 0.3 to the last bit
        ([10, 20, 0], [1, 2, 0]),
        ([5e-324, 5e-324, 0], [1, 1, 0]),
        ([1.7e308, 1.7e308, 1.7e308], [1, 1, 1]),
        ([Fraction(1, 7), Fraction(2, 7), 1], [1, 2, 7]),
        ([Decimal("0.1"), 0.2, 1], [1, 2, 10]),
        (np.array([3, 2, 1]), [3, 2, 1]),
        (np.array([0.5, 0.25, 0.25], np.float32), [2, 1, 1]),
        (torch.tensor([0.5, 0.25, 0.25]), [2, 1, 1]),
        ([65_533, 2, 1], [65_533, 2, 1]),
        ([10**9, 1, 1e-300], [65_534, 1, 1]),  # each is read, however rarely
    ],
)
def test_weights_become_the_smallest_whole_numbers_of_their_ratio(weights, counts):
    assert whole_numbers(weights, 3) == counts


def test_other_weights_are_rounded_to_65536ths_by_largest_remainder():
    assert whole_numbers([2**0.5, 1], 2) == [19_195, 13_573]  # half of 38,390.0 and 27,146.0
    assert whole_numbers([math.pi, math.e, 1], 3) == [30_013, 25_969, 9_554]  # 30,013.29, 25,969.18 and 9,553.53


@given(WEIGHTS, SEEDS, st.integers(0, 2**61))
def test_the_samples_of_each_source_come_in_order_without_a_gap_and_are_found_in_both_directions(weights, seed, begin):
    schedule = Schedule(whole_numbers(weights, len(weights)), seed)
    for start in (0, begin, CIRCLE - 100):
        sources, numbers = schedule.at_many(start + np.arange(500))
        for source in set(sources.tolist()):
            own = numbers[sources == source]
            assert (own - own[0]).tolist() == list(range(len(own)))
            assert start or own[0] == 0
        for position in range(0, 500, 7):
            source, number = schedule.at(start + position)
            assert (source, number) == (sources[position], numbers[position])
            assert schedule.owner(start + position) == source
            assert schedule.position(number, source) == start + position


@pytest.mark.parametrize("step", STEPS)
def test_no_source_is_ever_so_far_off_its_share_that_the_search_for_a_sample_misses_it(step):
    quotients, one, other = 0, step, CIRCLE
    while one:
        quotients, one, other = quotients + other // one, other % one, one
    assert 2 * quotients < MOST_OFF


def test_2_to_the_32_samples_have_exactly_the_shares():
    schedule = Schedule([3, 0, 1], 5)
    assert [schedule.at(CIRCLE + n)[1] - schedule.at(n)[1] for n in range(4)] == [
        [CIRCLE * 3 // 4, 0, CIRCLE // 4][schedule.owner(n)] for n in range(4)
    ]


def test_the_seed_decides_who_comes_first_and_nothing_else_does():
    assert {Schedule([1, 1], seed).owner(0) for seed in range(20)} == {0, 1}
    always = [1, 0, 0, 1, 2, 0, 1, 2, 0, 0, 1, 0]  # the same in every release: runs are resumed
    assert [Schedule([3, 2, 1], 5).owner(position) for position in range(12)] == always


@pytest.mark.parametrize("count", [1, 2, pytest.param(MOST, marks=pytest.mark.slow)])
def test_up_to_65536_sources_fit(count):
    schedule = Schedule(whole_numbers(None, count), 0)
    assert set(schedule.at_many(np.arange(5 * count))[0].tolist()) == set(range(count))


# -- a loader plans a mixture: weights that are set while training, shuffled passes over epochs, states on other ranks -


LENGTHS = (50, 9, 17)
GLOBAL = 12  # samples in a step of all ranks


def planned(stop=96, weights=(3, 2, 1), shuffle=True):
    return interleave(arrays(*LENGTHS), list(weights), 5, stop, shuffle)


class Ranks:
    """The loaders of all ranks, which go in step."""

    def __init__(self, dataset, ranks, pool="inline", **options):
        options = {"batch_size": GLOBAL // ranks} | options
        self.loaders = [
            ShardedDataLoader(dataset, num_replicas=ranks, rank=rank, pool=make_pool(pool, 2), **options)
            for rank in range(ranks)
        ]

    def steps(self, changes=None):
        """The samples of each step of an epoch, in the order of the mixture; ``changes``: step -> weights to set."""
        for step, batches in enumerate(zip(*self.loaders, strict=True)):
            rows = [batch.tolist() for batch in batches]
            yield [row[n] for n in range(len(rows[0])) for row in rows]
            if step in (changes or {}):
                for loader in self.loaders:
                    loader.set_weights(changes[step])

    def state(self):
        return json.dumps(self.loaders[0].state_dict())

    def load(self, state):
        for loader in self.loaders:
            loader.load_state_dict(json.loads(state))

    def close(self):
        for loader in self.loaders:
            loader.close()


CHANGES = ({1: [0, 1, 1], 4: [1, 0, 0]}, {2: [5, 1, 1]}, {})
"""What is set after which step of each epoch."""


def everything(dataset=None, ranks=1, changes=CHANGES, **options):
    """The samples of each epoch, and of each step; and the state after each step."""
    loaders = Ranks(dataset or planned(), ranks, **options)
    epochs, states = [], []
    for each in changes:
        epochs.append([])
        for samples in loaders.steps(each):
            epochs[-1].append(samples)
            states.append(loaders.state())
    loaders.close()
    return epochs, states


WHOLE = everything()[0]


def counts(samples):
    return np.bincount(np.asarray(samples) // 10_000, minlength=len(LENGTHS))


def test_weights_that_are_set_hold_from_the_next_batch_on():
    one, two, three = WHOLE
    assert np.abs(counts(sum(one[:2], [])) - [12, 8, 4]).max() <= 3
    assert counts(sum(one[2:5], []))[0] == 0
    assert counts(sum(one[5:], [])).tolist() == [36, 0, 0]
    assert counts(sum(two[:3], [])).tolist() == [36, 0, 0]  # the next epochs begin with them
    assert np.abs(counts(sum(three, [])) - np.array([5, 1, 1]) / 7 * 96).max() <= 3
    plain = everything(changes=({}, {}, {}))[0]
    assert plain[0][:2] == one[:2] and plain[0][2:] != one[2:]
    loader = Ranks(planned(), 1)
    begin = loader.state()
    assert list(loader.steps({1: [0, 1, 1]})) != plain[0]
    loader.load(begin)  # a state of before a change undoes it
    assert list(loader.steps()) == plain[0]


@pytest.mark.costly(2)
@covering(pool=POOLS, ranks=[1, 2, 3, 4, 12])
def test_every_pool_and_any_number_of_ranks_read_the_same(pool, ranks):
    if ranks > 3 and pool not in ("inline", "thread"):
        ranks = 2  # not dozens of processes
    assert everything(ranks=ranks, pool=pool)[0] == WHOLE


@pytest.mark.slow
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 3), (4, 2), (2, 1)])
def test_a_state_after_a_change_continues_exactly_on_other_ranks(saved_on, loaded_on):
    _, states = everything(ranks=saved_on)
    steps = len(WHOLE[0])
    for done in range(1, len(states), 3):
        loaders = Ranks(planned(), loaded_on)
        loaders.load(states[done - 1])
        epoch, step = divmod(done, steps)
        for number in range(epoch, 3):
            # The state has the changes before it. Those behind it are made again.
            begin = step if number == epoch else 0
            changes = {at - begin: weights for at, weights in CHANGES[number].items() if at >= begin}
            if number == epoch and begin and begin - 1 in CHANGES[number]:  # it was saved before that change
                for loader in loaders.loaders:
                    loader.set_weights(CHANGES[number][begin - 1])
            assert list(loaders.steps(changes)) == WHOLE[number][begin:]
        loaders.close()


@pytest.mark.parametrize("steps", [None, 5])
def test_a_state_has_weights_that_were_set_after_a_loop_was_left(steps):
    loader, other = (Ranks(planned(), 1, steps_per_epoch=steps).loaders[0] for _ in range(2))
    for _ in loader:
        break
    loader.set_weights([0, 0, 1])
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert (other.epoch, other.position) == (loader.epoch, loader.position) == (0, 1)
    assert counts(sum((batch.tolist() for batch in other), [])).tolist() == [0, 0, 84 if steps is None else 48]
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in other]


def test_a_loop_that_is_left_after_a_change_has_ended_and_one_after_the_last_batch_does_not_prolong_it():
    [loader] = Ranks(planned(), 1).loaders
    for _ in loader:
        loader.set_weights([1, 0, 0])
        break
    assert loader.epoch == 0 and loader.position == 1
    assert len(list(loader)) == 8 and loader.epoch == 2
    assert len([loader.set_weights([1, 0, 0]) for _ in itertools.islice(loader, 20)]) == 8
    assert counts(np.concatenate(list(loader))).tolist() == [96, 0, 0]


def test_the_length_stays_and_a_dataset_that_ends_early_starts_over():
    [loader] = Ranks(planned("first_exhausted"), 1).loaders
    length = len(loader)
    batches = iter(loader)
    found = [next(batches)]
    loader.set_weights([0, 1, 0])
    assert len(batches) == len(loader) == length
    found += batches
    assert len(found) == length
    own = [n for n in np.concatenate(found).tolist() if 10_000 <= n < 20_000]
    assert len(own) > 9 and set(own[:9]) == set(range(10_000, 10_009))  # it is read through before it starts over


def test_each_once_stays_exact_whatever_is_set():
    full = sorted(10_000 * number + index for number, size in enumerate(LENGTHS) for index in range(size))
    loaders = Ranks(planned("each_once"), 1, batch_size=4)
    for changes in ({}, {2: [1, 1, 9], 6: [1, 7, 1], 15: [1, 1, 1]}):
        assert sorted(sum(loaders.steps(changes), [])) == full
    with pytest.raises(ValueError, match=r"only datasets with the weight 0 have samples left, such as datasets\[0\]"):
        loaders.loaders[0].set_weights([0, 1, 1])
    assert sorted(sum(loaders.steps(), [])) == full  # nothing has changed
    steps = loaders.steps()
    assert 10_008 in sum(itertools.islice(steps, 16), [])  # all of the second dataset was read
    with pytest.raises(ValueError, match=r"at sample 67, only .* left, such as datasets\[1\]"):
        loaders.loaders[0].set_weights([1, 0, 1])  # it would be left out in the next epoch


@pytest.mark.slow
def test_many_changes_leave_nothing_behind():
    before = sum(type(one) is Run for one in gc.get_objects())
    [loader] = Ranks(planned(1200), 1).loaders
    for number, _ in enumerate(loader):
        loader.set_weights([1, number % 3, 1])
    assert len(json.loads(loader.state_dict()["sampler_arguments"]["MixtureSampler.set_weights"])) == 100
    assert sum(type(one) is Run for one in gc.get_objects()) < before + 10  # of a hundred that were taken out


def test_two_iterators_of_one_loader_follow_the_change():
    [loader] = Ranks(planned(weights=[(0, (3, 2, 1))], shuffle=False), 1).loaders
    one, two = iter(loader), iter(loader)
    next(one), next(one), next(two)  # epochs 0 and 1
    loader.set_weights([0, 0, 1])  # of epoch 1, which was read last
    assert len(list(one)) == 6
    assert counts(np.concatenate(list(two))).tolist() == [0, 0, 84]


def test_an_epoch_whose_first_batch_was_interrupted_begins_with_the_new_weights():
    strikes = [KeyboardInterrupt()]

    def interrupted(samples):
        if strikes:
            raise strikes.pop()
        return samples

    loader = ShardedDataLoader(planned(), 12, batchify_fn=interrupted)
    batches = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    loader.set_weights([0, 0, 1])
    assert counts(sum(batches, [])).tolist() == [0, 0, 96]


def test_a_change_inside_next_is_an_error():
    def change(samples):
        with pytest.raises(RuntimeError, match=r"cannot be changed inside next\(\) of the same loader"):
            loader.set_weights([1, 1, 1])
        return samples

    loader = ShardedDataLoader(planned(), 48, batchify_fn=change)
    assert len(list(loader)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {1: [1, 9, 1], 3: [1, 1, 5]}], ids=["fixed", "set"])
@pytest.mark.parametrize("options", [{"steps_per_epoch": 5}, {"last_batch": "rollover", "batch_size": 7}], ids=str)
def test_passes_stay_whole_where_an_epoch_ends_inside_a_batch(options, changes):
    loaders = Ranks(planned("each_once"), 1, **options)
    found = sum((samples for _ in range(8) for samples in loaders.steps(changes)), [])
    for begin in range(0, len(found) - 76 + 1, 76):
        assert sorted(found[begin : begin + 76]) == sorted(planned("each_once"))
    assert len({tuple(found[begin : begin + 76]) for begin in range(0, len(found) - 75, 76)}) == len(found) // 76 > 2


@pytest.mark.costly
@pytest.mark.parametrize(("ranks", "other"), [(1, 2), (4, 3)])
def test_weights_that_are_set_hold_where_epochs_have_a_number_of_steps(ranks, other):
    changes = ({1: [0, 1, 1]}, {3: [4, 1, 1]}, {}, {0: [0, 0, 1]})
    whole, states = everything(planned(120), ranks, changes, steps_per_epoch=7)
    assert everything(planned(120), other, changes, steps_per_epoch=7)[0] == whole
    # The mixture has 10 steps: the third epoch of 7 steps begins in the middle of its second one.
    for samples, only in (([*whole[0][2:], *whole[1][:4]], [1, 2]), (whole[3][1:], [2])):
        assert np.flatnonzero(counts(sum(samples, []))).tolist() == only
    loaders = Ranks(planned(120), ranks, steps_per_epoch=7)
    loaders.load(states[16])
    assert list(loaders.steps()) == whole[2][3:]


def test_prefetched_batches_of_the_next_epoch_have_the_new_weights():
    with ShardedDataLoader(planned(), 12, num_workers=2, prefetch=12) as loader:
        for step, _ in enumerate(loader):
            if step == 7:  # the next epoch is being read
                loader.set_weights([0, 0, 1])
        assert counts(np.concatenate(list(loader))).tolist() == [0, 0, 96]


def test_a_transformed_mixture_is_planned_and_draws_other_numbers_in_each_pass():
    mixed = planned().transform(lambda sample: (sample, int(sample_rng().integers(10**9))))
    loader = ShardedDataLoader(mixed, 96, seed=4)
    [one], [two] = list(loader), list(loader)
    for samples, drawn in (one, two):
        assert len(set(drawn.tolist())) == 96 > len(set(samples.tolist()))
    assert one[0].tolist() != two[0].tolist()
    loader.set_weights([1, 0, 0])
    assert counts(next(iter(loader))[0]).tolist() == [96, 0, 0]


@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_stats_tell_how_many_samples_of_each_dataset_were_read(pool):
    loaders = Ranks(planned(), 2, pool)
    for number, changes in enumerate(CHANGES):
        own = [samples[1::2] for samples in loaders.steps(changes)]
        assert loaders.loaders[1].stats(number).sources == tuple(counts(sum(own, [])).tolist())
    total = loaders.loaders[1].stats()
    assert sum(total.sources) == total.samples == 144 and sum(total.shares) == pytest.approx(1)
    loaders.close()


def test_what_an_iterator_of_an_old_epoch_reads_is_counted_too(monkeypatch):
    monkeypatch.setattr(Meter, "KEPT_EPOCHS", 0)
    meter, old = Meter(planned()), Counts()
    for epoch, counts in enumerate((old, Counts())):
        meter.begin(epoch, counts)
    entry = Entry(0, Task(0, 0, 0, 0, ([0, 1], [2]), True), Result(0, 0, samples=3))
    for _ in range(2):
        meter.step(old, entry, (0.0, 0.0, 0.0, 0.0, False), Pipeline(InlinePool(), Split()))
    assert sum(meter.stats().sources) == 6


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (interleave(arrays(*LENGTHS), [0, 1, 3]), {}),
        (interleave(arrays(*LENGTHS), [0, 1, 3]), {"shuffle": True, "seed": 1}),
        (interleave(arrays(*LENGTHS), [(0, [0, 1, 1]), (9, [0, 1, 3])]), {"sampler": RandomSampler(12, seed=1)}),
        (interleave(arrays(*LENGTHS), [0, 1, 3]).transform(lambda sample: sample), {}),
    ],
)
def test_stats_count_the_datasets_of_every_mixture_that_is_read_by_index(dataset, options):
    loader = ShardedDataLoader(dataset, 5, **options)
    assert loader.stats().sources == loader.stats().shares == ()
    found = np.concatenate(list(loader))
    assert loader.stats().sources == tuple(counts(found).tolist())
    assert ShardedDataLoader(dataset.take(5), 5).stats().sources == ()


def test_a_rank_of_4096_reads_what_one_rank_reads():
    mixed = interleave([range(10**9), range(10**9, 10**9 + 500)], [7, 1], stop=10**8, shuffle=True)
    whole = ShardedDataLoader(mixed, 4096)
    ours = ShardedDataLoader(mixed, 1, num_replicas=4096, rank=4095)
    for one, own in itertools.islice(zip(whole, ours, strict=True), 5):
        assert one[-1] == own[0]
