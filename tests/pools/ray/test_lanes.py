"""Lanes stay with their actor, and are dealt again when actors come and go."""

from __future__ import annotations

from sharded_loader.pools.ray.lanes import Lanes
from sharded_loader.pools.ray.members import Member

ONE, TWO = Member(0, "0-0", None), Member(1, "1-1", None)


def test_a_lane_stays_with_its_actor() -> None:
    lanes = Lanes()
    first = [lanes.holder(lane, [ONE, TWO]) for lane in range(4)]
    assert first == [ONE, TWO, ONE, TWO]
    assert [lanes.holder(lane, [TWO, ONE]) for lane in range(4)] == first


def test_an_actor_that_comes_gets_its_share() -> None:
    lanes = Lanes()
    assert [lanes.holder(lane, [ONE]) for lane in range(4)] == [ONE] * 4
    lanes.share([ONE, TWO])
    assert sorted(lanes.holder(lane, [ONE, TWO]).number for lane in range(4)) == [0, 0, 1, 1]  # type: ignore[union-attr]


def test_the_lanes_of_an_actor_that_has_gone_go_to_others() -> None:
    lanes = Lanes()
    assert lanes.holder(0, []) is None
    assert lanes.holder(0, [ONE]) is ONE
    assert lanes.holder(0, [TWO]) is TWO
    lanes.clear()
    assert lanes.holder(0, [ONE]) is ONE
