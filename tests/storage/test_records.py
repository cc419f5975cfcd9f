"""Shards of RecordIO, MDS and text: every record, every encoding that needs no code, every line; damage is named."""

from __future__ import annotations

import gzip
import io
import json
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import Subject, assert_noticed, same
from shards import closed, read_rows, write_mds  # noqa: F401

from sharded_loader import ShardDataset
from sharded_loader.recordio import MXRecordIO
from sharded_loader.storage import records
from sharded_loader.storage.files import LocalFile, ShardError
from sharded_loader.storage.records import MDS, RecordIO, decoder

MAGIC = (0xCED7230A).to_bytes(4, "little")
RECORDS = [b"a", b"", b"with" + MAGIC + b"inside" + MAGIC, b"x" * 3000, MAGIC * 3, b"last"]


read_records, read_mds = partial(read_rows, RecordIO()), partial(read_rows, MDS())


def test_records_are_those_of_the_file_and_damage_is_named_with_its_offset(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.rec", [5, 2, 0, 1, 4, 3, 2]
    with MXRecordIO(str(path), "w") as out:
        for record in RECORDS:
            out.write(record)
    assert read_records(path, rows) == [RECORDS[row] for row in rows] and read_records(path, []) == []
    whole, file = path.read_bytes(), LocalFile(str(path))
    index = RecordIO().index(file)
    path.write_bytes(whole[:12] + b"nonsense" + whole[20:])
    with pytest.raises(ShardError, match=r"a\.rec, offset 12: no record at 12"):
        RecordIO().read(file, index, [1])
    file.close()
    for damaged, said in (
        (whole[:9] + b"x" + whole[10:], r"0: the record is not as a writer leaves it"),
        (whole[:-3], r"\d+: the part at .* the file ends at"),
        (b"nonsense" * 9, "0: .*Is it a RecordIO file"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ShardError, match=rf"a\.rec, offset {said}"):
            read_records(path, [0])


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
    assert same(read_mds(tmp_path / "a.mds", [3, 0, 2, 1, 0]), [expected[i] for i in (3, 0, 2, 1, 0)])
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
    assert same(decoder(encoding, "a.mds")(raw), expected)


def test_images_are_decoded() -> None:
    Image, file = pytest.importorskip("PIL.Image"), io.BytesIO()
    image = Image.fromarray(np.arange(27, dtype=np.uint8).reshape(3, 3, 3))
    image.save(file, "PNG")
    raw = np.array([3, 3, 3], "<u4").tobytes() + b"RGB" + image.tobytes()
    for encoding, value in (("pil", raw), ("png", file.getvalue())):
        assert np.array_equal(np.asarray(decoder(encoding, "a.mds")(value)), np.asarray(image))


@pytest.mark.parametrize("content", [b"", b"ab", b"nonsense" * 9, b"\0" * 100, b"\x02\0\0\0" + b"\xff" * 60])
def test_what_is_no_mds_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.mds").write_bytes(content)
    with pytest.raises(ShardError, match=r"a\.mds (is not an MDS file|ends within)"):
        read_mds(tmp_path / "a.mds", [0])


@pytest.mark.parametrize(
    ("encoding", "size", "value", "said"),
    [
        ("pkl", None, b"ab", r"a\.mds, at byte 12, has a column of unsupported encoding 'pkl'.*run code"),
        ("spectrum", None, b"ab", "at byte 12, has a column of unsupported encoding 'spectrum'.*unknown"),
        ("json", None, b"{", r"a\.mds is damaged: sample 0, bytes .*JSONDecodeError"),
        ("int", 4, bytes(12), "need 4 bytes, and it has 12"),
        ("float32", 8, bytes(12), "need 8 bytes, and it has 12"),
        ("ndarray:int16:2,3", 11, bytes(12), "need 11 bytes, and it has 12"),
        ("bytes", -3, bytes(12), r"\(its column 'x' of bytes has -3 bytes; byte"),
    ],
)
def test_a_column_that_cannot_be_read_is_named(
    tmp_path: Path, encoding: str, size: int | None, value: bytes, said: str
) -> None:
    write_mds(tmp_path / "a.mds", {"x": (encoding, size)}, [[value]])
    with pytest.raises(ShardError, match=said):
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


@pytest.mark.slow
def test_damage_is_noticed(tmp_path: Path) -> None:
    """Names of columns and bytes inside samples have no checksum."""
    columns = {"a": ("bytes", None), "n": ("int", 8), "t": ("str", None), "w": ("ndarray:int16:4", 8)}
    rows = [
        [bytes([i]) * i, np.int64(i).tobytes(), b"text %d" % i, np.arange(4, dtype="<i2").tobytes()] for i in range(40)
    ]
    write_mds(tmp_path / "a.mds", columns, rows)
    content = (tmp_path / "a.mds").read_bytes()
    names, begin = content.index(b'"a"'), content.index(b"]}") + 2
    subject = Subject("a.mds", content, [(names, names + 20), (begin, len(content))])
    assert_noticed(subject, range(1000, 4000), tmp_path)


def lines_of(path: Path, content: bytes, **more: Any) -> ShardDataset:
    path.write_bytes(content)
    return ShardDataset(path, index_folder=path.parent / "indexes", **more)


@pytest.mark.costly(16)
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"one\ntwo", ["one", "two"]),
        (b"one\n\ntwo\n", ["one", "", "two"]),
        (b"one\r\ntwo\r\n\r\nthree", ["one", "two", "", "three"]),
        (b"a\rb\r\nc\r", ["a\rb", "c\r"]),
        ("grün\tschön\nélan\u2028 \x0b\n".encode(), ["grün\tschön", "élan\u2028 \x0b"]),
        (b"\xef\xbb\xbfmark\n\xef\xbb\xbfinside\n", ["mark", "\ufeffinside"]),
        (b"\0\n ", ["\0", " "]),
    ],
)
@pytest.mark.parametrize("piece", [1, 4, records.PIECE])
def test_line_i_is_sample_i(tmp_path: Path, monkeypatch: Any, content: bytes, lines: list[str], piece: int) -> None:
    monkeypatch.setattr(records, "PIECE", piece)
    dataset = lines_of(tmp_path / "words.txt", content)
    assert list(dataset) == lines and dataset.lengths.tolist() == [len(lines)]
    assert dataset.__getitems__(range(len(lines))[::-1]) == lines[::-1]


def test_several_files_have_one_index_and_an_empty_one_has_no_lines(tmp_path: Path) -> None:
    long = "x" * (3 * records.PIECE + 17)  # larger than what is read at once
    for number, content in enumerate(["a\nb\n", "", f"c\n{long}"]):
        (tmp_path / f"{number}.tsv").write_text(content)
    dataset = ShardDataset(str(tmp_path / "*.tsv"), index_folder=tmp_path / "indexes")
    assert list(dataset) == ["a", "b", "c", long] and dataset.lengths.tolist() == [2, 0, 2]
    assert repr(dataset) == "ShardDataset(3 lines shards, 4 samples)"
    for name in ("a.txt", "a.tsv", "a.jsonl", "a.ndjson"):
        assert list(lines_of(tmp_path / name, b"1\n2")) == ["1", "2"]
    assert list(lines_of(tmp_path / "names", b"1\n2", format="lines")) == ["1", "2"]
    with pytest.raises(ValueError, match="'records', 'lines'"):
        lines_of(tmp_path / "names", b"", format="line")


def test_the_index_is_kept_and_takes_four_bytes_for_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = lines_of(tmp_path / "words.txt", b"word\n" * 10_000)
    [kept] = (tmp_path / "indexes").glob("*.arrays")
    assert kept.stat().st_size < 42_000
    monkeypatch.setattr(records.Lines, "index", None)  # not called again
    again = ShardDataset(tmp_path / "words.txt", index_folder=tmp_path / "indexes")
    assert len(again) == len(dataset) == 10_000 and again[9_999] == "word"
    assert again.group_lengths.tolist() == [10_000]
    with pytest.raises(ValueError, match=r"columns=\['x'\]: shards of the format lines have no columns"):
        ShardDataset(tmp_path / "words.txt", index_folder=tmp_path, columns=["x"])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (gzip.compress(b"a\nb\n", mtime=0), " is gzip, no plain text: decompress it"),
        (b"\x28\xb5\x2f\xfd" + bytes(50), " is zstd, no plain text"),
        (b"PK\3\4" + bytes(50), " is zip, no plain text"),
        (b"one\ntwo\n" + bytes(4096), ", offset 8: zeros are there in place of text: .*only a part of it was copied"),
        ("a\nb".encode("utf-16"), " is UTF-16, no plain text: decompress it, or write it as UTF-8"),
        (b"one\ntwo\ngr\xfcn\n", r", line 3, offset 10: this is not UTF-8 .*Convert the file"),
    ],
)
def test_a_file_that_is_no_plain_text_is_an_error(tmp_path: Path, content: bytes, text: str) -> None:
    with pytest.raises(ShardError, match=rf"words\.txt{text}"):
        dataset = lines_of(tmp_path / "words.txt", content)
        assert b"two" in content and dataset[1] == "two"
        dataset[2]
