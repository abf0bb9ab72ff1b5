"""Readers of each optional section of a model's configuration in ``mca_models.megatron`` and ``mca_train``.

A feature's section belongs to the feature's own file. The other readers are listed, so that the list only gets shorter.
"""

import ast
from collections.abc import Iterable, Mapping

import pytest

from mca_config.model import SECTIONS
from source_tree import SOURCES, Source, nodes, under

ROOT = "mca_models.megatron"
ROOMS: Mapping[str, set[str]] = {
    "moe": {
        "features.identity_experts",
        "features.moe",
        "features.moe_with_dense_mlp",
        "features.shortcut_moe",
        "features.router_replay",
        "features.routers",
        "features.sparse_mixer",
    },
    "mla": {"features.mla", "features.dsa"},
    "dsa": {"features.dsa"},
    "block_sparse_attention": {"features.block_sparse_attention"},
    "linear_attention": {
        "features.gated_delta_net",
        "features.kimi_delta_attention",
        "features.recurrent_layers",
    },
    "lightning_attention": {"features.lightning_attention"},
    "mamba": {"features.mamba"},
    "selective_scan": {"features.selective_scan"},
    "short_convolution": {"features.short_convolution"},
    "shared_kv": {"features.shared_kv"},
    "per_layer_embedding": {"features.per_layer_embedding"},
    "mrope": {"features.mrope"},
    "vision": {
        "features.media",
        "features.media_features",
        "features.vision_tower",
    },
}
"""The modules of each feature, which read its section."""
OTHERS: Mapping[str, Mapping[str, str]] = {
    "mla": {"features.rope": "MLA has its own factor of the rotation"},
    "mrope": {
        "features.sequence_media": "positions of the tokens of a micro-batch",
        "features.processor_media": "rows and columns of images",
    },
    "vision": {"features.processor_media": "a text model takes no media"},
}
"""Other readers of a section, with the reason."""
TRAINING = "mca_train"
IN_TRAINING: Mapping[str, Mapping[str, str]] = {
    "moe": {
        "engine.rng": "routers draw noise",
        "trainer.unused_options": "MoE arguments without effect",
    },
    "vision": {
        "config.model_parts": "trained parts of a vision-language model",
        "engine.optimizer": "learning rates of parts",
        "losses.preference": "a reference model without a tower",
        "metrics.throughput": "a frozen language model",
        "plan.counts": "parameters of the tower",
        "plan.vision_memory": "memory of the tower",
        "run.rules": "keys of media",
    },
}
"""Modules of mca-train that read a section, with the reason; the planner reads sizes of `templates.parts`."""
_CONFIGURATIONS = ("config", "model")
CLIENTS = ("mca_train.clients",)
"""Code for programs whose configurations have sections too."""


def readers(section: str, sources: Iterable[Source], root: str = ROOT) -> set[str]:
    """Return the modules below ``root`` that read ``section`` of a configuration."""
    return {
        source.module.removeprefix(f"{root}.")
        for source in sources
        if under(source.module, (root,))
        and not under(source.module, CLIENTS)
        and f".{section}" in source.text
        for node in nodes(source.text)
        if isinstance(node, ast.Attribute) and node.attr == section and _name(node.value) in _CONFIGURATIONS
    }


def _name(node: ast.expr) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def test_every_optional_section_has_a_room() -> None:
    assert ROOMS.keys() == {name for name, entry in SECTIONS.items() if entry.key is not None}


@pytest.mark.parametrize("section", ROOMS)
def test_a_section_is_read_by_its_feature_and_by_listed_modules(section: str) -> None:
    assert readers(section, SOURCES) == ROOMS[section] | OTHERS.get(section, {}).keys()


@pytest.mark.parametrize("section", ROOMS)
def test_training_reads_a_section_only_in_listed_modules(section: str) -> None:
    assert readers(section, SOURCES, TRAINING) == {*IN_TRAINING.get(section, {})}


def test_a_planted_reader_is_caught() -> None:
    planted = Source(f"{ROOT}.auto", "def f(self):\n    return self.config.mamba.mamba_num_heads\n")
    assert readers("mamba", [planted]) == {"auto"}
