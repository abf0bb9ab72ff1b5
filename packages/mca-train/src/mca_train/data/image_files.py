"""`ImageFile` is an image that a row names or holds: its size, read from the header of a file alone, and its pixels.

Which parts of a row are images is decided in `image_rows`.
"""

import base64
import binascii
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from PIL import Image, ImageOps, UnidentifiedImageError

from mca_config.errors import McaError
from mca_config.files import open_regular
from mca_config.redaction import redacted
from mca_train.data.addresses import is_address, read_whole
from mca_train.data.message_parts import KEYS, require_no_size
from mca_train.data.row_paths import RowPaths

_OF_PNG = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
"""Modes of images that a PNG can hold."""
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # of EXIF


@dataclass(frozen=True)
class ImageFile:
    """An image in a file, at an address, or in the row itself.

    Args:
        place: The path or the address; what else it is called in errors.
        data: What the file would hold; None: it is read from ``place``.
    """

    place: str
    data: bytes | None = field(default=None, repr=False)

    def size(self) -> tuple[int, int]:
        """Height and width as people see it, from the header; an image at an address is fetched whole for it.

        Raises:
            McaError: It is missing, no image, or too large.
        """
        with self._opened() as image:
            turned = _orientation(image) in _ON_ITS_SIDE
            return (image.width, image.height) if turned else (image.height, image.width)

    def pixels(self) -> Image.Image:
        """The image as people see it, in red, green and blue; what is transparent is white.

        Raises:
            McaError: The same, or it is broken further on.
        """
        with self._opened() as image:
            return _on_white(ImageOps.exif_transpose(image) if _orientation(image) > 1 else image)

    @contextmanager
    def _opened(self) -> Iterator[Image.Image]:
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
        if is_address(self.place):
            return io.BytesIO(read_whole(self.place))
        try:
            return os.fdopen(open_regular(Path(self.place)), "rb")
        except McaError as error:
            raise McaError(f"image {error}; name a file") from error


def _orientation(image: Image.Image) -> int:
    """How the image is to be turned; a PNG that says so only behind its pixels is not, as those would be read."""
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return int(image.getexif().get(_ORIENTATION, 1))


def _on_white(image: Image.Image) -> Image.Image:
    """As the image processors of transformers 5.21 and later make it; earlier ones drop the transparency."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    clear = image.convert("RGBA")
    white = Image.new("RGBA", clear.size, "white")
    return Image.alpha_composite(white, clear).convert("RGB")


def image_file(given: object, paths: RowPaths) -> ImageFile:
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
            return _decoded(given.partition(",")[2])
        return ImageFile(paths.file_of(given))
    if isinstance(given, Image.Image):
        return _in_memory(given)
    if isinstance(given, Mapping):
        require_no_size(given)
        if isinstance(data := given.get("bytes"), bytes):
            return ImageFile(str(given.get("path") or f"of {len(data)} bytes"), data)
        if isinstance(text := given.get("base64"), str):
            return _decoded(text)
        found = next((given[key] for key in KEYS if given.get(key) is not None), None)
        if found is not None:
            return image_file(found, paths)
    raise McaError(
        f"an image is {given!r:.80}; expected a path, an address, bytes, base64, or a mapping with one of them"
    )


def _decoded(text: str) -> ImageFile:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise McaError(f"an image in base64, {text[:20]!r}..., cannot be decoded: {error}") from error
    return ImageFile(f"of {len(data)} bytes", data)


def _in_memory(image: Image.Image) -> ImageFile:
    held = io.BytesIO()
    (image if image.mode in _OF_PNG else _on_white(image)).save(held, "PNG")
    return ImageFile(f"of {image.width} x {image.height} pixels", held.getvalue())
