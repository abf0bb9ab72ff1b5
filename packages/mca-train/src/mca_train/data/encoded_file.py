"""Encoded file of an image, a video or an audio clip: at a path, at a URL, or in the row."""

import base64
import binascii
import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar, Self, TypeVar

from mca_config.errors import McaError
from mca_config.files import open_regular
from mca_config.redaction import redacted
from mca_train.data.message_parts import KEYS, NOUNS, require_no_options
from mca_train.data.row_paths import RowPaths
from mca_train.data.urls import is_url, read_url

Other = TypeVar("Other")


@dataclass(frozen=True)
class EncodedFile:
    """Medium in a file, at a URL, or in the row.

    Args:
        place: Path or URL, or a description for errors.
        data: Contents of the file; None: read from ``place``.
    """

    medium: ClassVar[str]
    base64_keys: ClassVar[tuple[str, ...]] = ("base64",)
    alternative: ClassVar[str] = ""
    """Other values of a row, for errors."""
    place: str
    data: bytes | None = field(default=None, repr=False)

    @classmethod
    def read(
        cls, value: object, paths: RowPaths, other: Callable[[object], Other | None] = lambda value: None
    ) -> Self | Other:
        """Return the file of a value in a row: a path, a URL, bytes, base64, or a mapping with one of them.

        Args:
            value: Value in the row.
            paths: Files that the row may open.
            other: Function that returns the medium of another value; None: it is none either.

        Raises:
            McaError: The value is none of these, or the row may not open the file.
        """
        if isinstance(value, bytes):
            return cls(f"of {len(value)} bytes", value)
        if isinstance(value, str):
            if value.startswith("data:"):
                return cls._from_base64(value.partition(",")[2])
            return cls(paths.resolve(value, cls.medium))
        if (found := other(value)) is not None:
            return found
        if isinstance(value, Mapping):
            require_no_options(value, cls.medium)
            if isinstance(data := value.get("bytes"), bytes):
                return cls(str(value.get("path") or f"of {len(data)} bytes"), data)
            for key in cls.base64_keys:
                if isinstance(text := value.get(key), str):
                    return cls._from_base64(text)
            inside = next((value[key] for key in KEYS[cls.medium] if value.get(key) is not None), None)
            if inside is not None:
                return cls.read(inside, paths, other)
        raise McaError(
            f"{NOUNS[cls.medium]} is {value!r:.80}; expected a path, a URL, bytes, base64, {cls.alternative}or a "
            "mapping with one of them"
        )

    @classmethod
    def _from_base64(cls, text: str) -> Self:
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
