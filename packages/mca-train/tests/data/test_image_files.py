"""Pixels of files are what people see, as transformers' ``load_image`` reads them, or the file is refused."""

import re
import struct
import zlib

import numpy as np
import pytest
from image_samples import asked, load, streamed, text
from PIL import Image
from transformers.image_utils import load_image

from mca_config.errors import McaError
from mca_train.data.image_files import open_image
from mca_train.data.row_paths import RowPaths

pytestmark = pytest.mark.usefixtures("own_cache")

RAMP = np.arange(65536, dtype=np.uint16).reshape(256, 256)
EXACT = np.round(RAMP / 257).astype(np.uint8)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(values, colour, *more):
    """A PNG of 16 bits for each band of ``values``."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, colour, 0, 0, 0)
    chunks = [chunk(b"IHDR", head), *more, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff_of_twelve_bits(values):
    """Two values in three bytes."""
    first, second = values[:, ::2].ravel(), values[:, 1::2].ravel()
    packed = (
        np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], -1).astype(np.uint8).tobytes()
    )
    height, width = values.shape
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(packed)}
    entries = b"".join(struct.pack("<HHIHxx", tag, 3, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return b"II*\0" + struct.pack("<I", 8 + len(packed)) + packed + directory


SIXTEEN = {
    "png": RAMP,
    "tiff": RAMP,
    "big-endian.tiff": RAMP.astype(">u2"),
    "ppm": RAMP,
    "i.tiff": RAMP.astype(np.int32),
}


@pytest.mark.parametrize("name", SIXTEEN)
def test_gray_of_sixteen_bits_is_scaled(name, tmp_path):
    Image.fromarray(SIXTEEN[name]).save(tmp_path / f"a.{name}")
    for given in (f"a.{name}", Image.open(tmp_path / f"a.{name}")):
        pixels = np.asarray(open_image(given, RowPaths(str(tmp_path))).pixels())
        assert all(np.array_equal(pixels[..., band], EXACT) for band in range(3))


def test_other_images_of_more_than_eight_bits_are_scaled(tmp_path):
    bands = np.stack([RAMP, RAMP.T, RAMP[::-1]], -1)
    found = np.asarray(open_image(png(bands, 2), RowPaths()).pixels())
    assert np.abs(found - bands / 257).max() < 1  # PIL keeps the upper byte
    clear = np.concatenate([bands, np.full_like(bands[..., :1], 65535)], -1)
    clear[0, :, 3] = 0
    found = np.asarray(open_image(png(clear, 6), RowPaths()).pixels())
    assert (found[0] == 255).all()
    assert np.abs(found[1:] - bands[1:] / 257).max() < 1
    found = np.asarray(open_image(png(RAMP, 0, chunk(b"tRNS", struct.pack(">H", 100))), RowPaths()).pixels())[
        ..., 0
    ]
    assert found[0, 100] == 255
    assert np.array_equal(np.delete(found, 100), np.delete(EXACT, 100))
    twelve = RAMP[:16].reshape(64, 64)
    found = np.asarray(open_image(tiff_of_twelve_bits(twelve), RowPaths()).pixels())[..., 0]
    assert np.array_equal(found, np.round(twelve / 4095 * 255))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "LAB"])
def test_other_modes_are_what_transformers_reads(mode, tmp_path):
    drawn = Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 24, 3), np.uint8))
    if mode == "LAB":
        drawn = Image.merge("LAB", drawn.split())
    drawn.convert(mode).save(tmp_path / "a.tiff")
    assert Image.open(tmp_path / "a.tiff").mode == mode
    found = open_image("a.tiff", RowPaths(str(tmp_path))).pixels()
    assert found.tobytes() == load_image(str(tmp_path / "a.tiff")).tobytes()
    assert np.ptp(np.asarray(found)) > 0


def test_pixels_without_a_white_are_refused_and_the_row_is_named(tokenizer, folder):
    Image.fromarray(np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)).save(folder / "float.tiff")
    rows = [asked(text("none?")), asked({"type": "image", "path": "float.tiff"}, text("?"))]
    reported = r"row 1.*: image \S*float.tiff has floating-point pixels \(mode F\).*; expected .* 8 or 16 bits; scale"
    for read in (load, streamed):
        with pytest.raises(McaError, match=rf"^train_file, {reported}"):
            read(rows, tokenizer, folder)
    texts = [{"text": "none", "images": []}, {"text": "<image>", "images": ["float.tiff"]}]
    with pytest.raises(McaError, match=rf"^train_file, {reported}"):
        load(texts, tokenizer, folder, kind="pretrain")
    with pytest.raises(McaError, match="image of 16 x 16 pixels has floating-point pixels"):
        open_image(Image.open(folder / "float.tiff"), RowPaths())
    wide = np.array([[-1, 0], [7, 70000]], np.int32)
    Image.fromarray(wide).save(folder / "integers.tiff")
    with pytest.raises(McaError, match=r"has pixels from -1 to 70000 \(mode I\); expected 0 to 65535; scale"):
        open_image("integers.tiff", RowPaths(str(folder))).pixels()


MOVING = ("gif", "png", "webp", "tiff")


@pytest.mark.parametrize("read", [load, streamed])
@pytest.mark.parametrize("kind", ["sft", "pretrain"])
def test_a_file_of_several_frames_is_reported_once(read, kind, tokenizer, folder, caplog):
    colours = ((200, 30, 60), (10, 200, 30), (0, 0, 0))
    frames = [Image.new("RGB", (24, 16), colour) for colour in colours]
    for form in (*MOVING, "mpo"):
        frames[0].save(folder / f"moves.{form}", save_all=True, append_images=frames[1:])
    names = [*(f"moves.{form}" for form in ("mpo", *MOVING)), "small.png"]
    if kind == "sft":
        rows = [asked({"type": "image", "path": name}, text("?")) for name in names]
    else:
        rows = [{"text": "a <image>", "images": [name]} for name in names]
    read(rows, tokenizer, folder, kind=kind)
    (reported,) = [record.getMessage() for record in caplog.records if "frames" in record.getMessage()]
    place = (
        r"^train_file, row 1: image \S*moves.gif has several frames or pages, of which only the first is used"
    )
    assert re.match(place, reported)
    for form in MOVING:
        colour = open_image(f"moves.{form}", RowPaths(str(folder))).pixels().getpixel((3, 3))
        assert np.abs(np.subtract(colour, colours[0])).max() < 8


@pytest.mark.parametrize("form", ["jpeg", "png", "webp", "tiff", "mpo"])
def test_images_are_turned_as_transformers_turns_them(form, tmp_path):
    drawn = Image.new("RGB", (24, 16), (10, 20, 200))
    drawn.paste((250, 0, 0), (0, 0, 8, 8))
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        path = tmp_path / f"{orientation}.{form}"
        drawn.save(path, exif=exif)
        expected = load_image(str(path))
        for given in (str(path), Image.open(path)):
            found = open_image(given, RowPaths())
            assert found.size() == (expected.height, expected.width)
            assert found.pixels().tobytes() == expected.tobytes()


XMP = b"XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation='1' tiff:Orientation=\"6\"/>"
LATE = {
    "eXIf": chunk(b"eXIf", b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"),
    "XMP": chunk(b"iTXt", XMP),
}


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("is_late", [False, True])
def test_a_png_is_turned_by_what_stands_before_or_behind_its_pixels(kind, is_late, tmp_path):
    whole = png(RAMP[:16, :24], 0, *([] if is_late else [LATE[kind]]))
    end = chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(whole.removesuffix(end) + (LATE[kind] if is_late else b"") + end)
    assert load_image(str(tmp_path / "a.png")).size == (16, 24)
    found = open_image("a.png", RowPaths(str(tmp_path)))
    assert found.size() == (24, 16)
    assert found.pixels().size == (16, 24)


def test_other_text_behind_the_pixels_of_a_png_does_not_make_its_header_cost_them(tmp_path, monkeypatch):
    end = chunk(b"IEND", b"")
    whole = png(RAMP[:16, :24], 0).removesuffix(end) + chunk(b"tEXt", b"date:create\0" + b"2024" * 20) + end
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("the pixels are read"))
    assert open_image(whole, RowPaths()).size() == (16, 24)
