"""A loader plans a mixture: weights that are set while training, shuffled passes over epochs, states on other ranks."""

import gc
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from conftest import POOLS, covering, make_pool

from sharded_loader import ArrayDataset, RandomSampler, ShardedDataLoader, interleave, sample_rng
from sharded_loader.engine.pipeline import Run
from sharded_loader.instruments.stats import Counts, Meter
from sharded_loader.mixing.schedule import Plan

SIZES = (50, 9, 17)
GLOBAL = 12  # samples in a step of all ranks


def datasets():
    """10,000 in a number say which one it is."""
    return [ArrayDataset(10_000 * number + np.arange(size)) for number, size in enumerate(SIZES)]


def mixture(stop=96, weights=(3, 2, 1), shuffle=True):
    return interleave(datasets(), list(weights), 5, stop, shuffle)


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
        states = [json.dumps(loader.state_dict()) for loader in self.loaders]
        return states[0]

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
    loaders = Ranks(dataset or mixture(), ranks, **options)
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
    return np.bincount(np.asarray(samples) // 10_000, minlength=len(SIZES))


def test_weights_that_are_set_hold_from_the_next_batch_on():
    one, two, three = WHOLE
    assert np.abs(counts(sum(one[:2], [])) - [12, 8, 4]).max() <= 3
    assert counts(sum(one[2:5], []))[0] == 0
    assert counts(sum(one[5:], [])).tolist() == [36, 0, 0]
    assert counts(sum(two[:3], [])).tolist() == [36, 0, 0]  # the next epochs begin with them
    assert np.abs(counts(sum(three, [])) - np.array([5, 1, 1]) / 7 * 96).max() <= 3
    plain = everything(changes=({}, {}, {}))[0]
    assert plain[0][:2] == one[:2] and plain[0][2:] != one[2:]
    loader = Ranks(mixture(), 1)
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
        loaders = Ranks(mixture(), loaded_on)
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


def test_weights_may_be_set_before_the_first_batch_and_between_epochs():
    loader = Ranks(mixture(), 1)
    loader.loaders[0].set_weights([0, 1, 0])
    assert counts(sum(loader.steps(), [])).tolist() == [0, 96, 0]
    loader.loaders[0].set_weights([0, 0, 1])
    assert counts(sum(loader.steps(), [])).tolist() == [0, 0, 96]
    assert json.loads(json.loads(loader.state())["sampler_arguments"]["MixtureSampler.set_weights"]) == [
        [0, 0, [0, 1, 0]],
        [1, 0, [0, 0, 1]],
    ]


@pytest.mark.parametrize("steps", [None, 5])
def test_a_state_has_weights_that_were_set_after_a_loop_was_left(steps):
    loader, other = (Ranks(mixture(), 1, steps_per_epoch=steps).loaders[0] for _ in range(2))
    for _ in loader:
        break
    loader.set_weights([0, 0, 1])
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert (other.epoch, other.position) == (loader.epoch, loader.position) == (0, 1)
    assert counts(sum((batch.tolist() for batch in other), [])).tolist() == [0, 0, 84 if steps is None else 48]
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in other]


def test_a_loop_that_is_left_after_a_change_has_ended_and_one_after_the_last_batch_does_not_prolong_it():
    [loader] = Ranks(mixture(), 1).loaders
    for _ in loader:
        loader.set_weights([1, 0, 0])
        break
    assert loader.epoch == 0 and loader.position == 1
    assert len(list(loader)) == 8 and loader.epoch == 2
    assert len([loader.set_weights([1, 0, 0]) for _ in itertools.islice(loader, 20)]) == 8
    assert counts(np.concatenate(list(loader))).tolist() == [96, 0, 0]


def test_the_length_stays_and_a_dataset_that_ends_early_starts_over():
    [loader] = Ranks(mixture("first_exhausted"), 1).loaders
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
    full = sorted(10_000 * number + index for number, size in enumerate(SIZES) for index in range(size))
    loaders = Ranks(mixture("each_once"), 1, batch_size=4)
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
def test_many_changes_leave_nothing_behind_and_each_adds_to_the_plan_that_is_there(monkeypatch):
    made, add, before = [], Plan._add_segment, sum(type(one) is Run for one in gc.get_objects())
    monkeypatch.setattr(Plan, "_add_segment", lambda *given: made.append(1) or add(*given))
    [loader] = Ranks(mixture(1200), 1).loaders
    for number, _ in enumerate(loader):
        loader.set_weights([1, number % 3, 1])
    assert len(json.loads(loader.state_dict()["sampler_arguments"]["MixtureSampler.set_weights"])) == 100
    assert len(made) <= 1 + 2 * 100
    assert sum(type(one) is Run for one in gc.get_objects()) < before + 10  # of a hundred that were taken out


def test_two_iterators_of_one_loader_follow_the_change():
    [loader] = Ranks(mixture(weights=[(0, (3, 2, 1))], shuffle=False), 1).loaders
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

    loader = ShardedDataLoader(mixture(), 12, batchify_fn=interrupted)
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

    loader = ShardedDataLoader(mixture(), 48, batchify_fn=change)
    assert len(list(loader)) == 2


# -- epochs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {1: [1, 9, 1], 3: [1, 1, 5]}], ids=["fixed", "set"])
@pytest.mark.parametrize("options", [{"steps_per_epoch": 5}, {"last_batch": "rollover", "batch_size": 7}], ids=str)
def test_passes_stay_whole_where_an_epoch_ends_inside_a_batch(options, changes):
    loaders = Ranks(mixture("each_once"), 1, **options)
    found = sum((samples for _ in range(8) for samples in loaders.steps(changes)), [])
    for begin in range(0, len(found) - 76 + 1, 76):
        assert sorted(found[begin : begin + 76]) == sorted(mixture("each_once"))
    assert len({tuple(found[begin : begin + 76]) for begin in range(0, len(found) - 75, 76)}) == len(found) // 76 > 2


@pytest.mark.costly
@pytest.mark.parametrize(("ranks", "other"), [(1, 2), (4, 3)])
def test_weights_that_are_set_hold_where_epochs_have_a_number_of_steps(ranks, other):
    changes = ({1: [0, 1, 1]}, {3: [4, 1, 1]}, {}, {0: [0, 0, 1]})
    whole, states = everything(mixture(120), ranks, changes, steps_per_epoch=7)
    assert everything(mixture(120), other, changes, steps_per_epoch=7)[0] == whole
    # The mixture has 10 steps: the third epoch of 7 steps begins in the middle of its second one.
    for samples, only in (([*whole[0][2:], *whole[1][:4]], [1, 2]), (whole[3][1:], [2])):
        assert np.flatnonzero(counts(sum(samples, []))).tolist() == only
    loaders = Ranks(mixture(120), ranks, steps_per_epoch=7)
    loaders.load(states[16])
    assert list(loaders.steps()) == whole[2][3:]


def test_prefetched_batches_of_the_next_epoch_have_the_new_weights():
    with ShardedDataLoader(mixture(), 12, num_workers=2, prefetch=12) as loader:
        for step, _ in enumerate(loader):
            if step == 7:  # the next epoch is being read
                loader.set_weights([0, 0, 1])
        assert counts(np.concatenate(list(loader))).tolist() == [0, 0, 96]


def test_a_transformed_mixture_is_planned_and_draws_other_numbers_in_each_pass():
    mixed = mixture().transform(lambda sample: (sample, int(sample_rng().integers(10**9))))
    loader = ShardedDataLoader(mixed, 96, seed=4)
    [one], [two] = list(loader), list(loader)
    for samples, drawn in (one, two):
        assert len(set(drawn.tolist())) == 96 > len(set(samples.tolist()))
    assert one[0].tolist() != two[0].tolist()
    loader.set_weights([1, 0, 0])
    assert counts(next(iter(loader))[0]).tolist() == [96, 0, 0]


@pytest.mark.slow
def test_a_mixture_of_shuffled_mixtures_is_planned():
    inner = interleave(datasets()[:2], stop="each_once", shuffle=True)
    mixed = interleave([inner, datasets()[2]], [1, 1], stop="each_once", shuffle=True)
    found = [everything(mixed, ranks, ({0: [9, 1]}, {}))[0] for ranks in (1, 2)]
    assert found[0] == found[1] and found[0][0] != found[0][1]
    assert Counter(sum(found[0][0], [])[:76]) == Counter(mixed)


# -- stats -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_stats_tell_how_many_samples_of_each_dataset_were_read(pool):
    loaders = Ranks(mixture(), 2, pool)
    for number, changes in enumerate(CHANGES):
        own = [samples[1::2] for samples in loaders.steps(changes)]
        assert loaders.loaders[1].stats(number).sources == tuple(counts(sum(own, [])).tolist())
    total = loaders.loaders[1].stats()
    assert sum(total.sources) == total.samples == 144 and sum(total.shares) == pytest.approx(1)
    loaders.close()


def test_what_an_iterator_of_an_old_epoch_reads_is_counted_too(monkeypatch):
    monkeypatch.setattr(Meter, "KEPT_EPOCHS", 0)
    meter, old = Meter(mixture()), Counts()
    for epoch, counts in enumerate((old, Counts())):
        meter.begin(epoch, counts)
    for _ in range(2):
        meter.add_sources(old, [[0, 1], [2]])
    assert sum(meter.stats().sources) == 6


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (interleave(datasets(), [0, 1, 3]), {}),
        (interleave(datasets(), [0, 1, 3]), {"shuffle": True, "seed": 1}),
        (interleave(datasets(), [(0, [0, 1, 1]), (9, [0, 1, 3])]), {"sampler": RandomSampler(12, seed=1)}),
        (interleave(datasets(), [0, 1, 3]).transform(lambda sample: sample), {}),
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
