"""`ImageFile` is an image that a row names or holds: its size, read from the header of a file alone, and its pixels.

Which parts of a row are images is decided in `image_rows`.
"""

import base64
import binascii
import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from mca_config.errors import McaError
from mca_config.files import open_regular
from mca_config.redaction import redacted
from mca_train.data.message_parts import IMAGE_KEYS, require_no_size
from mca_train.data.row_paths import RowPaths
from mca_train.data.urls import is_url, read_url

_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
"""Modes of images that a PNG can hold."""
_MULTI_FRAME_FORMATS = ("AVIF", "GIF", "PNG", "TIFF", "WEBP")
"""Formats of animations and of documents; in others (MPO, PSD) the further frames are parts of one image."""
_ORIENTATION, _ROTATED_90 = 0x0112, (5, 6, 7, 8)  # of EXIF
_WIDTH, _LENGTH, _BITS = 256, 257, 258  # tags of TIFF
_ORIENTATION_CHUNKS = (
    b"eXIf",
    b"iTXtXML:com.adobe.xmp\0",
    b"tEXtRaw profile type exif\0",
    b"zTXtRaw profile type exif\0",
)
"""What chunks of a PNG begin with that may say how the image is to be turned."""
_CHUNK_PREFIX = max(map(len, _ORIENTATION_CHUNKS))


@dataclass(frozen=True)
class ImageFile:
    """An image in a file, at an address, or in the row itself.

    Args:
        place: The path or the address; what else it is called in errors.
        data: What the file would hold; None: it is read from ``place``.
    """

    place: str
    data: bytes | None = field(default=None, repr=False)

    def size(self, several: Callable[[], None] = lambda: None) -> tuple[int, int]:
        """Height and width as people see it, from the header; an image at an address is fetched whole for it.

        Args:
            several: Called if the file has several frames, of which `pixels` returns the first.

        Raises:
            McaError: It is missing, no image, too large, or has pixels of floating point.
        """
        with self._open() as image:
            _require_integers(image, self.place)
            if image.format in _MULTI_FRAME_FORMATS and getattr(image, "is_animated", False):
                several()
            width, height = image.size
            if isinstance(image, TiffImagePlugin.TiffImageFile):  # whose `size` is of the turned image
                width, height = image.tag_v2[_WIDTH], image.tag_v2[_LENGTH]
            return (width, height) if _orientation(image) in _ROTATED_90 else (height, width)

    def pixels(self) -> Image.Image:
        """The image as people see it, in red, green and blue; what is transparent is white.

        Raises:
            McaError: The same, or it is broken further on.
        """
        with self._open() as image:
            _require_integers(image, self.place)
            top = _white_value(image)
            return _to_rgb(ImageOps.exif_transpose(image), self.place, top)

    @contextmanager
    def _open(self) -> Iterator[Image.Image]:
        try:
            with warnings.catch_warnings(), self._stream() as stream:
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                with Image.open(stream) as image:
                    yield image
        except McaError:  # of an address, or of what is no file
            raise
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise McaError(
                f"image {self.place} is too large: more than {Image.MAX_IMAGE_PIXELS:,} pixels; make it smaller"
            ) from error
        except FileNotFoundError as error:
            raise McaError(f"image {self.place} is not there") from error
        except UnidentifiedImageError as error:
            raise McaError(f"image {self.place} is no image that PIL can read") from error
        except (
            OSError,
            SyntaxError,
            ValueError,
            EOFError,
        ) as error:  # PIL's readers have no error of their own
            reason = redacted(" ".join(str(error).split()))[:200]
            raise McaError(f"image {self.place} cannot be read: {reason}") from error

    def _stream(self) -> BinaryIO:
        if self.data is not None:
            return io.BytesIO(self.data)
        if is_url(self.place):
            return io.BytesIO(read_url(self.place))
        try:
            return os.fdopen(open_regular(Path(self.place)), "rb")
        except McaError as error:
            raise McaError(f"image {error}; name a file") from error


def _orientation(image: Image.Image) -> int:
    """How the image is to be turned; its pixels are read only if the file may say so behind them."""
    if isinstance(image, PngImagePlugin.PngImageFile) and not _has_late_orientation(image):
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))  # that of a PNG reads pixels
    return int(image.getexif().get(_ORIENTATION, 1))


def _has_late_orientation(image: PngImagePlugin.PngImageFile) -> bool:
    """Whether a PNG may say behind its pixels how it is to be turned."""
    stream = image.fp
    assert stream is not None, "the pixels are not read yet"
    start, is_behind = stream.tell(), False
    try:
        stream.seek(8)
        while len(head := stream.read(4 + _CHUNK_PREFIX)) > 8:
            is_behind = is_behind or head[4:8] == b"IDAT"
            if is_behind and head[4:].startswith(_ORIENTATION_CHUNKS):
                return True
            stream.seek(12 + int.from_bytes(head[:4], "big") - len(head), os.SEEK_CUR)
    finally:
        stream.seek(start)
    return False


def _require_integers(image: Image.Image, place: str) -> None:
    """Refuses pixels without a largest value, which PIL would cut to 0 to 255."""
    if image.mode == "F":
        raise McaError(
            f"image {place} has floating-point pixels (mode F), of which nothing says what is white; expected "
            "integers of 8 or 16 bits; scale the values to 0 to 255, and save them with 8 bits"
        )


def _white_value(image: Image.Image) -> int:
    """What is white, of an image of more than 8 bits."""
    bits = image.tag_v2.get(_BITS, (16,)) if isinstance(image, TiffImagePlugin.TiffImageFile) else (16,)
    return (1 << min(int(bits[0]), 16)) - 1


def _to_rgb(image: Image.Image, place: str, top: int) -> Image.Image:
    """Red, green and blue of 8 bits, on white: as the image processors of transformers 5.21 and later make it.

    Earlier ones drop the transparency. All cut gray values of more than 8 bits at 255, where those up to ``top`` are
    scaled here.
    """
    if image.mode.startswith("I"):
        image = _to_eight_bits(image, place, top)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    clear = image.convert("RGBA")
    white = Image.new("RGBA", clear.size, "white")
    return Image.alpha_composite(white, clear).convert("RGB")


def _to_eight_bits(image: Image.Image, place: str, top: int) -> Image.Image:
    """A gray image with values up to ``top``, with an alpha band if one of them is transparent."""
    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > top:
        raise McaError(
            f"image {place} has pixels from {low} to {high} (mode {image.mode}); expected 0 to {top}; scale "
            "them, and save them with 8 or 16 bits"
        )
    gray = Image.fromarray(((values.astype(np.uint32) * 255 + top // 2) // top).astype(np.uint8))
    clear = image.info.get("transparency")
    if clear is not None:
        gray.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return gray


def open_image(given: object, paths: RowPaths) -> ImageFile:
    """The image that a row gives: a path, an address, bytes, base64, or a mapping with one of them.

    Args:
        given: What stands in the row.
        paths: The files that its row may open.

    Raises:
        McaError: It is none of these, or the row may not open it.
    """
    if isinstance(given, bytes):
        return ImageFile(f"of {len(given)} bytes", given)
    if isinstance(given, str):
        if given.startswith("data:"):
            return _decode_base64(given.partition(",")[2])
        return ImageFile(paths.resolve(given))
    if isinstance(given, Image.Image):
        return _encode_image(given)
    if isinstance(given, Mapping):
        require_no_size(given)
        if isinstance(data := given.get("bytes"), bytes):
            return ImageFile(str(given.get("path") or f"of {len(data)} bytes"), data)
        if isinstance(text := given.get("base64"), str):
            return _decode_base64(text)
        found = next((given[key] for key in IMAGE_KEYS if given.get(key) is not None), None)
        if found is not None:
            return open_image(found, paths)
    raise McaError(
        f"an image is {given!r:.80}; expected a path, an address, bytes, base64, or a mapping with one of them"
    )


def _decode_base64(text: str) -> ImageFile:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise McaError(f"an image in base64, {text[:20]!r}..., cannot be decoded: {error}") from error
    return ImageFile(f"of {len(data)} bytes", data)


def _encode_image(image: Image.Image) -> ImageFile:
    place, held = f"of {image.width} x {image.height} pixels", io.BytesIO()
    _require_integers(image, place)
    top = _white_value(image)
    turned = ImageOps.exif_transpose(image)  # which a PNG would not say
    (turned if turned.mode in _PNG_MODES else _to_rgb(turned, place, top)).save(held, "PNG")
    return ImageFile(place, held.getvalue())
