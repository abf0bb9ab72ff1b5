"""Encoded file of an image, a video or an audio clip: at a path, at a URL, or in the row."""

import base64
import binascii
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

from mca_config.errors import McaError
from mca_config.files import open_regular
from mca_config.redaction import redacted
from mca_train.data.message_parts import NOUNS
from mca_train.data.row_paths import RowPaths
from mca_train.data.urls import is_url, read_url


@dataclass(frozen=True)
class EncodedFile:
    """Medium in a file, at a URL, or in the row.

    Args:
        place: Path or URL, or a description for errors.
        data: Contents of the file; None: read from ``place``.
    """

    medium: ClassVar[str]
    place: str
    data: bytes | None = field(default=None, repr=False)

    @classmethod
    def from_row(cls, value: object, paths: RowPaths) -> Self | None:
        """Return the file of a path, a URL, bytes or a data URL; None: ``value`` is none of these."""
        if isinstance(value, bytes):
            return cls(f"of {len(value)} bytes", value)
        if isinstance(value, str):
            if value.startswith("data:"):
                return cls.from_base64(value.partition(",")[2])
            return cls(paths.resolve(value, cls.medium))
        return None

    @classmethod
    def from_mapping(cls, value: Mapping[str, object]) -> Self | None:
        """Return the file of a mapping with ``bytes`` or ``base64``; None: it has neither."""
        if isinstance(data := value.get("bytes"), bytes):
            return cls(str(value.get("path") or f"of {len(data)} bytes"), data)
        text = value.get("base64")
        return cls.from_base64(text) if isinstance(text, str) else None

    @classmethod
    def from_base64(cls, text: str) -> Self:
        """Return the file of ``text``."""
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise McaError(
                f"{NOUNS[cls.medium]} in base64, {text[:20]!r}..., cannot be decoded: {error}"
            ) from error
        return cls(f"of {len(data)} bytes", data)

    def open(self) -> BinaryIO:
        """Open the file for reading."""
        if self.data is not None:
            return io.BytesIO(self.data)
        if is_url(self.place):
            return io.BytesIO(read_url(self.place, self.medium))
        try:
            return os.fdopen(open_regular(Path(self.place)), "rb")
        except McaError as error:
            raise McaError(f"{self.medium} {error}; name a file") from error

    @contextmanager
    def read_errors(self, *kinds: type[Exception], reader: str = "") -> Iterator[None]:
        """Context in which errors of the system and ``kinds`` of errors name the file, and its ``reader``."""
        expected: tuple[type[Exception], ...] = (OSError, ValueError, *kinds)
        try:
            yield
        except McaError:  # from a URL, or a path that is not a file
            raise
        except FileNotFoundError as error:
            raise McaError(
                f"{self.medium} {self.place} is not there"
                "; correct the path, which starts from image_folder or the folder of the data file"
            ) from error
        except expected as error:
            reason = redacted(" ".join(str(error).split()))[:200]
            raise McaError(
                f"{self.medium} {self.place} cannot be read{reader and f' by {reader}'}: {reason}"
            ) from error
