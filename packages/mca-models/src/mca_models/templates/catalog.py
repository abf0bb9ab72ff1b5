"""Every causal language model type of transformers: supported, or the reason why not.

The other files of this package define the supported families. `docs/families.md` and
`docs/reference/unsupported_types.md` are made from these tables.
"""

from collections.abc import Mapping

from mca_config.errors import McaError
from mca_config.printable import suggestion

SUPPORTED: Mapping[str, str] = {
    "llama": "all rope scalings: linear, dynamic, llama3, yarn",
    "mistral": "sliding window",
    "cwm": "sliding-window attention in three of four layers",
    "qwen2": "biases on q, k, v",
    "seed_oss": "biases on q, k, v",
    "qwen3": "QK-norm for each head",
    "phi3": "3, 3.5, 4: one tensor for q, k, v and one for gate and up; partial rope, longrope",
    "granite": "multipliers on embeddings, attention scores, residuals and logits",
    "smollm3": "NoPE in some layers",
    "olmo2": "post-norm; QK-norm over all heads",
    "olmo3": "the same; sliding-window attention with unscaled RoPE in three of four layers",
    "exaone": "EXAONE 3: Llama under other names in files",
    "exaone4": "post-norm; RoPE only in sliding-window layers",
    "gemma2": "soft-capped scores and logits, alternating sliding windows, pre- and post-norms, zero-centered",
    "gemma3_text": "pre- and post-norms, zero-centered; separate RoPE for full and sliding-window layers",
    "mixtral": "MoE in every layer",
    "qwen2_moe": "dense and MoE layers, a gated shared expert",
    "qwen3_moe": "dense and MoE layers",
    "olmoe": "MoE; QK-norm over all heads",
    "minimax_m2": "sigmoid routing with expert bias; QK-norm over all heads, partial RoPE",
    "glm4_moe": "dense first layers, sigmoid routing with expert bias, partial RoPE, MTP",
    "deepseek_v3": "V3, R1: MLA, group-limited sigmoid routing, MTP",
    "glm4_moe_lite": "GLM 4.7 Flash: the same, dense layers anywhere",
    "axk1": "A.X K1: DeepSeek V3's layers, a norm after MoE layers",
    "sarvam_moe": "Sarvam 30B: `glm4_moe` with one tensor for q, k, v and RoPE of whole heads",
    "sarvam_mla": "Sarvam 105B: `deepseek_v3` without MTP",
    "deepseek_v2": "V2, Lite: MLA; groups chosen by their best expert",
    "gpt_oss": "attention sinks, alternating sliding windows, experts with biases and clamped SwiGLU",
    "qwen3_next": "gated delta net, gated attention, zero-centered norms, MoE, MTP",
    "qwen3_5_text": "the same, dense, with other input projections",
    "qwen3_5_moe_text": "the same with MoE",
    "glm4": "pre- and post-norms, partial interleaved RoPE",
    "qwen2_vl": "`qwen2` with a vision model",
    "qwen2_5_vl": "`qwen2` with a vision model",
    "qwen3_vl": "`qwen3` with a vision model",
    "qwen3_vl_moe": "`qwen3_moe` with a vision model; experts stacked either way",
    "qwen3_5": "`qwen3_5_text` with a vision model",
    "qwen3_5_moe": "`qwen3_5_moe_text` with a vision model",
    "glm4v": "GLM 4.1V: `glm4` with a vision model",
    "glm4v_moe": "GLM 4.5V: `glm4_moe` with a vision model",
    "glm46v": "GLM 4.6V: the text model of `glm4v` or `glm4v_moe` with a vision model",
    "glmga": "`glm46v` under its own type",
    "glm_ocr": "GLM-OCR: `glm4` without biases, with a vision model",
    "gemma3": "`gemma3_text` with a vision model",
    "internvl": "InternVL 3 in HF's format: `qwen2`, `qwen3`, `qwen3_moe`, `llama` or `gpt_oss` with a vision model",
    "got_ocr2": "GOT-OCR 2: `qwen2` with a SAM vision model",
    "qianfan_ocr": "`qwen3` with the vision model of `internvl`",
    "mistral3": "`mistral`, `ministral3` or `mistral4` with a vision model",
    "kimi_k2": "DeepSeek V3 under its own type",
    "iquestcoder": "Llama under its own type",
    "internlm3": "Llama under its own type",
    "ministral": "sliding-window attention in listed layers",
    "gemma": "zero-centered norms, scaled embeddings",
    "vaultgemma": "Gemma 2 without post-norms",
    "helium": "interleaved RoPE",
    "glm": "GLM 4 9B: interleaved RoPE in half of each head; gate and up in one tensor",
    "ernie4_5": "interleaved RoPE",
    "hyperclovax": "Granite with post-norms",
    "youtu": "MLA, dense",
    "dots1": "DeepSeek V3's MoE, QK-norm for each head",
    "exaone_moe": "DeepSeek V3's MoE; RoPE only in sliding-window layers",
    "hy_v3": "sigmoid routing with expert bias, QK-norm for each head",
    "solar_open": "GLM 4.5's MoE in every layer",
    "granitemoe": "Granite with stacked experts",
    "granitemoeshared": "the same and a shared expert",
    "hunyuan_v1_dense": "QK-norm for each head, after RoPE",
    "hunyuan_v1_moe": "the same with MoE in every layer",
    "arcee": "squared ReLU, no gate",
    "nemotron": "zero-centered LayerNorm, squared ReLU, partial RoPE",
    "nemotron_h": "Nano 2, Nemotron 3: each layer Mamba 2, attention without RoPE, squared-ReLU MLP, or (latent) MoE",
    "bamba": "Mamba 2 in most layers",
    "falcon_h1": "attention and Mamba 2 in parallel in every layer, multipliers on their inputs and outputs",
    "granitemoehybrid": "Granite 4: Mamba 2 in most layers; MLP, or routed and shared experts",
    "stablelm": "LayerNorm, partial RoPE",
    "starcoder2": "LayerNorm, biases everywhere, an MLP without a gate",
    "jais2": "LayerNorm, biases everywhere, squared ReLU",
    "ernie4_5_moe": "softmax routing with a bias for the selection only; interleaved RoPE",
    "flex_olmo": "OLMo 2's attention, OLMoE's MoE",
    "ministral3": "query temperature that grows with the position",
    "cohere": "Command R: parallel attention and MLP after one LayerNorm without bias; QK-norm for each head",
    "cohere2": "Command A, R7B: the same; RoPE only in sliding-window layers",
    "afmoe": "Trinity: gated attention, pre- and post-norms, expert bias; RoPE only in sliding-window layers",
    "flint": "attention sinks in all layers, sigmoid routing without bias; RoPE only in sliding-window layers",
    "granite_swa": "Granite with sliding windows and attention sinks; NoPE in some layers",
    "granitemoe_swa": "the same with MoE",
    "mellum": "Qwen 3's MoE, sliding windows, separate RoPE for each layer type",
    "apertus": "xIELU, an activation with weights; no gate, QK-norm for each head",
    "olmo": "LayerNorm without weights; `clip_qkv`",
    "nanochat": "norms without weights, also of embeddings; squared ReLU, soft-capped logits",
    "persimmon": "LayerNorm, also as QK-norm; biases everywhere, squared ReLU, partial RoPE",
    "gpt_neox": "Pythia: parallel attention and MLP, each after a LayerNorm; partial RoPE",
    "phi": "Phi 1, 1.5, 2: parallel attention and MLP after one LayerNorm; a bias on logits",
    "gptj": "the same; biases in the MLP only, interleaved RoPE",
    "falcon": "with RoPE: parallel attention and MLP after one or two LayerNorms",
    "llama4_text": "chunked attention, NoPE layers with query temperature, top-1 routing",
    "gemma4_text": (
        "wider heads in full-attention layers, which may have K = V; MoE next to the MLP (26B A4B); per-layer "
        "embeddings and shared KV in late layers (E2B, E4B)"
    ),
    "mimo": "MiMo 7B: `qwen2` with one MTP layer, before the final norm",
    "mimo_v2_flash": "sliding-window layers have attention sinks and twice the KV heads; `v_head_dim` below `head_dim`",
    "deepseek_v32": "DeepSeek V3 with DSA (lightning indexer), also in MTP layers",
    "glm_moe_dsa": "GLM 5: the same with another RoPE in the indexer",
    "mistral4": "MLA, softmax routing, query temperature that grows with the position",
    "gemma4_unified_text": "12B: `gemma4_text` with another sliding window",
    "aria_text": "stacked routed experts and shared experts in every layer",
    "cohere2_moe": "Command A with MoE, North Mini Code: dense first layers, MoE parallel to attention",
    "olmo_hybrid": "pre-norm gated delta net with negative eigenvalues; post-norm full attention",
    "kimi_linear": "Kimi delta attention (per-channel decay), MLA without RoPE, DeepSeek V3's MoE",
    "gpt2": "learned positions, LayerNorm, biases everywhere; transposed weights in files",
    "bloom": "ALiBi, LayerNorm, also of embeddings, biases everywhere",
    "gpt_bigcode": "StarCoder 1: GPT-2 with multi-query attention",
    "opt": "learned positions, LayerNorm, biases everywhere, ReLU",
    "minicpm3": "MLA with non-interleaved RoPE, longrope, Granite's multipliers",
    "minimax_m3_vl_text": "MiniMax M3: block-sparse attention with an indexer in some layers, clamped SwiGLU",
    "gemma4": (
        "`gemma4_text` with a vision model, and an audio model (E2B, E4B); images attend in both directions (26B, 31B)"
    ),
    "gemma4_unified": "12B: `gemma4_unified_text`, projected patches and waveforms; images attend in both directions",
    "cohere2_vision": "Command A Vision: `cohere2` with a SigLIP vision model",
    "aya_vision": "`cohere2` with a SigLIP vision model",
    "lighton_ocr": "LightOnOCR: `qwen3` with the vision model of `mistral3`",
    "llama4": "`llama4_text` with a vision model",
    "deepseek_vl": "`llama` with a SigLIP vision model",
    "exaone4_5": "`exaone4` with a vision model",
    "kimi_k25": "Kimi K2.5: `kimi_k2` or `deepseek_v3` with a vision model whose q, k and v are one tensor in files",
    "llava": "LLaVA 1.5: `llama`, `mistral`, `qwen2` or `qwen3` with a CLIP or SigLIP vision model",
    "llava_next": "LLaVA 1.6: the same on tiles; `llama`, `mistral` or `qwen2`",
    "vipllava": "`llama` with a CLIP vision model, of which several layers are seen",
    "llava_onevision": "`qwen2` with a SigLIP vision model; the only image of a sequence is cut into tiles",
    "idefics3": "`llama` with a SigLIP vision model on tiles",
    "smolvlm": "SmolVLM 2: `llama` with a SigLIP vision model on tiles",
    "lfm2_vl": "`lfm2` with a SigLIP 2 vision model on tiles",
    "minicpmv4_6": "MiniCPM-V 4.6: `qwen3_5_text` with a SigLIP vision model, which merges windows of patches",
    "lfm3_vl": "`lfm3` with a vision model of convolutions and attention",
    "ovis2": "`qwen2` with a vision model whose patches are shares of visual words",
    "qwen2_5_omni_thinker": "`qwen2` with a vision model and an audio encoder",
    "qwen2_5_omni": "`qwen2_5_omni_thinker`, which is trained, and a talker, which is copied",
    "qwen3_omni_moe_thinker": "`qwen3_moe` with the vision model of `qwen3_vl` and an audio encoder",
    "qwen3_omni_moe": "`qwen3_omni_moe_thinker`, which is trained, and a talker, which is copied",
    "qwen3_asr": "`qwen3` with the audio encoder of `qwen3_omni_moe_thinker`",
    "qwen2_audio": "`qwen2` with a Whisper encoder",
    "voxtral": "`llama` with a Whisper encoder; a clip may have several windows",
    "audioflamingo3": "`qwen2` with the same",
    "glmasr": "`llama` with an audio encoder with RoPE",
    "minimax_m3_vl": "`minimax_m3_vl_text` with a vision model",
    "phimoe": "3.5: LayerNorm, biases on attention and logits; SparseMixer routing, random in training",
    "longcat_flash": (
        "MLA with multipliers; two attentions and MLPs in a layer, shortcut-connected MoE with zero-compute experts"
    ),
    "minimax": "MiniMax-Text-01: lightning attention in most layers, scaled residuals through the norms, MoE",
    "jamba": "Mamba 1 in most layers, attention without RoPE, MoE in every other layer",
    "mamba": "a Mamba 1 mixer alone in each layer",
    "falcon_mamba": "the same; time steps, B and C are normalized",
    "mamba2": "Codestral Mamba: a Mamba 2 mixer alone in each layer",
    "bailing_hybrid": "Ling 3: Kimi delta attention with a bounded decay, MLA with head gates, DeepSeek V3's MoE",
    "lfm2": "gated short convolutions in most layers, QK-norm for each head",
    "lfm3": "gated short convolutions, sliding windows with their own RoPE, an output gate for each head",
    "lfm2_moe": "`lfm2` with MoE: dense first layers, sigmoid routing with expert bias",
}
"""Differences of each family from a plain decoder."""

INDEXER = "DSA (lightning indexer)"

_REASONS: Mapping[str, str] = {
    "norms with an input-dependent gate": "axk2",
    "an encoder with an optional causal mask; other head and positions": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
        "roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod"
    ),
    "the decoder of an encoder-decoder model (cross-attention)": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet "
        "trocr whisper"
    ),
    "learned positions, a bias on the attention output alone, or unscaled attention scores": "gpt_neo",
    "sinusoidal positions added to scaled embeddings": "ctrl xglm",
    "learned positions that depend on the padding mask, and scaled embeddings": "biogpt",
    "learned positions, and post-norms on the residual": "openai-gpt",
    "GPT-2 under another type that transformers reads and never writes": "gpt-sw3",
    "learned relative position biases, or ALiBi other than BLOOM's": ("cpmant mpt"),
    "parallel attention and MLP, and one q, k, v tensor interleaved by tensor rank": "codegen",
    "another kind of bias on attention and MLP": "gpt_neox_japanese",
    "state space or recurrent layers, alone or between attention layers": ("recurrent_gemma rwkv xlstm"),
    "Mamba layers, between which a few attention blocks run several times, on hidden states that are joined with the "
    "embeddings of the tokens": "zamba zamba2",
    "short convolutions in place of attention, or before it": ("inkling2_text inkling_text zaya"),
    "two kinds of MLA, with an indexer and with a sliding window": "dots3_note_text",
    INDEXER + ", and several residual streams": "hy_v4 hy_v4_vl",
    INDEXER + ", n-gram embeddings and gated residuals": "qwen4_exp_text",
    "an indexer over compressed keys, hash routing, several residual streams": ("deepseek_v4"),
    "a multimodal model; its text part is not extracted": (
        "cohere_compass_text dots3_note emu3 fuyu git "
        "moshi moss_transcribe_diarize musicgen musicgen_melody qwen4_exp"
    ),
    "a vision model of timm; several residual streams, and per-layer embeddings": "gemma3n",
    "adapters for each medium in published files, separators of image crops that are parameters, and audio projectors "
    "that depend on the images of a batch": "phi4_multimodal",
    "features that are added to the embeddings of placeholders, all of which attend to each other in both directions": (
        "molmo2"
    ),
    "the model of `got_ocr2`, with a chat template that writes all placeholders of an image": "pp_chart2table",
    "audio": (
        "fun_asr_nano inkling_mm_model kyutai_speech_to_text muse_spark nemo_speechlm omniasr vibevoice_asr"
    ),
    "an audio encoder with batch norms, whose statistics are of the clips of a batch and change in training; a "
    "Q-Former; an adapter for rows with audio in published files": ("granite_speech granite_speech_plus"),
    "audio added to the embedding of each token, and norms that depend on the delay of the text": (
        "voxtral_realtime"
    ),
    "a vision model that mca does not know; its text part is of a supported type": (
        "aria deepseek_vl_hybrid fast_vlm hyperclovax_vision_v2 "
        "idefics2 llava_next_video "
        "minicpm_ocr nemotron_h_omni perception_lm "
        "video_llama_3 video_llava"
    ),
    "positions of an image and its slices on one canvas, which follow from the marks around them; the vision model and "
    "the text part are those of `minicpmv4_6`": "minicpmv4_7",
    "a vision model and a text part that mca does not know": (
        "cohere_compass cosmos3_edge deepseek_ocr2 glm5_next granite_docling hunyuan_vl "
        "inkling2 kosmos-2 kosmos-2.5 mistral_large4 muse_glimmer paddleocr_vl step3p7 unlimited_ocr"
    ),
    "a prompt whose tokens, also those of its text, attend to each other in both directions; no chat template": (
        "paligemma"
    ),
    "in each layer, a router and experts of another width for the tokens of images next to those for text": (
        "ernie4_5_vl_moe"
    ),
    "a Q-Former between the vision model and the text part": (
        "blip-2 granite4_vision instructblip instructblipvideo"
    ),
    "images as tokens of a codebook": "apertus1p5 chameleon janus",
    "cross-attention to the features of an image or a protein": "blip evolla idefics mllama",
    "an encoder-decoder model": (
        "florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder canary cohere_asr dia moonshine "
        "moonshine_streaming pop2piano seamless_m4t seamless_m4t_v2 speech-encoder-decoder speech_to_text speecht5"
    ),
    "diffusion, or actions, in place of the next token": "cosmos3_omni diffusion_gemma pi0 vibevoice",
    "Gemma 3 with scores of policies in place of text": "shieldgemma2",
    "a draft model that reads the keys and values of its target model": (
        "gemma4_assistant gemma4_unified_assistant"
    ),
    "several residual streams, and per-layer embeddings": "gemma3n_text",
    "different numbers of attention heads by layer": "laguna",
    "mixture of attention heads": "jetmoe",
    "differential attention": "diffllama",
    "dynamic mask attention": "doge",
    "an output layer with fewer rows than the embedding": "apertus1p5_text",
    "ternary weights, with norms inside attention and MLP": "bitnet",
    "byte latent transformer with dynamic patches": "blt",
    "`clip_qkv` with MoE": "dbrx",
    "recurrent depth: layers run several times": "dory hrm_text inkling2_loop inkling2_loop_text",
    "gated delta net of separate norms, sliding windows and attention without RoPE in turns": "lara_mini",
    "learned residual weights in each layer": "beam",
    "routing by biased logits with sigmoid gates": "kolibri1",
    "a prediction head (projection and norm) before the output layer": "modernbert-decoder",
    "not a causal decoder": "reformer xlnet",
}

REFUSED: Mapping[str, str] = {kind: reason for reason, kinds in _REASONS.items() for kind in kinds.split()}
"""By ``model_type``, why it is not supported."""


def unsupported(model_type: str) -> McaError:
    """The error for a model of a family that is not supported."""
    if model_type in REFUSED:
        return McaError(f"model_type {model_type!r} is not supported: {REFUSED[model_type]}")
    if model_type in SUPPORTED:
        return McaError(
            f"model_type {model_type!r} has no file; add it to FILES of mca_models/templates/__init__.py"
        )
    similar = suggestion(model_type, SUPPORTED, "").removesuffix("; ")
    ending = f"{similar} Supported" if similar else "; supported"
    return McaError(f"model_type {model_type!r} is not supported{ending}: {', '.join(sorted(SUPPORTED))}")
