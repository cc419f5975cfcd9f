"""RecordIO a second time, straight from the description of the format: what the library is compared with.

    file    := record*
    record  := part(0) | part(1) part(2)* part(3)
    part(f) := magic, f << 29 | length, payload, zeros up to a multiple of 4       little-endian words

A payload is cut at each magic at a multiple of 4 of the payload; the magic itself is left out. Slow and plain: no
seeking, no index, everything in memory. `damage` makes broken files of whole ones.
"""

import random
import struct

from tests.storage.mutations import damaged

MAGIC = b"\x0a\x23\xd7\xce"


def write(records: list[bytes]) -> tuple[bytes, list[int]]:
    """The file, and the offset of each record and of the end."""
    out, offsets = b"", [0]
    for record in records:
        words = [record[at : at + 4] for at in range(0, len(record), 4)]
        parts = [b""]
        for word in words:
            if word == MAGIC:
                parts.append(b"")
            else:
                parts[-1] += word
        for number, part in enumerate(parts):
            flag = 0 if len(parts) == 1 else 1 if number == 0 else 3 if number == len(parts) - 1 else 2
            out += MAGIC + struct.pack("<I", flag * 2**29 + len(part)) + part
            while len(out) % 4:
                out += b"\0"
        offsets.append(len(out))
    return out, offsets


def read_at(data: bytes, offset: int) -> tuple[bytes, int] | None:
    """The record that begins there and the offset of the next one; None if there is no whole record."""
    payload, number = b"", 0
    while True:
        head = data[offset : offset + 8]
        if len(head) < 8 or head[:4] != MAGIC:
            return None
        flag, length = divmod(int.from_bytes(head[4:], "little"), 2**29)
        if flag not in ((0, 1) if number == 0 else (2, 3)):
            return None
        end = offset + 8 + length
        following = end + (-length) % 4
        if following > len(data):
            return None
        payload += (MAGIC if number else b"") + data[offset + 8 : end]
        offset, number = following, number + 1
        if flag in (0, 3):
            return payload, offset


def read(data: bytes) -> tuple[list[bytes], list[int], int | None]:
    """All records up to the first damage, their offsets, and the offset of the damage; None if there is none."""
    records, offsets, offset = list[bytes](), list[int](), 0
    while offset < len(data) and (found := read_at(data, offset)) is not None:
        records.append(found[0])
        offsets.append(offset)
        offset = found[1]
    return records, offsets, offset if offset < len(data) else None


def random_record(rng: random.Random) -> bytes:
    """A payload full of magics, whole and in pieces, at multiples of 4 and beside them."""
    pieces = [MAGIC, MAGIC, MAGIC[:2], MAGIC[1:], b"a", b"abcd", rng.randbytes(rng.randrange(12)), bytes(4)]
    return b"".join(rng.choices(pieces, k=rng.choice([0, 1, 2, 3, 8, 40])))


def damage(data: bytes, rng: random.Random) -> tuple[bytes, int]:
    """The file with one to four changes, and the first offset at which it differs from the whole one."""
    content = data
    for _ in range(rng.choice([1, 1, 2, 4])):
        if not content:
            break
        if rng.random() < 0.3:  # a part that says anything of itself, or a magic
            at = rng.randrange(len(content)) // 4 * 4
            length = rng.choice([0, 1, 4, len(content), 2**29 - 1, rng.randrange(64)])
            inserted = MAGIC + rng.choice([b"", struct.pack("<I", rng.randrange(8) << 29 | length)])
            content = content[:at] + inserted + content[at + len(inserted) // 8 * 8 :]
        else:
            content = damaged(content, rng.randrange(1 << 30))[1]
    differ = (at for at, (one, other) in enumerate(zip(data, content, strict=False)) if one != other)
    return content, next(differ, min(len(data), len(content)))


def damage_index(text: bytes, rng: random.Random) -> bytes:
    """An index that does not fit."""
    lines, by = text.splitlines(keepends=True), rng.choice([1, 4, -4, 8, 1000])
    shifted = [b"%s\t%d\n" % (key, int(offset) + by) for key, offset in (line.split(b"\t") for line in lines)]
    ways = [
        b"".join(shifted),
        damage(text, rng)[0] if text else b"\xff\t",
        b"".join(line for line in lines if rng.random() < 0.5),
        b"".join(rng.sample(lines, len(lines))),
        text + b"99\t%d\n" % rng.choice([2**31, 2**62, 2**63 - 1, 2**63, 10**30]),
        text + text,
        b"",
    ]
    return rng.choice(ways)
