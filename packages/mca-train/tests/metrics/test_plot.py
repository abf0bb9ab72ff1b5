"""The picture of a run's losses."""

from mca_train.run.record import plot_losses

LOGS = [{"step": 1, "loss": 2.0, "loss/a": 1.5}, {"step": 2, "eval_loss": 1.0}, {"step": 3, "loss": 1.0}]


def test_losses_are_drawn_where_they_can_be(tmp_path, monkeypatch, caplog):
    path = plot_losses(LOGS, tmp_path)
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")
    assert plot_losses([{"step": 1, "grad_norm": 2.0}], tmp_path) is None
    assert plot_losses(LOGS, tmp_path / "absent") is None
    assert "loss.png: cannot be written" in caplog.text
    monkeypatch.setattr("mca_train.run.record.find_spec", lambda name: None)
    assert plot_losses(LOGS, tmp_path) is None
