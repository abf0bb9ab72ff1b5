"""Images that a row names or contains: size from the file header, and pixels.

`image_rows` finds the images of a row.
"""

import io
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin, TiffImagePlugin, UnidentifiedImageError

from mca_config.errors import McaError
from mca_train.data.encoded_file import EncodedFile
from mca_train.data.message_parts import IMAGE
from mca_train.data.row_paths import RowPaths

_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
"""PIL modes that PNG supports."""
_MULTI_FRAME_FORMATS = ("AVIF", "GIF", "PNG", "TIFF", "WEBP")
"""Formats of animations and multi-page documents; in others (MPO, PSD) further frames are parts of one image."""
_ORIENTATION, _ROTATED_90 = 0x0112, (5, 6, 7, 8)  # of EXIF
_WIDTH, _LENGTH, _BITS = 256, 257, 258  # tags of TIFF
_ORIENTATION_CHUNKS = (
    b"eXIf",
    b"iTXtXML:com.adobe.xmp\0",
    b"tEXtRaw profile type exif\0",
    b"zTXtRaw profile type exif\0",
)
"""Prefixes of PNG chunks that may contain an orientation."""
_CHUNK_PREFIX = max(map(len, _ORIENTATION_CHUNKS))


class ImageFile(EncodedFile):
    """Image in a file, at a URL, or in the row."""

    medium = IMAGE

    def size(self, several: Callable[[], None] = lambda: None) -> tuple[int, int]:
        """Return the oriented height and width from the header; an image at a URL is downloaded.

        Args:
            several: Callback for a file with several frames, of which `pixels` returns the first.

        Raises:
            McaError: The file is missing, not an image, too large, or has floating-point pixels.
        """
        with self._opened() as image:
            _require_integers(image, self.place)
            if image.format in _MULTI_FRAME_FORMATS and getattr(image, "is_animated", False):
                several()
            width, height = image.size
            if isinstance(image, TiffImagePlugin.TiffImageFile):  # its `size` is oriented already
                width, height = image.tag_v2[_WIDTH], image.tag_v2[_LENGTH]
            return (width, height) if _orientation(image) in _ROTATED_90 else (height, width)

    def pixels(self) -> Image.Image:
        """Return the oriented image in RGB, on white where it is transparent.

        Raises:
            McaError: As in `size`, or the pixel data is corrupt.
        """
        with self._opened() as image:
            _require_integers(image, self.place)
            top = _white_value(image)
            return _to_rgb(ImageOps.exif_transpose(image), self.place, top)

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
        decoding = self.read_errors(SyntaxError, EOFError)  # PIL's decoders raise them too
        with decoding, warnings.catch_warnings(), self.open() as stream:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            try:
                with Image.open(stream) as image:
                    yield image
            except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
                raise McaError(
                    f"image {self.place} is too large: more than {Image.MAX_IMAGE_PIXELS:,} pixels; make it smaller"
                ) from error
            except UnidentifiedImageError as error:
                raise McaError(
                    f"image {self.place} is no image that PIL can read"
                    "; convert it to PNG or JPEG, or remove the row"
                ) from error


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation; pixels are read only if the orientation may follow them."""
    if isinstance(image, PngImagePlugin.PngImageFile) and not _has_trailing_orientation(image):
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))  # PngImageFile.getexif reads all pixels
    return int(image.getexif().get(_ORIENTATION, 1))


def _has_trailing_orientation(image: PngImagePlugin.PngImageFile) -> bool:
    """Return True if a PNG may have an orientation after its pixels."""
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
    """Raise an error for floating-point pixels, which PIL would clip to 0 to 255."""
    if image.mode == "F":
        raise McaError(
            f"image {place} has floating-point pixels (mode F), whose maximum is unknown; expected "
            "integers of 8 or 16 bits; scale the values to 0 to 255, and save them with 8 bits"
        )


def _white_value(image: Image.Image) -> int:
    """Return the maximum value of an image with more than 8 bits."""
    bits = image.tag_v2.get(_BITS, (16,)) if isinstance(image, TiffImagePlugin.TiffImageFile) else (16,)
    return (1 << min(int(bits[0]), 16)) - 1


def _to_rgb(image: Image.Image, place: str, top: int) -> Image.Image:
    """Convert to 8-bit RGB on white, as the image processors of transformers from 5.21 on do.

    Earlier versions drop the transparency. All of them clip gray values above 255; here values up to ``top`` are
    scaled.
    """
    if image.mode.startswith("I"):
        image = _to_eight_bits(image, place, top)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    clear = image.convert("RGBA")
    white = Image.new("RGBA", clear.size, "white")
    return Image.alpha_composite(white, clear).convert("RGB")


def _to_eight_bits(image: Image.Image, place: str, top: int) -> Image.Image:
    """Scale a gray image with values up to ``top`` to 8 bits, with alpha for its transparent value."""
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


def open_image(value: object, paths: RowPaths) -> ImageFile:
    """Return the image of a row: a value of PIL, or as `EncodedFile.read`."""
    return ImageFile.read(
        value, paths, lambda own: _encode_image(own) if isinstance(own, Image.Image) else None
    )


def _encode_image(image: Image.Image) -> ImageFile:
    place, held = f"of {image.width} x {image.height} pixels", io.BytesIO()
    _require_integers(image, place)
    top = _white_value(image)
    turned = ImageOps.exif_transpose(image)  # a PNG would lose the orientation
    (turned if turned.mode in _PNG_MODES else _to_rgb(turned, place, top)).save(held, "PNG")
    return ImageFile(place, held.getvalue())
