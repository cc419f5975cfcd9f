"""MXNet's RecordIO files, under the name that MXNet gives them. The code is in `sharded_loader.data.recordio`."""

from sharded_loader.data.recordio import (
    IRHeader,
    MXIndexedRecordIO,
    MXRecordIO,
    RecordFileDataset,
    RecordIOError,
    pack,
    pack_img,
    unpack,
    unpack_img,
)

__all__ = [
    "IRHeader",
    "MXIndexedRecordIO",
    "MXRecordIO",
    "RecordFileDataset",
    "RecordIOError",
    "pack",
    "pack_img",
    "unpack",
    "unpack_img",
]
