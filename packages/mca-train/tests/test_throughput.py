"""Model FLOP by the formula in the module, counted by hand."""

from mca_models.templates import config_from_hf

SIZE = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 64,
}
ATTENTION = 8 * (2 * 6 + 2 * 6) + 2 * 6 * 8  # queries, keys and values; and the projection back


def flops(**hf):
    from mca_train.throughput import ModelFlops

    return ModelFlops.of(config_from_hf(SIZE | hf))


def test_a_dense_model():
    found = flops(model_type="qwen3", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    assert found.per_token == 6 * (3 * (ATTENTION + 3 * 8 * 12) + 100 * 8)
    assert found.per_token_and_length == 6 * 3 * 2 * 6
    assert found.of_tokens(20, 2) == 20 * (found.per_token + 10 * found.per_token_and_length)


def test_of_experts_only_the_chosen_count():
    found = flops(
        model_type="qwen3_moe",
        architectures=["Qwen3MoeForCausalLM"],
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=5,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    assert found.per_token == 6 * (3 * (ATTENTION + 4 * 8 + 2 * 3 * 8 * 5) + 100 * 8)


def test_the_peak_is_what_is_given_or_unknown():
    import torch

    from mca_train.throughput import peak_flops

    class Arguments:
        bf16, fp16, peak_tflops = True, False, 2.5

    assert peak_flops(Arguments, torch.device("cpu")) == 2.5e12
    Arguments.peak_tflops = None
    assert peak_flops(Arguments, torch.device("cpu")) is None
