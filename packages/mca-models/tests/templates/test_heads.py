"""Heads for scores have transformers' classes and names."""

import pytest
import tiny_vision
from tiny_hf import ALL, SIZE

from mca_config.errors import McaError, UsageError
from mca_config.model_config import McaModelConfig
from mca_models.templates import FAMILIES, config_from_hf, config_to_hf, get_family
from mca_models.templates.classification_head import Head, class_name, label_names, with_head

SIZES = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def named(model_type: str, kind: str) -> str | None:
    try:
        return class_name(model_type, kind)
    except McaError:
        return None


def test_every_family_has_the_heads_that_transformers_has():
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    sequences = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    tokens = auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    unsupported = {("qwen3_asr", "token")}  # its head has no bias
    for name in FAMILIES:
        assert named(name, "sequence_classification") == sequences.get(name), name
        if (name, "token") not in unsupported:
            assert named(name, "token_classification") == tokens.get(name), name


@pytest.mark.parametrize(
    "model_type", ["qwen2_audio", "qwen2_5_omni_thinker", "qwen3_asr", "qwen2_5_vl", "gemma4"]
)
def test_models_without_a_class_in_transformers_have_no_heads(model_type):
    for kind in ("sequence_classification", "token_classification"):
        with pytest.raises(McaError, match=f"of {model_type} models in mca, only of families for which"):
            class_name(model_type, kind)


def test_the_padding_token_of_a_head_is_written_where_transformers_reads_it():
    config = config_from_hf(tiny_vision.described("qwen3_5"))
    head = Head(kind="sequence_classification", labels=("LABEL_0",), pad_token_id=5)
    written = config_to_hf(with_head(config, head))
    assert written["text_config"]["pad_token_id"] == 5
    assert written["architectures"] == ["Qwen3_5ForSequenceClassification"]
    assert config_from_hf(written).embedding.pad_token_id == 5


@pytest.mark.parametrize(
    ("architecture", "head", "names"),
    [
        ("LlamaForSequenceClassification", "sequence_classification", {"score.weight"}),
        ("LlamaForTokenClassification", "token_classification", {"score.weight", "score.bias"}),
    ],
)
def test_config_json_names_the_head(architecture, head, names):
    hf = {**SIZES, "architectures": [architecture], "id2label": {"0": "a", "1": "b", "2": "c"}}
    config = config_from_hf(hf)
    assert (config.head.head_kind, config.head.num_labels, config.head.tie_word_embeddings) == (
        head,
        3,
        False,
    )
    shapes = get_family("llama").hf_shapes(config)
    assert {name for name in shapes if name.startswith("score")} == names
    assert shapes["score.weight"] == (3, 16)
    assert "lm_head.weight" not in shapes
    assert config_to_hf(config) == hf
    assert McaModelConfig.from_json(config.to_json()) == config


def test_a_model_with_a_head_for_scores_has_no_mtp_layers():
    kind, different = ALL["deepseek_v3"]
    hf = {**SIZE, **different, "model_type": kind, "num_nextn_predict_layers": 1, "num_experts_per_tok": 2}
    assert config_from_hf(hf).mtp_num_layers == 1
    scored = config_from_hf({**hf, "architectures": ["DeepseekV3ForSequenceClassification"]})
    assert scored.mtp_num_layers == 0
    head = Head(kind="sequence_classification", labels=("score",), problem_type="regression")
    assert with_head(config_from_hf(hf), head).mtp_num_layers == 0


def test_a_new_head_names_its_labels():
    config = with_head(
        config_from_hf({**SIZES, "architectures": ["LlamaForCausalLM"]}),
        Head(
            kind="sequence_classification", labels=("bad", "good"), problem_type="single_label_classification"
        ),
    )
    written = config_to_hf(config)
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    assert written["id2label"] == {"0": "bad", "1": "good"}
    assert written["label2id"] == {"bad": 0, "good": 1}
    assert written["problem_type"] == "single_label_classification"
    assert written["tie_word_embeddings"] is True  # as the source says; there is nothing to tie
    assert config_from_hf(written).head.num_labels == 2


SENTIMENT = {"0": "NEGATIVE", "1": "POSITIVE"}


@pytest.mark.parametrize(
    ("known", "given", "names"),
    [
        (SENTIMENT, ("LABEL_0", "LABEL_1"), ("NEGATIVE", "POSITIVE")),
        (SENTIMENT, ("NEGATIVE", "POSITIVE"), ("NEGATIVE", "POSITIVE")),
        ({"0": "LABEL_0", "1": "LABEL_1"}, ("no", "yes"), ("no", "yes")),
        (None, ("no", "yes"), ("no", "yes")),
        (SENTIMENT, ("POSITIVE", "NEGATIVE"), None),
        (SENTIMENT, ("no", "yes"), None),
    ],
)
def test_the_labels_of_a_trained_head_stay(known, given, names):
    hf = {**SIZES, "architectures": ["LlamaForSequenceClassification"], "problem_type": "regression"}
    config = config_from_hf(hf if known is None else {**hf, "id2label": known})
    head = Head(kind="sequence_classification", labels=given)
    if names is None:
        with pytest.raises(
            UsageError, match="labels: the model's are NEGATIVE, POSITIVE, in this order, not "
        ):
            with_head(config, head)
        return
    kept = with_head(config, head)
    assert label_names(kept) == names
    assert config_to_hf(kept)["label2id"] == {name: number for number, name in enumerate(names)}


def test_a_model_without_a_head_has_no_labels():
    assert label_names(config_from_hf({**SIZES, "architectures": ["LlamaForCausalLM"]})) == ()


def test_two_labels_are_what_transformers_leaves_out():
    config = config_from_hf({**SIZES, "architectures": ["LlamaForSequenceClassification"]})
    assert config.head.num_labels == 2


def test_heads_that_cannot_be_are_refused():
    granite = {**SIZES, "model_type": "granite", "architectures": ["GraniteForSequenceClassification"]}
    with pytest.raises(McaError, match="no ForSequenceClassification of granite"):
        config_from_hf(granite)
    config = config_from_hf({**SIZES, "architectures": ["LlamaForSequenceClassification"]})
    with pytest.raises(UsageError, match="with 2 labels, the run needs sequence_classification with 1"):
        with_head(config, Head(kind="sequence_classification", labels=("reward",)))
