"""Mark of multimodal models that pack rows themselves."""


class MultimodalEmbeddingMixin:
    """Base class of none of mca's models: ROLL then trains models with images without packing, and warns."""
