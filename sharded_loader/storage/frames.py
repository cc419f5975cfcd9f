"""`FrameWindows`: windows of video frames, by index.

    video file --READERS--> times of its frames, when the dataset is made
    index -> episode, frame -> times + deltas -> numbers of frames --Reader.read--> (deltas, 3, height, width) of uint8

A frame is found by its own timestamp, so the rate may vary. Frames are read in ascending order: a reader decodes on
from the frame before, and seeks only to a keyframe that lies between. So samples of one video that are read together
(`caching.groups`) cost one pass over it. A process keeps the last `MAX_OPEN` readers. One is used by one thread at a
time, and none survives a fork or a pickle. Decoders have one thread each: the workers are the threads.

What can go wrong: a file without frames is an error when the dataset is made. A frame that is missing, or does not
decode, is the error of its sample, with file and time.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sharded_loader.extend import Array, Dataset
from sharded_loader.extend.data import checked_index
from sharded_loader.recordio.positioned import regular
from sharded_loader.vision import first_importable

MAX_OPEN = 8
"""Number of videos that a process keeps open."""

Path = str | os.PathLike[str]
Index = tuple[Array, Array, Array]
"""Times of the frames of a video in seconds, ascending, and in the file's ticks; the numbers of its keyframes."""


class AvReader:
    """Frames of a video, by PyAV. ``decoded`` is the number of frames decoded so far."""

    def __init__(self, path: str, index: Index | None) -> None:
        import av

        self._container, self.decoded = av.open(regular(path)), 0
        self._stream = self._container.streams.video[0]
        self._stream.codec_context.thread_count = 1
        self.index = index or self._scan()
        self._frame: Any = None
        self._at, self._rest = -2, iter(())  # number of the last frame, and those behind it

    def _scan(self) -> Index:
        packets = [one for one in self._container.demux(self._stream) if one.pts is not None and not one.is_discard]
        ticks = np.array(sorted(one.pts for one in packets), np.int64)
        keys: Array = np.searchsorted(ticks, sorted(one.pts for one in packets if one.is_keyframe))
        return ticks * float(self._stream.time_base), ticks, keys

    def read(self, number: int) -> Array:
        """Return a frame. It costs the frames from the last one, or from a keyframe on."""
        _, ticks, keys = self.index
        key = keys[max(0, int(np.searchsorted(keys, number, side="right")) - 1)]
        if not self._at <= number or key > self._at + 1:
            self._container.seek(int(ticks[key]), stream=self._stream)
            self._at, self._rest = -2, self._container.decode(self._stream)
        while self._at < number:
            self._at, self._frame = -2, next(self._rest, None)  # if it raises, the next one seeks
            if self._frame is None:
                raise ValueError("the file ends before it")
            self.decoded += 1
            self._at = int(np.searchsorted(ticks, self._frame.pts))
        if self._frame.pts != ticks[number]:
            raise ValueError("it is not in the file any more")
        pixels: Array = self._frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
        return pixels

    def close(self) -> None:
        self._container.close()


class TorchcodecReader:
    """Frames of a video, by torchcodec, which lists no timestamps: a variable rate is an error."""

    def __init__(self, path: str, index: Index | None) -> None:
        from torchcodec.decoders import VideoDecoder

        self._decoder = VideoDecoder(regular(path), num_ffmpeg_threads=1)
        known = self._decoder.metadata
        times = known.begin_stream_seconds + np.arange(known.num_frames) / known.average_fps
        self.index: Index = times, np.arange(0), np.arange(0)

    def read(self, number: int) -> Array:
        frame = self._decoder.get_frame_at(number)
        if abs(frame.pts_seconds - self.index[0][number]) * self._decoder.metadata.average_fps > 0.5:
            raise ValueError(f"it is at {frame.pts_seconds:.3f} s, as the rate varies: pip install av for that")
        pixels: Array = frame.data.numpy()
        return pixels

    def close(self) -> None:
        """Do nothing: the decoder closes with its last reference."""


READERS: dict[str, Callable[..., Any]] = {"av": AvReader, "torchcodec.decoders:VideoDecoder": TorchcodecReader}
"""Readers by what they need of a library, the preferred one first."""

_MISSING = "FrameWindows needs a library that decodes videos; {}: pip install av, or torchcodec"


class FrameWindows(Dataset):
    """Map-style dataset of windows of video frames: sample i is around frame i, counted over all episodes.

    A sample is a dict:

        frames    uint8, (len(deltas), 3, height, width), in RGB
        is_pad    bool, (len(deltas),): the window reaches beyond its episode, and the first or last frame stands there
        episode   number of the episode
        time      time of frame i in the file, in seconds

    Read it by `GroupReads`: otherwise almost each sample decodes its video from a keyframe on.

    Args:
        videos: paths; or episodes of longer files, (path, begin, end) in seconds: the frames from begin to before end.
        deltas: offsets of a window's frames from frame i. Floats are seconds, and mean the nearest frame; if all are
            ints, they are frames.

    Raises:
        ImportError: Neither PyAV nor torchcodec is installed.
        ValueError: A file is no video, or an episode has no frames. Reading raises it, with file and time, for a frame
            that does not decode, and where the nearest is off by more than half the median distance of the episode's.

    Example:
        >>> FrameWindows(["a.mp4", "b.mp4"], deltas=[-0.1, 0.0])  # doctest: +SKIP
        FrameWindows(2 episodes, 600 samples, deltas=[-0.1, 0.0])

    Source of the idea: ``delta_timestamps`` of lerobot.
    """

    def __init__(self, videos: Sequence[Path | tuple[Path, float, float]], deltas: Sequence[float] = (0,)) -> None:
        self._deltas, self._readers = np.array(deltas), OrderedDict[Any, Any]()
        self._library = first_importable(READERS, _MISSING)
        is_right = self._deltas.ndim == 1 and len(deltas) > 0 and self._deltas.dtype.kind in "if"
        if isinstance(videos, (str, os.PathLike)) or not (len(videos) and is_right and np.isfinite(self._deltas).all()):
            advice = "give a list of videos, and deltas that are finite numbers, of seconds or of frames, one or more"
            raise ValueError(f"FrameWindows({videos!r}, {deltas!r}): {advice}")
        self._indexes, self._episodes = dict[str, Index](), list[tuple[str, int, int]]()
        self._near = list[float]()  # by episode: the largest distance of a frame to one that is asked for
        for one in videos:
            given, begin, end = one if isinstance(one, tuple) else (one, -np.inf, np.inf)
            path, first, last = os.fspath(given), 0, 0
            try:
                if path not in self._indexes:
                    with self._reader(path) as reader:
                        self._indexes[path] = reader.index
                first, last = np.searchsorted(self._indexes[path][0], (begin, end)).tolist()
            except Exception as error:
                raise ValueError(f"FrameWindows: {path} cannot be read as a video: {error}") from error
            if first >= last:
                raise ValueError(f"FrameWindows: {path} has no frames from {begin} to {end} s")
            self._episodes.append((path, first, last))
            apart = np.diff(self._indexes[path][0][first:last])
            self._near.append(0.501 * float(np.median(apart)) if len(apart) else 0.0)
        self._ends = np.cumsum([last - first for _, first, last in self._episodes])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def group_of(self, index: int) -> str:
        """Return the path of the video that sample ``index`` is in."""
        return self._episodes[self._place(index)[0]][0]

    def _place(self, index: int) -> tuple[int, int]:
        """Return the episode of a sample, and its frame in the episode."""
        index = checked_index(index, len(self))
        episode = int(np.searchsorted(self._ends, index, side="right"))
        return episode, index - int(self._ends[episode - 1] if episode else 0)

    def _window(self, index: int) -> tuple[str, Array, dict[str, Any]]:
        """Return the video of a sample, the numbers of its frames, and its other fields."""
        (episode, frame), deltas = self._place(index), self._deltas
        path, first, last = self._episodes[episode]
        times = self._indexes[path][0][first:last]
        if deltas.dtype.kind == "i":
            numbers = (frame + deltas).clip(0, last - first - 1)
            is_pad = numbers != frame + deltas
        else:
            wanted, near = times[frame] + deltas, self._near[episode]
            after = np.searchsorted(times, wanted).clip(1, max(1, len(times) - 1))
            numbers = (after - ((times[after - 1] + times[after % len(times)]) / 2 >= wanted)).clip(0, len(times) - 1)
            is_pad = (wanted < times[0] - near) | (wanted > times[-1] + near)
            for at in np.flatnonzero(~is_pad & (np.abs(times[numbers] - wanted) > near))[:1].tolist():
                asked, found = f"{wanted[at]:.3f} s ({times[frame]:.3f} {deltas[at]:+})", f"{times[numbers[at]]:.3f} s"
                raise ValueError(
                    f"{path} has no frame at {asked}, the nearest is at {found}: give deltas as ints, in frames"
                )
        return path, first + numbers, {"is_pad": is_pad, "episode": episode, "time": float(times[frame])}

    @contextlib.contextmanager
    def _reader(self, path: str) -> Iterator[Any]:
        """Lend a reader of a video to this thread. One that raises is not used again."""
        key = os.getpid(), path  # in a forked child, the position of an open file is the parent's, too
        reader = self._readers.pop(key, None) or READERS[self._library](path, self._indexes.get(path))
        yield reader
        self._readers[key] = reader
        while len(self._readers) > MAX_OPEN:
            self._readers.popitem(last=False)[1].close()

    def __getitem__(self, index: Any) -> Any:
        return self._part(index) if isinstance(index, slice) else self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return many samples. Each frame is decoded once."""
        windows, frames = [self._window(index) for index in indices], dict[tuple[str, int], Array]()
        for path in {path for path, *_ in windows}:
            wanted = sorted({number for one, numbers, _ in windows if one == path for number in numbers.tolist()})
            number = wanted[0]
            try:
                with self._reader(path) as reader:
                    for number in wanted:
                        frames[path, number] = reader.read(number)
            except Exception as error:
                where = f"{path}: the frame at {self._indexes[path][0][number]:.3f} s"
                raise ValueError(f"{where} cannot be read: {error}") from error
        return [
            {"frames": np.stack([frames[path, number] for number in numbers.tolist()]), **others}
            for path, numbers, others in windows
        ]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_readers": OrderedDict()}

    def __repr__(self) -> str:
        return f"FrameWindows({len(self._episodes)} episodes, {len(self)} samples, deltas={self._deltas.tolist()})"
