"""``FrameWindows``: each frame by its own time, padding at the ends of episodes, and few frames decoded in vain."""

from __future__ import annotations

import json
import os
import pickle
import sys
import types
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import make_pool, with_errors

import sharded_loader
from sharded_loader import FrameWindows, GroupReads, ShardedDataLoader
from sharded_loader.storage import frames

with_decoder = pytest.mark.frameworks
LENGTH, GOP = 60, 10


class Video:
    """Stands for a decoder. The path is JSON: the times of the frames, and the first frame that does not decode."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, path: str, index: Any) -> None:
        self.times, self.end = json.loads(path)
        if not self.times:
            raise ValueError("moov atom not found")
        self.path, self.decoded, self.at, self.is_closed = path, 0, -2, False
        self.index = np.array(self.times), np.arange(len(self.times)), np.arange(0, len(self.times), GOP)
        self.seen.append(self)

    def read(self, number: int) -> Any:
        key = number - number % GOP
        begin = self.at + 1 if self.at <= number and key <= self.at + 1 else key
        self.decoded, self.at = self.decoded + len(range(begin, number + 1)), number
        if number >= self.end:
            raise ValueError("the file ends before it")
        return np.full((3, 2, 4), number % 256, np.uint8)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    Video.seen.clear()
    if request.node.get_closest_marker("frameworks") is None:
        monkeypatch.setattr(frames, "READERS", {"json": Video})


def path_of(times: Any, end: int = 1000) -> str:
    return json.dumps([list(times), end])


def steady(number: int = 0) -> str:
    return path_of((number + np.arange(LENGTH)) / 30)


def numbers(sample: Any) -> list[int]:
    found: list[int] = sample["frames"][:, 0, 0, 0].tolist()
    return found


def test_a_sample_is_a_window_around_its_frame() -> None:
    windows = FrameWindows([steady(), steady(7)], deltas=[-0.1, 0.0, 0.05])
    sample = windows[LENGTH + 20]
    assert sample["frames"].shape == (3, 3, 2, 4) and sample["frames"].dtype == np.uint8
    assert numbers(sample) == [17, 20, 22] or numbers(sample) == [17, 20, 21]
    assert sample["is_pad"].tolist() == [False] * 3 and sample["episode"] == 1
    assert sample["time"] == pytest.approx(27 / 30) and len(windows) == 2 * LENGTH
    assert [windows.group_of(i) for i in (0, LENGTH)] == [steady(), steady(7)] and len(windows[5:9]) == 4
    assert repr(windows) == "FrameWindows(2 episodes, 120 samples, deltas=[-0.1, 0.0, 0.05])"


@pytest.mark.parametrize("deltas", [[-2, 0, 2], [-2 / 30, 0, 2 / 30]])
def test_a_window_is_padded_with_the_first_and_the_last_frame_of_its_episode(deltas: list[float]) -> None:
    times = np.arange(LENGTH) / 30
    episodes = [(path_of(times), times[10], times[20]), (path_of(times), times[20], np.inf)]
    windows = FrameWindows(episodes, deltas)  # type: ignore[arg-type]
    found = [(numbers(windows[i]), windows[i]["is_pad"].tolist(), windows[i]["episode"]) for i in (0, 5, 9, 10, 49)]
    assert found == [
        ([10, 10, 12], [True, False, False], 0),
        ([13, 15, 17], [False, False, False], 0),
        ([17, 19, 19], [False, False, True], 0),
        ([20, 20, 22], [True, False, False], 1),
        ([57, 59, 59], [False, False, True], 1),
    ]
    assert {windows.group_of(i) for i in range(len(windows))} == {path_of(times)}


def test_at_a_variable_rate_the_frame_is_the_nearest_in_time() -> None:
    windows = FrameWindows([path_of([0, 0.1, 0.25, 0.3, 0.5, 0.9])], deltas=[-0.1, 0.1])
    with pytest.raises(ValueError, match=r"has no frame at 0\.400 s .*0\.300 \+0\.1.*as ints, in frames"):
        windows[3]
    assert numbers(windows[0]) == [0, 1] and windows[0]["is_pad"].tolist() == [True, False]
    assert numbers(windows[1]) == [0, 2] and windows[1]["time"] == 0.1
    assert numbers(FrameWindows([path_of([0.5])], [0.0])[0]) == [0]


@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])  # of spawned workers, the test of PyAV has some
def test_windows_are_the_same_by_group_in_every_pool(pool: str) -> None:
    def read(grouped: bool, pool: str) -> list[Any]:
        windows: Any = FrameWindows([steady(n) for n in range(4)], [-0.1, 0.0])
        options = {"shuffle": True, "seed": 1, "pool": make_pool(pool)}
        with ShardedDataLoader(GroupReads(windows, 8) if grouped else windows.transform(dict), 16, **options) as loader:
            return [{name: value.tolist() for name, value in batch.items()} for batch in loader]

    assert read(True, pool) == read(False, "inline")


def test_few_frames_are_decoded_in_vain_when_groups_are_read_together() -> None:
    """300 frames, a keyframe each 30: the case of robots, with 4 episodes and 32 batches of 32 windows. A loader groups
    what has ``group_of`` by itself; a transform hides it."""
    ratios = []
    for dataset in (lambda windows: windows.transform(dict), GroupReads, lambda windows: windows):
        windows = FrameWindows([path_of((n + np.arange(300)) / 30) for n in range(4)], [-0.1, 0.0])
        with ShardedDataLoader(dataset(windows), 32, shuffle=True, seed=0) as loader:
            assert len([*loader]) == 38
        ratios.append(sum(video.decoded for video in Video.seen) / (2 * len(windows)))
        Video.seen.clear()
    assert max(ratios[1:]) < 2.5 and max(ratios[1:]) < ratios[0] / 2


def test_a_process_keeps_few_videos_open_and_gives_none_to_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_OPEN", 2)
    windows = FrameWindows([steady(n) for n in range(5)])
    for i in (0, LENGTH, 2 * LENGTH, 0):
        windows[i]
    assert sum(not video.is_closed for video in Video.seen) == 2
    opened = len(Video.seen)
    windows[1], windows[2 * LENGTH]
    assert len(Video.seen) == opened
    pickle.loads(pickle.dumps(windows))[1]
    assert len(Video.seen) == opened + 1
    if hasattr(os, "fork"):
        pid = os.fork()
        if pid == 0:
            windows[1]
            os._exit(len(Video.seen) - opened)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_video_that_is_cut_is_the_error_of_its_samples(on_error: str) -> None:
    windows = FrameWindows([path_of(np.arange(LENGTH) / 30, 50), steady()], [-0.1, 0.0])
    seen, errors = set(), []
    with ShardedDataLoader(GroupReads(windows, 8), 8, on_error=on_error) as loader:
        for batch in with_errors(iter(loader)):
            if isinstance(batch, ValueError):
                errors.append(str(batch))
            else:
                seen |= {(int(e), round(float(t) * 30)) for e, t in zip(batch["episode"], batch["time"], strict=True)}
        skipped = loader.skipped if on_error == "skip" else None
    assert {frame for episode, frame in seen if episode == 0} == {*range(48 if on_error == "raise" else 50)}
    if on_error == "raise":
        assert len(errors) == 2 and "the frame at 1.667 s cannot be read: the file ends before it" in errors[0]
    else:
        assert skipped is not None and len(skipped) == 10 and not errors


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([],), "give a list of videos"),
        (("a.mp4",), "give a list of videos"),
        (([steady()], []), "give a list of videos, and deltas that are finite"),
        (([steady()], [float("nan")]), ".nan.*: give a list of videos, and deltas that are finite numbers"),
        (([steady()], ["now"]), "deltas that are finite numbers"),
        (([path_of([])],), "cannot be read as a video: moov atom not found"),
        (([(steady(), 5.0, 6.0)],), r"has no frames from 5\.0 to 6\.0 s"),
    ],
)
def test_bad_arguments_are_errors(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FrameWindows(*arguments)
    assert sharded_loader.FrameWindows is FrameWindows


def test_without_a_decoder_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "READERS", {"no_such_library": Video})
    with pytest.raises(ImportError, match=r"no_such_library: No module .*pip install av, or torchcodec"):
        FrameWindows([steady()])


def test_torchcodec_is_used_where_it_alone_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.mp4").touch()

    class VideoDecoder:
        """Frame 7 comes late."""

        metadata = types.SimpleNamespace(begin_stream_seconds=1.0, num_frames=20, average_fps=10.0)

        def __init__(self, path: str, num_ffmpeg_threads: int) -> None:
            assert (path, num_ffmpeg_threads) == ("a.mp4", 1)

        def get_frame_at(self, number: int) -> Any:
            data = types.SimpleNamespace(numpy=lambda: np.full((3, 2, 4), number, np.uint8))
            return types.SimpleNamespace(data=data, pts_seconds=1 + number / 10 + 0.06 * (number == 7))

    module: Any = types.ModuleType("torchcodec.decoders")
    module.VideoDecoder = VideoDecoder
    for name in ("torchcodec", "torchcodec.decoders"):
        monkeypatch.setitem(sys.modules, name, module)
    readers = {"no_such_library": Video, "torchcodec.decoders:VideoDecoder": frames.TorchcodecReader}
    monkeypatch.setattr(frames, "READERS", readers)
    windows = FrameWindows(["a.mp4"], [-0.2, 0.0])
    assert numbers(windows[5]) == [3, 5] and windows[5]["time"] == 1.5
    with pytest.raises(ValueError, match=r"a\.mp4: the frame at 1\.700 s .* pip install av"):
        windows[7]


# -- with PyAV ---------------------------------------------------------------------------------------------------------


def level(frame: int) -> int:
    return 20 + frame * 83 % 200


def make(path: Path, ticks: list[int], codec: str = "libx264", **options: str) -> str:
    """A video of grey frames, at so many milliseconds, with B frames and a keyframe each 30."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        stream.codec_context.time_base = stream.time_base = Fraction(1, 1000)
        stream.options = {
            "g": "30",
            "keyint_min": "30",
            "sc_threshold": "0",
            "bf": "2",
            "preset": "ultrafast",
        } | options
        for number, tick in enumerate(ticks):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), level(number), np.uint8), format="rgb24")
            frame.pts, frame.time_base = tick, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return str(path)


class Counting(frames.AvReader):
    """Counts the frames that all readers have decoded."""

    decoded_by_all = 0

    def read(self, number: int) -> Any:
        before = self.decoded
        pixels = super().read(number)
        Counting.decoded_by_all += self.decoded - before
        return pixels


def is_frame(pixels: Any, number: int) -> bool:
    return bool(abs(float(pixels.mean()) - level(number)) < 12)


@with_decoder
@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_frames_are_those_of_their_times(codec: str, suffix: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ticks = np.cumsum(rng.integers(20, 60, 100)).tolist()
    windows = FrameWindows([make(tmp_path / f"a.{suffix}", ticks, codec)], deltas=[-3, 0, 1])
    for i in [*rng.permutation(100).tolist(), 97, 98, 99, 0, 0, 1]:
        sample, around = windows[i], [max(0, i - 3), i, min(99, i + 1)]
        assert sample["frames"].shape == (3, 3, 48, 64)
        assert all(map(is_frame, sample["frames"], around)) and sample["is_pad"].tolist() == [i < 3, False, i == 99]
        assert sample["time"] - windows[0]["time"] == pytest.approx((ticks[i] - ticks[0]) / 1000, abs=0.0011)


@with_decoder
def test_robots_read_windows_with_few_frames_decoded_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "READERS", {"av": Counting})
    Counting.decoded_by_all = 0
    videos = [make(tmp_path / f"{n}.mp4", [round(i * 1000 / 30) for i in range(300)]) for n in range(8)]
    windows = FrameWindows(videos, deltas=[-0.1, 0.0])
    grouped = GroupReads(windows)
    with ShardedDataLoader(grouped, 32, shuffle=True, seed=0) as loader:
        for batch in loader:
            for pixels, time, is_pad in zip(batch["frames"], batch["time"], batch["is_pad"], strict=True):
                frame = round(float(time) * 30)
                assert is_frame(pixels[1].float(), frame) and is_frame(pixels[0].float(), max(0, frame - 3))
                assert is_pad.tolist() == [frame < 3, False]
    assert Counting.decoded_by_all / (2 * len(windows)) < 2.5
    with ShardedDataLoader(grouped, 32, shuffle=True, seed=0, pool=make_pool("spawn")) as loader:
        assert sum(len(batch["time"]) for batch in loader) == len(windows)


@with_decoder
@pytest.mark.parametrize(("suffix", "words"), [("mkv", "the file ends before it"), ("mp4", "Invalid data")])
def test_a_file_that_is_cut_is_named_with_the_time(suffix: str, words: str, tmp_path: Path) -> None:
    whole = make(tmp_path / f"a.{suffix}", [33 * i for i in range(100)], crf="1")
    windows = FrameWindows([whole])
    os.truncate(whole, os.path.getsize(whole) // 2)
    with pytest.raises(ValueError, match=rf"{whole}: the frame at 3\.267 s cannot be read: .*{words}"):
        pickle.loads(pickle.dumps(windows))[99]  # nothing of it is in memory
    (tmp_path / "b.mp4").write_text("no video")
    with pytest.raises(ValueError, match=r"b\.mp4 cannot be read as a video"):
        FrameWindows([tmp_path / "b.mp4"])


def test_a_window_does_not_look_at_all_frames_of_its_video(monkeypatch: pytest.MonkeyPatch) -> None:
    times = np.arange(20_000) / 25
    dataset = FrameWindows([path_of(times, 100_000)], [-0.5, 0.0, 0.02, 7.0])
    monkeypatch.setattr(np, "diff", None)  # of 2.6 million frames, it took 40 ms for each sample
    monkeypatch.setattr(np, "median", None)
    sample = dataset[0]
    assert sample["frames"][:, 0, 0, 0].tolist() == [0, 0, 0, 175] and sample["is_pad"].tolist() == [True, *[False] * 3]
    assert dataset[19_999]["is_pad"].tolist() == [False, False, False, True]
