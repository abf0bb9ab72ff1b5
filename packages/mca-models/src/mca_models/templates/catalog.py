"""Every kind of causal language model that transformers has: supported, or why it is not.

The other files of this package define the supported families. `docs/families.md` is made from this table.
"""

from collections.abc import Mapping

from mca_config.errors import McaError

SUPPORTED: Mapping[str, tuple[str, str]] = {
    "llama": ("all rope scalings: linear, dynamic, llama3, yarn", "Megatron's"),
    "mistral": ("sliding window", "Megatron's, our core attention"),
    "cwm": ("windows in three of four layers", "Megatron's, our core attention"),
    "qwen2": ("biases on q, k, v", "Megatron's"),
    "seed_oss": ("biases on q, k, v", "Megatron's"),
    "qwen3": ("norms on the heads of q and k", "Megatron's"),
    "phi3": (
        "3, 3.5, 4: one tensor for q, k, v and one for gate and up; partial rope, longrope",
        "Megatron's, our rope",
    ),
    "granite": ("factors on embeddings, scores, residuals, logits", "Megatron's with hooks"),
    "smollm3": ("layers without rope", "Megatron's"),
    "olmo2": ("norms after each block, norms over all heads of q and of k", "our norms"),
    "olmo3": (
        "the same; three of four layers have a window, and a rope without scaling",
        "our norms and ropes",
    ),
    "exaone4": ("norms after each block; layers with a window rotate, others do not", "our norms"),
    "gemma2": (
        "capped scores and logits, alternating windows, norms before and after, zero-centred",
        "our core attention and norms",
    ),
    "gemma3_text": (
        "norms before and after, zero-centred; a rope for full layers and one for windows",
        "our norms and ropes",
    ),
    "mixtral": ("experts in every layer", "Megatron's"),
    "qwen2_moe": ("dense and sparse layers, a gated shared expert", "Megatron's"),
    "qwen3_moe": ("dense and sparse layers", "Megatron's"),
    "olmoe": ("experts; norms over all heads of q and of k", "our norms"),
    "minimax_m2": (
        "sigmoid routing with a bias; norms over all heads of q and of k, partial rope",
        "our norms",
    ),
    "glm4_moe": (
        "dense first layers, sigmoid routing with a bias, partial rope, multi-token prediction",
        "Megatron's",
    ),
    "deepseek_v3": (
        "V3, R1: latent attention, grouped sigmoid routing, multi-token prediction",
        "Megatron's",
    ),
    "glm4_moe_lite": ("GLM 4.7 Flash: the same, dense layers anywhere", "Megatron's"),
    "deepseek_v2": (
        "V2, Lite: latent attention; groups chosen by their best expert",
        "Megatron's, our router",
    ),
    "gpt_oss": (
        "attention sinks, alternating windows, biased experts with clamped activations",
        "our core attention",
    ),
    "qwen3_next": (
        "gated delta nets, gated attention, zero-centred norms, experts, prediction layers",
        "our delta net",
    ),
    "qwen3_5_text": ("the same, dense, with other input projections", "our delta net"),
    "qwen3_5_moe_text": ("the same with experts", "our delta net"),
    "glm4": ("norms before and after each block, partial rope in pairs of neighbours", "our norms"),
    "qwen2_vl": ("`qwen2` with a vision model", "as of the text part"),
    "qwen2_5_vl": ("`qwen2` with a vision model", "as of the text part"),
    "qwen3_vl": ("`qwen3` with a vision model", "as of the text part"),
    "qwen3_vl_moe": ("`qwen3_moe` with a vision model; experts stacked either way", "as of the text part"),
    "qwen3_5": ("`qwen3_5_text` with a vision model", "as of the text part"),
    "qwen3_5_moe": ("`qwen3_5_moe_text` with a vision model", "as of the text part"),
    "glm4v": ("GLM 4.1V: `glm4` with a vision model", "as of the text part"),
    "glm4v_moe": ("GLM 4.5V: `glm4_moe` with a vision model", "as of the text part"),
    "gemma3": ("`gemma3_text` with a vision model", "as of the text part"),
    "internvl": (
        "InternVL 3 in HF's format: `qwen2`, `qwen3`, `qwen3_moe`, `llama` or `gpt_oss` with a vision model",
        "as of the text part",
    ),
    "mistral3": ("`mistral`, `ministral3` or `mistral4` with a vision model", "as of the text part"),
    "kimi_k2": ("DeepSeek V3 under its own type", "Megatron's"),
    "iquestcoder": ("Llama under its own type", "Megatron's"),
    "internlm3": ("Llama under its own type", "Megatron's"),
    "ministral": ("windows in the layers that are named", "Megatron's, our core attention"),
    "gemma": ("zero-centred norms, scaled embeddings", "Megatron's with hooks"),
    "vaultgemma": ("Gemma 2 without the norms after each block", "our core attention"),
    "helium": ("neighbouring channels are rotated", "Megatron's"),
    "glm": (
        "GLM 4 9B: neighbouring channels are rotated, in half of each head; gate and up in one tensor",
        "Megatron's",
    ),
    "ernie4_5": ("neighbouring channels are rotated", "Megatron's"),
    "hyperclovax": ("Granite with norms after each block", "our norms"),
    "youtu": ("latent attention without experts", "Megatron's"),
    "dots1": ("DeepSeek V3's experts, norms on the heads of q and k", "Megatron's"),
    "exaone_moe": (
        "DeepSeek V3's experts; layers with a window rotate, others do not",
        "Megatron's, our core attention",
    ),
    "hy_v3": ("sigmoid routing with a bias, norms on the heads of q and k", "Megatron's"),
    "solar_open": ("GLM 4.5's experts in every layer", "Megatron's"),
    "granitemoe": ("Granite with stacked experts", "Megatron's with hooks"),
    "granitemoeshared": ("the same and a shared expert", "Megatron's with hooks"),
    "hunyuan_v1_dense": ("norms on the heads of q and k, after the rope", "our norms"),
    "hunyuan_v1_moe": ("the same with experts in every layer", "our norms"),
    "arcee": ("squared ReLUs, no gate", "Megatron's"),
    "nemotron": ("zero-centred LayerNorms, squared ReLUs, partial rope", "our norms"),
    "nemotron_h": (
        "Nano 2, Nemotron 3: a layer is a state space model (Mamba 2), attention without a rope, squared ReLUs or "
        "experts, which may take a projection",
        "our state space layer",
    ),
    "bamba": ("state space models (Mamba 2) in most layers", "our state space layer"),
    "falcon_h1": (
        "attention and a state space model (Mamba 2) side by side in every layer, factors on what they take and give",
        "our state space layer in Megatron's attention",
    ),
    "granitemoehybrid": (
        "Granite 4: state space models (Mamba 2) in most layers; MLPs, or routed and shared experts",
        "our state space layer",
    ),
    "stablelm": ("LayerNorms, partial rope", "our norms"),
    "starcoder2": ("LayerNorms, biases everywhere, an MLP without a gate", "our norms"),
    "jais2": ("LayerNorms, biases everywhere, squared ReLUs", "our norms"),
    "ernie4_5_moe": (
        "softmax routing with a bias that only chooses; neighbouring channels are rotated",
        "Megatron's, our router",
    ),
    "flex_olmo": ("OLMo 2's attention, OLMoE's experts", "our norms"),
    "ministral3": ("queries beyond the first context grow with their position", "our core attention"),
    "cohere": (
        "Command R: attention and MLP side by side after one LayerNorm without a bias; a norm for each head",
        "our norms",
    ),
    "cohere2": ("Command A, R7B: the same; layers with a window rotate, others do not", "our norms"),
    "afmoe": (
        "Trinity: gated attention, norms before and after, sigmoid routing with a bias; layers with a window rotate",
        "our norms",
    ),
    "flint": (
        "sinks in all layers, sigmoid routing without a bias; layers with a window rotate",
        "our core attention",
    ),
    "granite_swa": ("Granite with windows and sinks; a rope that layers may lack", "our core attention"),
    "granitemoe_swa": ("the same with experts", "our core attention"),
    "mellum": ("Qwen 3's experts, windows, a rope for each kind of layer", "our ropes"),
    "apertus": (
        "xIELU, an activation with weights; no gate, norms on the heads of q and k",
        "our activation",
    ),
    "olmo": ("LayerNorms without weights; q, k and v may be clipped", "our norms"),
    "nanochat": ("norms without weights, of embeddings too; squared ReLUs, capped logits", "our norms"),
    "persimmon": (
        "LayerNorms, on the heads of q and k too; biases everywhere, squared ReLUs, partial rope",
        "our norms",
    ),
    "gpt_neox": ("Pythia: attention and MLP side by side, each after a LayerNorm; partial rope", "our norms"),
    "phi": (
        "Phi 1, 1.5, 2: attention and MLP side by side after one LayerNorm; a bias on logits",
        "our norms",
    ),
    "gptj": ("the same; biases in the MLP only, neighbouring channels are rotated", "our norms"),
    "falcon": ("with a rope: attention and MLP side by side after one or two LayerNorms", "our norms"),
    "llama4_text": (
        "attention in chunks, layers without a rope whose queries grow with their position, one expert a token",
        "our core attention and norms",
    ),
    "gemma4_text": (
        "31B, 26B A4B, E2B, E4B: wider heads in full layers, whose keys may be their values too; experts next to the "
        "MLP; in E2B and E4B embeddings of each layer's own, and late layers with the keys and values of earlier ones",
        "our heads, norms, ropes and embeddings",
    ),
    "mimo": ("MiMo 7B: `qwen2` with a prediction layer, before the final norm", "Megatron's with hooks"),
    "mimo_v2_flash": (
        "layers with a window have sinks and twice the keys; values are narrower than keys",
        "our heads and core attention",
    ),
    "deepseek_v32": (
        "DeepSeek V3 with sparse attention: an indexer chooses the keys of each query, in prediction layers too",
        "our core attention",
    ),
    "glm_moe_dsa": ("GLM 5: the same with another rope in the indexer", "our core attention"),
    "mistral4": (
        "latent attention, softmax routing; queries beyond the first context grow with their position",
        "our core attention",
    ),
    "gemma4_unified_text": ("12B: the same with another window", "our heads, norms and ropes"),
    "aria_text": ("stacked routed experts and shared experts in every layer", "Megatron's"),
    "cohere2_moe": (
        "Command A with experts, North Mini Code: dense first layers, experts parallel to attention",
        "our norms",
    ),
    "olmo_hybrid": (
        "gated delta nets that may overcorrect, with norms before; full attention with norms after",
        "our delta net and norms",
    ),
    "kimi_linear": (
        "delta attention whose channels fade by themselves, latent attention without a rope, DeepSeek V3's experts",
        "our delta attention",
    ),
    "gpt2": (
        "learned positions, LayerNorms, biases everywhere; files have weights the other way round",
        "Megatron's",
    ),
    "bloom": ("ALiBi, LayerNorms, of embeddings too, biases everywhere", "our core attention and norms"),
    "gpt_bigcode": ("StarCoder 1: GPT-2 whose heads share their keys and values", "Megatron's"),
    "opt": ("learned positions, LayerNorms, biases everywhere, ReLUs", "Megatron's"),
    "minicpm3": (
        "latent attention that is rotated in halves, longrope, Granite's factors",
        "Megatron's, our rope",
    ),
    "minimax_m3_vl_text": (
        "MiniMax M3: an indexer chooses blocks of keys for each group of heads in some layers; sigmoid routing with a "
        "bias, clamped activations",
        "our core attention",
    ),
    "minimax_m3_vl": ("`minimax_m3_vl_text` with a vision model", "as of the text part"),
    "phimoe": (
        "3.5: LayerNorms, biases on attention and logits; experts are drawn at random in training (SparseMixer)",
        "our router and norms",
    ),
    "longcat_flash": (
        "latent attention with factors; two attentions and MLPs in a layer, experts on a shortcut past half of it, of "
        "which some give a token back",
        "our layer and router",
    ),
}
"""Differences of each family, and whose layers compute them."""

INDEXER = "sparse attention: an indexer chooses the keys of each query"

_REASONS: Mapping[str, str] = {
    "a norm after layers with experts only": "axk1",
    "norms with a gate that is computed from their input": "axk2",
    "an encoder that can be asked to look back only; trained with another kind of head and positions": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod"
    ),
    "the decoder of a model with an encoder, which it attends to": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet "
        "trocr whisper"
    ),
    "learned positions, and attention output alone with a bias, or scores without a scale": "gpt_neo",
    "positions are computed vectors added to scaled embeddings": "ctrl xglm",
    "learned positions that follow the mask of padding, and scaled embeddings": "biogpt",
    "learned positions, and norms after each block, on the residual": "openai-gpt",
    "GPT-2 under another type, which transformers reads and never writes": "gpt-sw3",
    "scores are shifted by the distance of tokens, in a way that is learned or other than BLOOM's": (
        "cpmant mpt"
    ),
    "attention and MLP side by side, and one tensor for q, k, v in shards of tensor ranks": "codegen",
    "biases of another kind on attention and MLP": "gpt_neox_japanese",
    "state-space or recurrent layers, alone or between attention layers": (
        "falcon_mamba jamba mamba mamba2 recurrent_gemma rwkv xlstm zamba zamba2"
    ),
    "linear attention of another kind than the gated delta nets built here": ("bailing_hybrid minimax"),
    "short convolutions in the place of attention, or before it": (
        "inkling2_text inkling_text lfm2 lfm2_moe lfm3 zaya"
    ),
    "latent attention of two kinds, with an indexer and with a window": "dots3_note_text",
    INDEXER + ", and several residual streams": "hy_v4",
    INDEXER + ", n-gram embeddings and gated residuals": "qwen4_exp_text",
    "compressed keys chosen by an indexer, experts chosen by hashes, several residual streams": (
        "deepseek_v4"
    ),
    "only the text part could be trained, and it is not taken out of the larger checkpoint": (
        "cohere_compass_text dots3_note emu3 fuyu gemma3n gemma4 gemma4_unified git got_ocr2 "
        "llama4 mllama moshi moss_transcribe_diarize musicgen musicgen_melody phi4_multimodal qwen4_exp"
    ),
    "it reads the keys and values of the larger model that it drafts for": (
        "gemma4_assistant gemma4_unified_assistant"
    ),
    "several residual streams, and inputs of each layer's own": "gemma3n_text",
    "layers have different numbers of attention heads": "laguna",
    "experts inside attention": "jetmoe",
    "differences of two attentions": "diffllama",
    "attention with a learned mask": "doge",
    "weights of three values, with norms inside attention and MLP": "bitnet",
    "bytes grouped into patches, with several transformers for them": "blt",
    "queries, keys and values are clipped": "dbrx",
    "layers that run several times over": "hrm_text",
    "each layer weighs its residuals": "beam",
    "experts are chosen by logits with a bias and weighed by their sigmoid": "kolibri1",
    "a projection and a norm between the last layer and the head": "modernbert-decoder",
    "not a decoder that predicts the next token from all before it": "reformer xlnet",
}

REFUSED: Mapping[str, str] = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}
"""By ``model_type``, why it is not supported."""


def unsupported(model_type: str) -> McaError:
    """The error for a model of a family that is not supported."""
    if model_type in REFUSED:
        return McaError(f"model_type {model_type!r} is not supported: {REFUSED[model_type]}")
    return McaError(f"model_type {model_type!r} is not supported; supported: {', '.join(sorted(SUPPORTED))}")
