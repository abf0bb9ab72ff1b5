"""The stream of weights into a model of transformers on the same device: what arrives, and how fast."""

import time
from typing import Any

import torch

from tools.gpu_kit.kit import Kit
from tools.gpu_kit.parity import TIMES
from tools.gpu_kit.smoke import relative
from tools.gpu_kit.speed import document_of

ROUNDS = 3


def stream(kit: Kit) -> None:
    """Fills a model of transformers anew, in bf16."""
    import transformers

    from mca_config.arguments import DistributingParallelArguments
    from mca_models import AutoModel
    from mca_models.templates import config_from_hf

    document = document_of("1.7b", kit.tiny)
    model: Any = AutoModel.from_config(
        config_from_hf(document), DistributingParallelArguments(), dtype="bfloat16"
    )
    config = transformers.AutoConfig.for_model(**document)
    with torch.device(kit.device):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    places = dict(theirs.named_parameters())
    seconds = []
    for _ in range(ROUNDS + 1):
        kit.synchronise()
        start, arrived, total = time.perf_counter(), set(), 0
        with torch.no_grad():
            for name, tensor in model.export_weights():
                places[name].copy_(tensor)
                arrived.add(name)
                total += tensor.nbytes
        kit.synchronise()
        seconds.append(time.perf_counter() - start)
    kit.figure("GiB", total / 2**30)
    kit.figure("GiB/s", total / 2**30 / min(seconds[1:]))
    tied = {name for name in places if name == "lm_head.weight" and config.head.tie_word_embeddings}
    kit.holds("every parameter arrives", arrived | tied == places.keys() | tied)
    _same(kit, model, theirs, config.vocab_size)


def _same(kit: Kit, model: Any, theirs: Any, vocabulary: int) -> None:
    """Both compute the same, as far as bf16 goes: the error is some times that of transformers against fp32."""
    import copy

    input_ids = torch.randint(0, vocabulary, (2, 64), generator=torch.Generator().manual_seed(5))
    ours = model.logits(input_ids)
    with torch.no_grad():
        half = theirs(input_ids.to(kit.device), use_cache=False).logits
        exact = copy.deepcopy(theirs).float()(input_ids.to(kit.device), use_cache=False).logits
    kit.check("logits", relative(ours, exact), TIMES * relative(half, exact))
