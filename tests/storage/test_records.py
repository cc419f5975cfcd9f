"""RecordIO shards: every record, also one that holds the magic number. MDS shards: every encoding that needs no code
from the shard. A damaged file is named with the offset or the sample."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import Subject, assert_noticed
from served import serving
from shards import assert_same_samples, closed, write_mds  # noqa: F401

from sharded_loader import RecordFileDataset
from sharded_loader.recordio import MXRecordIO
from sharded_loader.storage.files import LocalFile, ShardError, ShardFile
from sharded_loader.storage.records import MDS, RecordIO, decoder
from sharded_loader.storage.stores import ObjectStore, RemoteFile

MAGIC = (0xCED7230A).to_bytes(4, "little")
RECORDS = [b"a", b"", b"with" + MAGIC + b"inside" + MAGIC, b"x" * 3000, MAGIC * 3, b"last"]


def write(path: Path) -> None:
    with MXRecordIO(str(path), "w") as file:
        for record in RECORDS:
            file.write(record)


def read(file: ShardFile, rows: list[int]) -> list[bytes]:
    try:
        return RecordIO().read(file, RecordIO().index(file), rows)
    finally:
        file.close()


def test_records_are_those_of_the_file_local_or_remote(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.rec", [5, 2, 0, 1, 4, 3, 2]
    write(path)
    assert list(RecordFileDataset(path)) == RECORDS
    assert read(LocalFile(str(path)), rows) == [RECORDS[row] for row in rows]
    assert read(LocalFile(str(path)), []) == []
    with serving() as served:
        served.files["/a.rec"] = path.read_bytes()
        store, url = ObjectStore(), f"{served.url}/a.rec"
        assert read(RemoteFile(store, url, store.stat(url)), rows) == [RECORDS[row] for row in rows]


def test_a_damaged_file_is_named_with_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    write(path)
    whole = path.read_bytes()
    file = LocalFile(str(path))
    index = RecordIO().index(file)
    path.write_bytes(whole[:12] + b"nonsense" + whole[20:])
    with pytest.raises(ShardError, match=r"a\.rec, offset 12: no record at 12"):
        RecordIO().read(file, index, [1])
    file.close()
    path.write_bytes(whole[:9] + b"x" + whole[10:])
    with pytest.raises(ShardError, match=r"a\.rec, offset 0: the record is not as a writer leaves it"):
        read(LocalFile(str(path)), [0])
    path.write_bytes(whole[:-3])
    with pytest.raises(ShardError, match=r"a\.rec, offset \d+: the part at .* the file ends at"):
        read(LocalFile(str(path)), [0])
    path.write_bytes(b"nonsense" * 9)
    with pytest.raises(ShardError, match=r"a\.rec, offset 0: .*Is it a RecordIO file"):
        read(LocalFile(str(path)), [0])


def read_mds(path: Path, rows: list[int]) -> list[Any]:
    file = LocalFile(str(path))
    try:
        return MDS().read(file, MDS().index(file), rows)
    finally:
        file.close()


def test_columns_of_fixed_and_of_any_size_are_read(tmp_path: Path) -> None:
    columns = {"image": ("bytes", None), "label": ("int", 8), "text": ("str", None), "weight": ("float32", 4)}
    expected = [
        {"image": bytes([i]) * i, "label": i - 1, "text": "é" * i, "weight": np.float32(i / 2)} for i in range(4)
    ]
    rows = [
        [one["image"], np.int64(one["label"]).tobytes(), one["text"].encode(), one["weight"].tobytes()]
        for one in expected
    ]
    write_mds(tmp_path / "a.mds", columns, rows)
    assert_same_samples(read_mds(tmp_path / "a.mds", [3, 0, 2, 1, 0]), [expected[i] for i in (3, 0, 2, 1, 0)])
    write_mds(tmp_path / "empty.mds", columns, [])
    assert read_mds(tmp_path / "empty.mds", []) == []


ARRAY = np.arange(6, dtype=np.int16).reshape(2, 3)

ENCODED: dict[str, tuple[bytes, Any]] = {
    "bytes": (b"ab", b"ab"),
    "str": ("é".encode(), "é"),
    "int": ((-5).to_bytes(8, "little", signed=True), -5),
    "uint8": (b"\xff", np.uint8(255)),
    "float64": (np.float64(0.5).tobytes(), np.float64(0.5)),
    "str_int": (b"123456789012345678901", 123456789012345678901),
    "str_float": (b"0.25", 0.25),
    "str_decimal": (b"0.10", Decimal("0.10")),
    "json": (json.dumps({"a": [1]}).encode(), {"a": [1]}),
    "ndarray": (bytes([17, 2 << 2, 2, 3]) + ARRAY.tobytes(), ARRAY),
    "ndarray:int16": (bytes([2 << 2 | 1, 2, 0, 3, 0]) + ARRAY.tobytes(), ARRAY),
    "ndarray:int16:2,3": (ARRAY.tobytes(), ARRAY),
}


@pytest.mark.parametrize("encoding", ENCODED)
def test_an_encoding_is_decoded(encoding: str) -> None:
    raw, expected = ENCODED[encoding]
    assert_same_samples([{"x": decoder(encoding, "a.mds")(raw)}], [{"x": expected}])


def test_images_are_decoded() -> None:
    Image = pytest.importorskip("PIL.Image")
    import io

    image = Image.fromarray(np.arange(27, dtype=np.uint8).reshape(3, 3, 3))
    raw = np.array([3, 3, 3], "<u4").tobytes() + b"RGB" + image.tobytes()
    assert np.array_equal(np.asarray(decoder("pil", "a.mds")(raw)), np.asarray(image))
    png = io.BytesIO()
    image.save(png, "PNG")
    assert np.array_equal(np.asarray(decoder("png", "a.mds")(png.getvalue())), np.asarray(image))


@pytest.mark.parametrize(("encoding", "said"), [("pkl", "run code"), ("spectrum", "unknown")])
def test_an_encoding_that_is_not_read_is_named(tmp_path: Path, encoding: str, said: str) -> None:
    write_mds(tmp_path / "a.mds", {"x": (encoding, None)}, [[b"ab"]])
    with pytest.raises(
        ShardError, match=rf"a\.mds, at byte 12, has a column of unsupported encoding '{encoding}'.*{said}"
    ):
        read_mds(tmp_path / "a.mds", [0])


@pytest.mark.parametrize("content", [b"", b"ab", b"nonsense" * 9, b"\0" * 100, b"\x02\0\0\0" + b"\xff" * 60])
def test_what_is_no_mds_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.mds").write_bytes(content)
    with pytest.raises(ShardError, match=r"a\.mds (is not an MDS file|ends within)"):
        read_mds(tmp_path / "a.mds", [0])


@pytest.mark.parametrize(
    ("sizes", "said"), [((9000, 4), "9012 bytes, and it has 16"), ((4, 9000), "9012"), ((2, 1), "11")]
)
def test_sizes_that_do_not_fit_their_sample_are_an_error(tmp_path: Path, sizes: tuple[int, int], said: str) -> None:
    whole = np.array([4, 4], "<u4").tobytes() + b"aaaabbbb"
    write_mds(tmp_path / "a.mds", {"a": ("bytes", None), "b": ("bytes", None)}, [[b"aaaa", b"bbbb"]] * 2)
    content = (tmp_path / "a.mds").read_bytes()
    damaged_one = np.array(sizes, "<u4").tobytes() + whole[8:]
    (tmp_path / "a.mds").write_bytes(content[: -len(whole)] + damaged_one)
    assert read_mds(tmp_path / "a.mds", [0]) == [{"a": b"aaaa", "b": b"bbbb"}]
    with pytest.raises(ShardError, match=rf"a\.mds is damaged: sample 1, bytes \d+ to {len(content)}.*{said}"):
        read_mds(tmp_path / "a.mds", [0, 1])


@pytest.mark.parametrize(("encoding", "size"), [("int", 4), ("float32", 8), ("ndarray:int16:2,3", 11), ("bytes", -3)])
def test_a_size_that_does_not_fit_its_encoding_is_an_error(tmp_path: Path, encoding: str, size: int) -> None:
    write_mds(tmp_path / "a.mds", {"x": (encoding, size)}, [[bytes(12)]])
    fits = size > 0
    said = rf"need {size} bytes, and it has 12" if fits else rf"\(its column 'x' of {encoding} has {size} bytes; byte"
    with pytest.raises(ShardError, match=said):
        read_mds(tmp_path / "a.mds", [0])


def test_a_value_that_cannot_be_decoded_names_its_sample(tmp_path: Path) -> None:
    write_mds(tmp_path / "a.mds", {"x": ("json", None)}, [[b"1"], [b"{"]])
    with pytest.raises(ShardError, match=r"a\.mds is damaged: sample 1, bytes .*JSONDecodeError"):
        read_mds(tmp_path / "a.mds", [1])


def mds_subject(folder: Path) -> Subject:
    columns = {"a": ("bytes", None), "n": ("int", 8), "t": ("str", None), "w": ("ndarray:int16:4", 8)}
    rows = [
        [bytes([i]) * i, np.int64(i).tobytes(), b"text %d" % i, np.arange(4, dtype="<i2").tobytes()] for i in range(40)
    ]
    write_mds(folder / "a.mds", columns, rows)
    content = (folder / "a.mds").read_bytes()
    names = content.index(b'"a"')
    begin = content.index(b"]}") + 2
    return Subject("a.mds", content, [(names, names + 20), (begin, len(content))])


@pytest.mark.slow
def test_damage_is_noticed(tmp_path: Path) -> None:
    """Names of columns and bytes inside samples have no checksum."""
    assert_noticed(mds_subject(tmp_path), range(1000, 4000), tmp_path)
