from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mca_train import PairDataset, TokenDataset
from mca_train.data.sample_images import SampleImages
from mca_train.trainer import reference as module
from mca_train.trainer.reference import ReferenceLogProbs, model_fingerprint


def pairs(last=5, *, target=True):
    rows = [([1, 2, 3], [False, True, True]), ([1, 4, last], [False, True, target])]
    return PairDataset(TokenDataset.from_samples(rows))


def test_what_is_kept_serves_the_same_samples_and_reference_alone(tmp_path, monkeypatch):
    kept = ReferenceLogProbs(tmp_path, "train", pairs(), "model")
    assert kept.read() is None
    kept.write(np.array([[-1.5, -2.25]]))
    assert ReferenceLogProbs(tmp_path, "train", pairs(), "model").read().tolist() == [[-1.5, -2.25]]
    assert ReferenceLogProbs(tmp_path, "eval", pairs(), "model").read() is None
    assert ReferenceLogProbs(tmp_path, "train", pairs(last=6), "model").read() is None
    assert ReferenceLogProbs(tmp_path, "train", pairs(target=False), "model").read() is None
    assert ReferenceLogProbs(tmp_path, "train", pairs(), "other").read() is None
    monkeypatch.setattr(module, "_VERSION", 0)
    assert ReferenceLogProbs(tmp_path, "train", pairs(), "model").read() is None, "computed by older code"


def test_samples_with_both_log_probabilities_are_counted(tmp_path, caplog):
    with caplog.at_level("INFO"):
        ReferenceLogProbs(tmp_path, "train", pairs(), "model").write(
            np.array([[-1.5, -2.25], [-1.0, -2.0], [-1.0, np.nan]])
        )
    assert "log-probabilities of the reference for 2 of 3 samples" in caplog.text


def with_image(pixel: float) -> Any:
    images = SampleImages(places=(), tensors=lambda: {"pixel_values": torch.full((2, 3), pixel)})
    return [{"input_ids": np.array([1, 2]), "images": images}]


def test_images_are_known_by_what_they_show(tmp_path: Any) -> None:
    ReferenceLogProbs(tmp_path, "train", with_image(0.5), "model").write(np.array([[-1.5, -2.25]]))
    assert ReferenceLogProbs(tmp_path, "train", with_image(0.5), "model").read() is not None
    assert ReferenceLogProbs(tmp_path, "train", with_image(0.25), "model").read() is None


def test_a_file_that_is_not_whole_counts_as_none(tmp_path):
    kept = ReferenceLogProbs(tmp_path, "train", pairs(), "model")
    kept.write(np.array([[-1.5, -2.25]]))
    kept.path.write_bytes(kept.path.read_bytes()[:-30])
    assert kept.read() is None


def test_a_reference_is_known_by_its_weights_and_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fingerprint", lambda model, others: (model.weights, *others))

    def name(weights: int = 1, adapter: Any = None, **settings: Any) -> str:
        config = SimpleNamespace(to_dict=lambda: {"model": settings})
        model: Any = SimpleNamespace(weights=weights, config=config)
        if adapter is not None:
            param = SimpleNamespace(mca_name=lambda: "lora_A")
            model.rules, model.adapter = SimpleNamespace(params=[param]), SimpleNamespace(document={})
            model.adapter_parameters = lambda: iter([("lora_A", adapter)])
        return model_fingerprint(model, with_adapter=True)

    first = name(dtype="float32", rotary_base=10000)
    assert name(rotary_base=10000, dtype="float32") == first
    assert name(2, dtype="float32", rotary_base=10000) != first
    assert len({first, name(dtype="bfloat16", rotary_base=10000), name(dtype="float32", rotary_base=9)}) == 3
    assert len({name(), name(adapter=1), name(adapter=2)}) == 3


def test_values_keep_their_64_bits(tmp_path: Any) -> None:
    values = np.array([[-1 / 3, np.nan]])
    saved = ReferenceLogProbs(tmp_path, "train", pairs(), "model")
    saved.write(values)
    found = saved.read()
    assert found is not None and found.tobytes() == values.tobytes()


@pytest.mark.parametrize("index", [-1, 1])
def test_there_is_no_pair_before_the_first_or_behind_the_last(index: int) -> None:
    with pytest.raises(IndexError):
        pairs()[index]
