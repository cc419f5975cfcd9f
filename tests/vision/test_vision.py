"""Pictures: the same from workers and from a device, whose decoder is simulated; a broken one is named."""

from __future__ import annotations

import io
import random
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_pool
from programs import run_forked, run_script
from simulated import KIND, Machine, SimulatedStreams

from sharded_loader import ImageFolderDataset, ImageRecordDataset, Placement, ShardDataset, ShardedDataLoader, vision
from sharded_loader.extend import engine
from sharded_loader.memory.codec import SlotWriter, decode, encode
from sharded_loader.recordio import MXRecordIO, pack
from sharded_loader.recordio.images import decode_image
from sharded_loader.torch import DataLoader
from tests.storage.shards import write_tar

pytest.importorskip("PIL")
from PIL import Image

TURNED = Image.Exif()
TURNED[0x112] = 6  # by 90 degrees


def encoded(number: int, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """A picture, whose size depends on its number."""
    squares = np.random.default_rng(number).integers(0, 256, (2 + number % 3, 3, 3))
    file = io.BytesIO()
    Image.fromarray(np.kron(squares, np.ones((8, 8, 1))).astype(np.uint8)).convert(mode).save(file, kind, **options)
    return file.getvalue()


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


PLAIN = {
    "RGB": encoded(0),
    "grey": encoded(1, mode="L"),
    "progressive": encoded(2, progressive=True),
    "turned": encoded(3, exif=TURNED),
    "with bytes behind": encoded(4) + bytes(40),
}
"""JPEGs that travel to a GPU."""

OTHERS = {
    "CMYK": encoded(0, mode="CMYK"),
    "without conversion": encoded(1, keep_rgb=True),
    "PNG": encoded(2, "PNG"),
    "PNG with alpha": encoded(3, "PNG", "RGBA"),
    "PNG, turned": encoded(4, "PNG", exif=TURNED),
    "WebP": encoded(5, "WEBP"),
    "GIF": encoded(6, "GIF"),
}
"""Pictures that the workers decode."""

TABLE = PLAIN["RGB"].index(b"\xff\xc4") + 7
SECOND = PLAIN["progressive"].rindex(b"\xff\xda")

BROKEN = {
    "no picture": b"no picture at all",
    "empty": b"",
    "a beginning": b"\xff\xd8\xff\xe0",
    "cut off": truncated(encoded(0)),
    "cut off behind a thumbnail": truncated(encoded(0, exif=b"Exif\0\0" + b"\xff\xda\xff\xd9")),
    "PNG, cut off": truncated(encoded(2, "PNG")),
    "a table that no file has": PLAIN["RGB"][:TABLE] + b"\xff" + PLAIN["RGB"][TABLE + 1 :],
    "without a size": (part := PLAIN["RGB"].partition(b"\xff\xc0"))[0] + part[1] + part[2][:3] + bytes(4) + part[2][7:],
    "a marker in a scan": PLAIN["RGB"][:-9] + b"\xff\xc0" + PLAIN["RGB"][-7:],
    "a last scan of nothing": PLAIN["progressive"][: SECOND + 5] + b"\x09" + PLAIN["progressive"][SECOND + 6 :],
}


def pixels_of(data: bytes, flag: int = 1) -> np.ndarray[Any, Any]:
    """The pixels that `unpack_img` finds, with the channels first."""
    pixels = decode_image(data, flag, "")
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def shown(pixels: Any) -> tuple[Any, ...]:
    """The shape of a picture, and a checksum of its values."""
    array = np.asarray(pixels)
    return (*array.shape, zlib.crc32(array.tobytes()))


def reference(data: bytes, flag: int = 1) -> tuple[Any, ...]:
    """What a decoded picture must be `shown` as."""
    return shown(pixels_of(data, flag))


def folder_of(root: Path, pictures: dict[str, bytes]) -> Path:
    """One class of pictures; here and below they are sorted by their names."""
    (root / "class").mkdir()
    for number, name in enumerate(sorted(pictures)):
        (root / "class" / f"{number:03}.jpg").write_bytes(pictures[name])
    return root


def records_of(root: Path, pictures: dict[str, bytes]) -> Path:
    with MXRecordIO(root / "pictures.rec", "w") as file:
        for number, name in enumerate(sorted(pictures)):
            file.write(pack((0, float(number), 70 + number, 0), pictures[name]))
    return root / "pictures.rec"


def tar_of(root: Path, pictures: dict[str, bytes]) -> Path:
    members = {}
    for number, name in enumerate(sorted(pictures)):
        members |= {f"{number:03}.left.jpg": pictures[name], f"{number:03}.cls": b"%d" % number}
    write_tar(root / "pictures.tar", members)
    return root / "pictures.tar"


DATASETS: dict[str, Callable[[Path, dict[str, bytes], str], Any]] = {
    "records": lambda root, pictures, decode: ImageRecordDataset(records_of(root, pictures), decode=decode),
    "folder": lambda root, pictures, decode: ImageFolderDataset(folder_of(root, pictures), decode=decode),
    "tar": lambda root, pictures, decode: ShardDataset(tar_of(root, pictures), decode=decode, index_folder=root),
}


def picture_of(sample: Any) -> Any:
    """The picture of a sample, or the pictures of a batch."""
    return sample["left.jpg"] if isinstance(sample, dict) else sample[0]


def decoder_of(machine: Machine, rejects: Any = ()) -> Any:
    """A decoder of the first device, by its current stream."""
    streams = SimulatedStreams(machine, machine.devices[0])

    def decode_there(parts: list[Any], device: torch.device) -> list[Any]:
        machine.log.append(("decode", streams.caller_stream().name, len(parts)))
        made: list[Any] = []
        for part in parts:
            if part.tobytes() in rejects:
                made.append(None)
                continue
            host = torch.from_numpy(np.ascontiguousarray(pixels_of(part.tobytes())))
            made.append(streams.empty_like(host))
            streams.copy(made[-1], streams.pin(host, host.stride()))
        return made

    return decode_there


@pytest.fixture
def gpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The simulated device, with a decoder; ``decode=KIND`` stands for "cuda"."""
    monkeypatch.setitem(vision.DECODERS, KIND, {"json:loads": decoder_of(machine)})
    return machine


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without CUDA."""
    monkeypatch.setattr(engine, "accelerators", list)


class Seen:
    """The pictures of batches, read late, on the device."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.found = machine, list[Any]()

    def read(self, pictures: list[torch.Tensor]) -> None:
        assert type(pictures) is vision.Pictures
        for picture in pictures:
            self.machine.kernel(self.machine.devices[0], picture, lambda pixels: self.found.append(shown(pixels)))

    def done(self) -> list[Any]:
        self.machine.finish()
        return self.found


MANY = {f"{number:02}": encoded(number) for number in range(22)}
EXPECTED = [reference(data) for data in MANY.values()]


def loader_of(kind: str, dataset: Any, **options: Any) -> Any:
    """A loader of batches of four. ``kind`` says how it reads, and which face it has."""
    face = DataLoader if kind.startswith("drop-in") else ShardedDataLoader
    workers: dict[str, Any] = {} if kind.endswith("inline") else {"num_workers": 2}
    if kind.endswith("threads"):
        workers["thread_pool"] = True
    elif workers:  # forked processes have what a test has replaced
        forked = {"pool": make_pool("fork", 2)}
        workers = forked if face is ShardedDataLoader else workers | {"multiprocessing_context": "fork"}
    return face(dataset, 4, **workers, **options)


LOADERS = ["inline", "threads", "processes", "drop-in inline", "drop-in threads", "drop-in processes"]


def read(loader: Any, use: Callable[[Any], Any]) -> list[Any]:
    """What ``use`` makes of each batch. No batch is held longer."""
    used = [use(batch) for batch in loader]
    if isinstance(loader, ShardedDataLoader):
        loader.close()
    return used


# -- the same pictures -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS])
@pytest.mark.parametrize("flag", [1, 0])
def test_pictures_are_those_of_unpack_img(kind: str, flag: int) -> None:
    data = (PLAIN | OTHERS)[kind]
    picture = vision.PictureDecoder("cpu", flag)(data, kind)
    assert (picture.dtype, shown(picture)) == (torch.uint8, reference(data, flag))
    assert shown(vision.PictureDecoder("cuda", flag)(data, kind).to("cpu")) == shown(picture)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("name", DATASETS)
def test_without_a_gpu_the_workers_decode(name: str, kind: str, tmp_path: Path) -> None:
    def use(batch: Any) -> Any:
        pictures = picture_of(batch)
        assert type(pictures) is vision.Pictures and all(type(picture) is torch.Tensor for picture in pictures)
        return list(map(shown, pictures.to("cpu")))

    dataset = DATASETS[name](tmp_path, PLAIN | OTHERS, "cuda")
    assert sum(read(loader_of(kind, dataset), use), []) == [reference(data) for _, data in SORTED]


SORTED = sorted((PLAIN | OTHERS).items())


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("name", DATASETS)
def test_a_device_decodes_the_same_pictures_in_order(gpu: Machine, name: str, kind: str, tmp_path: Path) -> None:
    seen = Seen(gpu)
    loader = loader_of(kind, DATASETS[name](tmp_path, MANY, KIND), device=gpu.devices[0])
    read(loader, lambda batch: (seen.read(picture_of(batch)), gpu.run(3)))
    assert seen.done() == EXPECTED
    gpu.empty_cache()
    assert gpu.allocated == 0
    where = {entry[1:] for entry in gpu.log if entry[0] == "decode"}
    assert where == {(f"{gpu.devices[0]} 1", 4), (f"{gpu.devices[0]} 1", 2)}  # on the copy stream, a batch at once


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("kind", ["inline", "drop-in processes"])
def test_without_a_device_a_batch_decodes_where_it_is_sent(gpu: Machine, name: str, kind: str, tmp_path: Path) -> None:
    def use(batch: Any) -> None:
        pictures = picture_of(batch)
        assert type(pictures) is vision.EncodedPictures
        on_cpu = list(map(shown, pictures))
        assert on_cpu == list(map(shown, pictures[:])) == list(map(shown, pictures.to("cpu")))
        assert shown(pictures[-1]) == on_cpu[-1]
        with SimulatedStreams(gpu, gpu.devices[0]).current():
            seen.read(pictures.to(gpu.devices[0], non_blocking=True))

    seen = Seen(gpu)
    read(loader_of(kind, DATASETS[name](tmp_path, MANY, KIND)), use)
    assert seen.done() == EXPECTED


def test_a_device_transform_gets_decoded_pictures(gpu: Machine, tmp_path: Path) -> None:
    def transform(batch: Any) -> Any:
        shapes.append([tuple(picture.shape) for picture in batch[0]])
        return batch

    shapes: list[Any] = []
    placement = Placement(gpu.devices[0], device_transform=transform)
    read(loader_of("processes", DATASETS["folder"](tmp_path, MANY, KIND), device=placement), lambda batch: None)
    assert sum(shapes, [])[:22] == [picture[:3] for picture in EXPECTED]  # the next epoch follows


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["processes", "drop-in processes"])
def test_a_run_resumes_in_the_middle(gpu: Machine, kind: str, tmp_path: Path) -> None:
    dataset, seen, again = DATASETS["folder"](tmp_path, MANY, KIND), Seen(gpu), Seen(gpu)

    def shuffled() -> Any:
        return loader_of(kind, dataset, device=gpu.devices[0], shuffle=True, seed=3)

    read(shuffled(), lambda batch: seen.read(batch[0]))
    first, state = shuffled(), None
    for number, _ in enumerate(first):
        if number == 1:
            state = first.state_dict()
            break
    second = shuffled()
    second.load_state_dict(state)
    read(second, lambda batch: again.read(batch[0]))
    if isinstance(first, ShardedDataLoader):
        first.close()
    assert again.done() == seen.done()[8:]


# -- how a batch travels -----------------------------------------------------------------------------------------------


def test_a_batch_is_one_buffer_in_its_slot() -> None:
    pictures = [vision.Picture(encoded(number), "a name", "json:loads") for number in range(100)]
    memory = np.zeros(1 << 20, np.uint8)
    slot = SlotWriter(memory)
    batch = vision.Picture.assemble_samples(pictures, slot.empty)
    assert isinstance(batch, vision.EncodedPictures) and np.shares_memory(batch.buffer, memory)
    sent = encode({"jpg": batch}, slot)
    assert (len(sent.places), sent.buffers) == (2, ())  # the bytes and the offsets
    names = len("a name\0") * len(pictures)
    assert len(sent.pickled) < names + 300  # nothing else for each picture
    arrived = decode(sent.pickled, [memory[begin : begin + size] for begin, size in sent.places])["jpg"]
    assert list(map(shown, arrived)) == [reference(picture.data) for picture in pictures]


def test_workers_need_no_torch(tmp_path: Path) -> None:
    program = f"""
        import sys
        import numpy as np
        from sharded_loader.vision import Picture
        Picture.assemble_samples([Picture({encoded(0)!r}, "a name", "json:loads")], np.empty)
        print("torch" in sys.modules)
    """
    assert run_script(tmp_path / "program.py", program).stdout == "False\n"


# -- what a device cannot decode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PLAIN)
def test_common_jpegs_travel(kind: str) -> None:
    assert vision.is_common_jpeg(PLAIN[kind])


@pytest.mark.parametrize("kind", OTHERS | BROKEN)
def test_other_bytes_do_not_travel(kind: str) -> None:
    assert not vision.is_common_jpeg((OTHERS | BROKEN)[kind])


def test_no_beginning_of_a_jpeg_travels() -> None:
    whole = PLAIN["RGB"]
    assert [end for end in range(len(whole)) if vision.is_common_jpeg(whole[:end])] == []


def test_no_damaged_jpeg_travels_that_pillow_rejects() -> None:
    rng, travelled = random.Random(7), 0
    for _ in range(2000):
        data = bytearray(PLAIN[rng.choice([*PLAIN])])
        place = rng.randrange(2, len(data))
        data[place : place + rng.choice((0, 1, 9))] = rng.choice(
            (b"", b"\xff", b"\0", rng.randbytes(rng.randint(1, 9)))
        )
        if vision.is_common_jpeg(bytes(data)):
            pixels_of(bytes(data))  # does not raise
            travelled += 1
    assert travelled > 500


@pytest.mark.parametrize(
    "on_error", ["replace", lambda failed: (vision.Picture(MANY["00"], "a name", "json:loads"), 0)]
)
@pytest.mark.parametrize("kind", LOADERS[:3])
def test_a_damaged_jpeg_is_replaced_and_counted(gpu: Machine, kind: str, on_error: Any, tmp_path: Path) -> None:
    pictures, seen = MANY | {"06": BROKEN["a table that no file has"]}, Seen(gpu)
    loader = loader_of(kind, DATASETS["folder"](tmp_path, pictures, KIND), device=gpu.devices[0], on_error=on_error)
    read(loader, lambda batch: seen.read(batch[0]))
    found = seen.done()
    others = EXPECTED[:1] if callable(on_error) else EXPECTED[4:6] + EXPECTED[7:8]
    assert found[:6] + found[7:] == EXPECTED[:6] + EXPECTED[7:] and found[6] in others
    assert [index for index, _ in loader.skipped] == [6] and loader.stats().skipped_samples == 1


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("where", ["cpu", KIND])
@pytest.mark.parametrize("name", DATASETS)
def test_what_is_no_picture_is_left_out_by_on_error(
    gpu: Machine, name: str, where: str, kind: str, tmp_path: Path
) -> None:
    """The worker finds it, wherever the others are decoded."""
    pictures = {number: encoded(0) for number in ("0", "1", "2", "3")} | {"2": BROKEN[kind]}
    dataset, sizes = DATASETS[name](tmp_path, pictures, where), list[int]()
    loader = loader_of("inline", dataset, on_error="skip", device=gpu.devices[0] if where == KIND else None)
    read(loader, lambda batch: sizes.append(len(picture_of(batch))))
    gpu.finish()
    [(index, error)] = loader.skipped
    assert (sizes, index) == ([3], 2)
    named = {"records": "pictures.rec, record 2 with id 72", "folder": "class/002.jpg", "tar": "sample '002', field"}
    assert named[name] in str(error) and "do not decode as an image" in str(error)


def test_pillow_decodes_what_the_device_rejects(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [vision.Picture(data, "a name", "json:loads") for data in MANY.values()]
    rejected = list(MANY.values())[3::5]
    monkeypatch.setitem(vision.DECODERS[KIND], "json:loads", decoder_of(gpu, rejected))
    copied: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **_: copied.append(self) or self)
    seen = Seen(gpu)
    with SimulatedStreams(gpu, gpu.devices[0]).current():
        seen.read(vision.Picture.assemble_samples(pictures, np.empty).to(gpu.devices[0]))
    assert seen.done() == EXPECTED
    assert list(map(shown, copied)) == EXPECTED[3::5]


def test_a_device_without_memory_decodes_a_batch_again(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def decode_there(parts: list[Any], device: torch.device) -> Any:
        first = bytes(np.asarray(parts[0]))
        calls.append(first)
        if calls.count(first) == 1 and len({*calls}) in (2, 4):  # two batches, each at the first attempt
            raise torch.OutOfMemoryError("simulated")
        return decoder_of(gpu)(parts, device)

    calls, seen = list[bytes](), Seen(gpu)
    monkeypatch.setitem(vision.DECODERS[KIND], "json:loads", decode_there)
    loader = loader_of("threads", DATASETS["folder"](tmp_path, MANY, KIND), device=gpu.devices[0])
    read(loader, lambda batch: seen.read(batch[0]))
    assert seen.done() == EXPECTED and len(calls) > 7


def test_a_picture_that_passes_and_that_nobody_decodes_is_the_error_of_its_batch(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hidden = BROKEN["a table that no file has"]
    monkeypatch.setattr(vision, "is_common_jpeg", lambda data: True)
    pictures = MANY | {"06": hidden}
    monkeypatch.setitem(vision.DECODERS[KIND], "json:loads", decoder_of(gpu, [hidden]))
    loader, labels = loader_of("processes", DATASETS["records"](tmp_path, pictures, KIND), device=gpu.devices[0]), []
    batches = iter(loader)
    gpu.kernel(gpu.devices[0], next(batches)[1], lambda found: labels.extend(found.tolist()))
    with pytest.raises(ValueError, match='record 6 with id 76: .*, nor for json.*decode="cpu"') as raised:
        next(batches)
    assert "batch 1" in "".join(raised.value.__notes__)
    for _, found in batches:
        gpu.kernel(gpu.devices[0], found, lambda found: labels.extend(found.tolist()))
    gpu.finish()
    loader.close()
    assert labels == [*range(4), *range(8, 22)]


# -- decoders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has CUDA and no library that decodes on it."""
    monkeypatch.setattr(engine, "accelerators", lambda: [torch.device("cuda", 0)])
    for name in ("torchcodec", "torchcodec.decoders", "nvidia", "nvidia.nvimgcodec"):
        monkeypatch.setitem(sys.modules, name, None)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """A module in the place of a library's, also as an attribute of its package."""
    package, _, last = name.partition(".")
    modules = ModuleType(package), ModuleType(name)
    vars(modules[1]).update(attributes)
    setattr(modules[0], last, modules[1])
    monkeypatch.setitem(sys.modules, package, modules[0])
    monkeypatch.setitem(sys.modules, name, modules[1])


@pytest.mark.usefixtures("with_cuda")
@pytest.mark.parametrize("name", DATASETS)
def test_a_missing_decoder_is_an_error_when_the_dataset_is_made(name: str, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"pip install torchcodec>=0\.16, or nvidia-nvimgcodec-cu12\[all\]"):
        DATASETS[name](tmp_path, MANY, "cuda")


@pytest.mark.parametrize("decode", ["cpu", "cuda"])
def test_pillow_is_needed(decode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs Pillow: pip install pillow"):
        vision.PictureDecoder(decode)


@pytest.mark.parametrize("decode", ["gpu", "cuda:1", "", None])
def test_an_unknown_decoder_is_an_error(decode: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='give "cpu" or "cuda". The loader\'s device= says which GPU'):
        ImageFolderDataset(tmp_path, decode=decode)
    with pytest.raises(ValueError, match="flag=2 is unknown"):
        ImageFolderDataset(tmp_path, flag=2)


@pytest.mark.usefixtures("with_cuda")
def test_an_old_torchcodec_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "torchcodec.decoders")
    with pytest.raises(ImportError, match="torchcodec.decoders: module .* has no attribute 'decode_jpeg'"):
        vision.PictureDecoder("cuda")
    install(monkeypatch, "nvidia.nvimgcodec", Decoder=None)
    assert vision.PictureDecoder("cuda")(encoded(0), "a name").decoder == "nvidia.nvimgcodec:Decoder"


def test_torchcodec_decodes_a_batch_with_one_call_and_finds_what_it_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode_jpeg(source: list[torch.Tensor], *, mode: str, device: torch.device) -> list[torch.Tensor]:
        assert mode == "RGB" and all(part.dtype == torch.uint8 and part.dim() == 1 for part in source)
        calls.append(len(source))
        if any(part.tolist() == [1] for part in source):
            raise RuntimeError("Failed to decode batch: 6")
        if any(part.tolist() == [2] for part in source):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [part.to(device) for part in source]

    calls: list[int] = []
    install(monkeypatch, "torchcodec.decoders", decode_jpeg=decode_jpeg)
    call = vision.DECODERS["cuda"]["torchcodec.decoders:decode_jpeg"]
    parts = [np.full(5, number, np.uint8) for number in range(8)]
    assert [int(found[0]) for found in call(parts, "cpu") if found is not None] == [*range(8)]
    assert calls == [8]
    parts[5] = np.ones(1, np.uint8)
    assert [found is None for found in call(parts, "cpu")] == [number == 5 for number in range(8)]
    assert max(calls[1:]) == 8 and len(calls) <= 8
    with pytest.raises(torch.OutOfMemoryError):  # the loader makes room, and tries the batch again
        call([np.full(1, 2, np.uint8)], "cpu")


def test_nvimgcodec_decodes_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoder:
        def __init__(self, device_id: int, options: str) -> None:
            made.append((device_id, options))

        def decode(self, parts: list[Any], *, params: Any, cuda_stream: int) -> list[Any]:
            assert (params, cuda_stream) == ("params", 77)
            return [None if len(part) < 5 else torch.arange(24, dtype=torch.uint8).view(4, 2, 3) for part in parts]

    made: list[Any] = []
    install(monkeypatch, "nvidia.nvimgcodec", Decoder=Decoder, DecodeParams=lambda: "params")
    current: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(current.append(device)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    call = vision.DECODERS["cuda"]["nvidia.nvimgcodec:Decoder"]
    for _ in range(2):
        first, second = call([np.zeros(9, np.uint8), np.zeros(1, np.uint8)], torch.device("cuda", 3))
        assert second is None and first is not None and first.is_contiguous()
        assert torch.equal(first, torch.arange(24, dtype=torch.uint8).view(4, 2, 3).permute(2, 0, 1))
    assert made == [(3, ":fancy_upsampling=1")]


def test_decode_cuda_decodes_on_cuda() -> None:
    """The whole way, with torch's own names, on a device that is simulated."""
    pictures = [*PLAIN.values(), OTHERS["PNG"], OTHERS["CMYK"]]
    done = run_forked(f"""
        import io, os, sys, tempfile, types
        import numpy as np
        import simulated_cuda
        simulated_cuda.install()
        import torch
        from PIL import Image, ImageOps
        from sharded_loader import ImageFolderDataset, ShardedDataLoader

        def decode_jpeg(source, *, mode, device):
            streams.add(torch.cuda.current_stream(device).name)
            opened = [Image.open(io.BytesIO(part.numpy().tobytes())) for part in source]
            found = [np.array(ImageOps.exif_transpose(image).convert(mode)) for image in opened]
            return [torch.from_numpy(pixels).permute(2, 0, 1).contiguous().pin_memory().to(device) for pixels in found]

        streams = set()
        sys.modules["torchcodec"] = types.ModuleType("torchcodec")
        sys.modules["torchcodec.decoders"] = module = types.ModuleType("torchcodec.decoders")
        module.decode_jpeg = decode_jpeg
        with tempfile.TemporaryDirectory() as root:
            os.mkdir(root + "/class")
            for number, data in enumerate({pictures!r}):
                open(root + "/class/" + str(number) + ".jpg", "wb").write(data)
            with ShardedDataLoader(ImageFolderDataset(root, decode="cuda"), 2, device="cuda", num_workers=1) as loader:
                found = [picture for pictures, _ in loader for picture in pictures]
            expected = [picture.tolist() for picture, _ in ImageFolderDataset(root)]
        print([picture.device.type for picture in found] == ["cuda"] * {len(pictures)}, streams)
        print([picture.cpu().tolist() for picture in found] == expected)
    """)
    assert (done.returncode, done.stdout) == (0, "True {'cuda:0 1'}\nTrue\n"), done.stderr


# -- datasets ----------------------------------------------------------------------------------------------------------


def test_classes_are_the_sorted_subfolders(tmp_path: Path) -> None:
    for name in ("dog/b.PNG", "dog/a.jpeg", "cat/1.jpg", "cat/notes.txt", "cat/._1.jpg", ".hidden/1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(0))
    (tmp_path / "empty").mkdir()
    (tmp_path / "1.jpg").write_bytes(b"")
    dataset = ImageFolderDataset(tmp_path)
    assert dataset.synsets == ["cat", "dog", "empty"]
    shown = [(Path(path).relative_to(tmp_path).as_posix(), label) for path, label in dataset.items]
    assert shown == [("cat/1.jpg", 0), ("dog/a.jpeg", 1), ("dog/b.PNG", 1)]
    assert [label for _, label in dataset.take(2)] == [0, 1]
    assert str(dataset).endswith("3 pictures in 3 classes)")


def test_a_folder_without_classes_or_pictures_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no subfolders: give a folder with a subfolder for each class"):
        ImageFolderDataset(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match=r"no subfolder \(cat\) has pictures \(.jpg, .jpeg, .png, .webp\)"):
        ImageFolderDataset(tmp_path)
    with pytest.raises(FileNotFoundError):
        ImageFolderDataset(tmp_path / "nothing")


def test_labels_of_records_are_numbers_or_arrays(tmp_path: Path) -> None:
    with MXRecordIO(tmp_path / "a.rec", "w") as file:
        file.write(pack((0, [1.0, 2.0], 0, 0), encoded(0)))
        file.write(pack((0, [3.0, 4.0], 0, 0), encoded(3)))
    with ImageRecordDataset(tmp_path / "a.rec", flag=0) as dataset:
        pictures, labels = next(iter(ShardedDataLoader(dataset, 2)))
    assert (tuple(pictures.shape), labels.tolist()) == ((2, 1, 16, 24), [[1, 2], [3, 4]])
    assert str(dataset) == f"ImageRecordDataset({str(tmp_path / 'a.rec')!r}, 2 records)"


def test_only_pictures_of_tar_samples_are_decoded(tmp_path: Path) -> None:
    members = {"0.png": encoded(0, "PNG"), "0.seg.webp": encoded(1, "WEBP"), "0.cls": b"3", "0.jpgs": b"text"}
    write_tar(tmp_path / "a.tar", members)
    sample = ShardDataset(tmp_path / "a.tar", decode="cpu", index_folder=tmp_path)[0]
    assert (sample["cls"], sample["jpgs"], sample["__key__"]) == (b"3", b"text", "0")
    assert [shown(sample[name]) for name in ("png", "seg.webp")] == [
        reference(members["0.png"]),
        reference(members["0.seg.webp"]),
    ]
    records = records_of(tmp_path, MANY)
    with pytest.raises(ValueError, match="it is for tar shards, and these are records; leave it out"):
        ShardDataset(records, decode="cuda", index_folder=tmp_path)
