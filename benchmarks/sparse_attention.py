"""Times the sparse attention of DeepSeek V3.2 against attention to all keys of the same sizes, in turns.

    python benchmarks/sparse_attention.py [--lengths 1024 2048 4096] [--rounds 5]

One layer's attention with its projections, an eighth of the published widths and topk (16 heads of 192 and 128
channels, an indexer of 8 heads of 128, 256 keys for a query), forward and backward, one process, one thread, fp32. Says
the median seconds of both for each length, and the median of their ratios; pairs are taken one after the other, so
that a busy machine slows both.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "integration_tests" / "support"))

SIZES: dict[str, Any] = {
    **{"num_hidden_layers": 1, "hidden_size": 896, "intermediate_size": 64, "vocab_size": 64},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 192, "kv_lora_rank": 64},
    **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts_per_tok": 2},
    **{
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
    },
    **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-6},
}
INDEXER = {"index_topk": 256, "index_n_heads": 8, "index_head_dim": 128}


def measure(lengths: list[int], rounds: int) -> dict[int, list[tuple[float, float]]]:
    """Seconds of sparse and of dense attention for each length, ``rounds`` pairs."""
    import torch

    from layouts import arguments
    from mca_models.megatron import AutoModel
    from mca_models.templates import config_from_hf

    torch.set_num_threads(1)
    layers = []
    for kind, more in (("deepseek_v32", INDEXER), ("deepseek_v3", {})):
        config = config_from_hf(
            {**SIZES, **more, "model_type": kind, "max_position_embeddings": max(lengths)}
        )
        model = AutoModel.from_config(config, arguments("tp1"), dtype="float32", seed=0)
        layers.append(model.chunks[0].decoder.layers[0].self_attention)

    def turn(attention: torch.nn.Module, hidden: torch.Tensor) -> float:
        start = time.perf_counter()
        output, _ = attention(hidden, None)
        output.sum().backward()
        return time.perf_counter() - start

    found: dict[int, list[tuple[float, float]]] = {}
    for length in lengths:
        hidden = torch.randn(length, 1, SIZES["hidden_size"], requires_grad=True)
        sparse, dense = layers
        turn(sparse, hidden), turn(dense, hidden)  # the first of each does not count
        found[length] = [(turn(sparse, hidden), turn(dense, hidden)) for _ in range(rounds)]
    return found


def main() -> int:
    """Run and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    from harness import run_ranks

    (found,) = run_ranks(1, measure, args.lengths, args.rounds, timeout=1800)
    for length, pairs in found.items():
        sparse, dense = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(one / other for one, other in pairs)
        print(f"{length} tokens: sparse {sparse:.3f} s, to all keys {dense:.3f} s, {ratio:.2f} times as long")
    return 0


if __name__ == "__main__":
    sys.exit(main())
