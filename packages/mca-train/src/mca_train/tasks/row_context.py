"""`RowContext` holds what a kind of run needs to make samples of rows.

``load`` makes it when a run reads rows: as a dataclass of ``task`` it would slow down each start of ``mca-train``.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mca_config.types import Values
    from mca_train.config.arguments import DataArguments
    from mca_train.data.image_rows import ImageReader


@dataclass(frozen=True, kw_only=True)
class RowContext:
    """Tokenizer, arguments and image reader with which rows become samples.

    Attributes:
        tokenizer: The model's.
        data: Columns, lengths and limits.
        key: The argument that named the files, for errors.
        images: Image reader of the model; None: no images.
    """

    tokenizer: "PreTrainedTokenizerBase"
    data: "DataArguments"
    key: str
    images: "ImageReader | None" = None

    @property
    def vision(self) -> "Values | None":
        """Return the vision part of the model's configuration; None: a text model."""
        return None if self.images is None else self.images.config.vision_fields

    def without_text_reader(self) -> "RowContext":
        """Return the context without the image reader of a text model."""
        return replace(self, images=None) if self.vision is None else self
