import numpy as np

from mca_train import PairDataset, TokenDataset
from mca_train.checkpoint.reference_file import ReferenceFile


def pairs(last=5, *, target=True):
    rows = [([1, 2, 3], [False, True, True]), ([1, 4, last], [False, True, target])]
    return PairDataset(TokenDataset.from_samples(rows))


def test_what_is_kept_serves_the_same_samples_and_reference_alone(tmp_path):
    kept = ReferenceFile(tmp_path, "train", pairs(), "model")
    assert kept.read() is None
    kept.write(np.array([[-1.5, -2.25]]))
    assert ReferenceFile(tmp_path, "train", pairs(), "model").read().tolist() == [[-1.5, -2.25]]
    assert ReferenceFile(tmp_path, "eval", pairs(), "model").read() is None
    assert ReferenceFile(tmp_path, "train", pairs(last=6), "model").read() is None
    assert ReferenceFile(tmp_path, "train", pairs(target=False), "model").read() is None
    assert ReferenceFile(tmp_path, "train", pairs(), "other").read() is None


def test_a_file_that_is_not_whole_counts_as_none(tmp_path):
    kept = ReferenceFile(tmp_path, "train", pairs(), "model")
    kept.write(np.array([[-1.5, -2.25]]))
    kept.path.write_bytes(kept.path.read_bytes()[:-30])
    assert kept.read() is None
