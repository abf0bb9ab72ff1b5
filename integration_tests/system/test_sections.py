"""Which modules of ``mca_models.megatron`` read each optional section of a model's configuration.

A feature's section belongs to the feature's own file. The other readers are listed, so that the list only gets shorter.
"""

import ast
from collections.abc import Iterable

import pytest

from source_tree import SOURCES, Source, under

ROOT = "mca_models.megatron"
_SPEC = "features.spec"  # chooses modules of layers
_LIMITS = "factory.limits"  # rejects combinations with training options
READERS = {
    "moe": {
        *(
            "features.biased_experts",
            "features.biased_router",
            "features.group_router",
            "features.latent_moe",
        ),
        *(
            "features.router",
            "features.router_replay",
            "features.sigmoid_router",
            "features.sparse_mixer",
            "features.settings",
        ),
        *(_SPEC, _LIMITS, "factory.execution", "factory.transformer_config"),
    },
    "mla": {
        *("features.mla", "features.dsa", "features.chunk", "layers.rope", _SPEC, _LIMITS),
        *("factory.execution", "factory.fused_limits", "factory.transformer_config"),
    },
    "dsa": {"features.dsa", _SPEC, _LIMITS},
    "block_sparse_attention": {"features.block_sparse_attention", _SPEC, _LIMITS},
    "linear_attention": {"features.recurrent_layers", "features.gated_delta_net", _SPEC},
    "mamba": {"features.mamba", "factory.fill"},
    "shared_kv": {"features.shared_kv"},
    "per_layer_embedding": {"features.per_layer_embedding", "features.embedding"},
    "mrope": {"layers.mrope", "features.chunk", "features.image_limits"},
    "vision": {
        "features.images",
        "features.image_features",
        "features.image_limits",
        "features.vision_tower",
    },
}
_CONFIGURATIONS = ("config", "model")


def readers(section: str, sources: Iterable[Source]) -> set[str]:
    """Return the modules, below ``mca_models.megatron``, that read ``section`` of a configuration."""
    return {
        source.module.removeprefix(f"{ROOT}.")
        for source in sources
        if under(source.module, (ROOT,)) and f".{section}" in source.text
        for node in ast.walk(ast.parse(source.text))
        if isinstance(node, ast.Attribute) and node.attr == section and _name(node.value) in _CONFIGURATIONS
    }


def _name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


@pytest.mark.parametrize("section", READERS)
def test_a_section_is_read_by_its_feature_and_by_listed_modules(section: str) -> None:
    assert readers(section, SOURCES) == READERS[section]


def test_a_planted_reader_is_caught() -> None:
    planted = Source(f"{ROOT}.auto", "def f(self):\n    return self.config.mamba.mamba_num_heads\n")
    assert readers("mamba", [planted]) == {"auto"}
