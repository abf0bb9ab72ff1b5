"""Every schedule that Hugging Face names drives Megatron's groups as it drives a torch optimizer."""

import json

import pytest

torch = pytest.importorskip("torch")

STEPS = 20
EXTRA = {
    "warmup_stable_decay": {"num_decay_steps": 6, "min_lr_ratio": 0.1},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
}


def names():
    from transformers import SchedulerType

    return [kind.value for kind in SchedulerType]


BY_METRIC = [name for name in ("reduce_lr_on_plateau", "greedy") if name in names()]


def arguments(tmp_path, name, **more):
    from mca_config import TrainingArguments

    return TrainingArguments(
        output_dir=str(tmp_path),
        lr_scheduler_type=name,
        lr_scheduler_kwargs=EXTRA.get(name, {}),
        learning_rate=2e-3,
        warmup_steps=4,
        report_to="none",
        use_cpu=True,
        **more,
    )


@pytest.mark.parametrize("name", [n for n in names() if n not in BY_METRIC])
def test_rates_are_hugging_faces_and_survive_a_checkpoint(name, tmp_path):
    from transformers.optimization import get_scheduler

    from mca_train.lr_schedule import LearningRate

    args = arguments(tmp_path, name)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    theirs = get_scheduler(name, optimizer, 4, STEPS, scheduler_specific_kwargs=EXTRA.get(name, {}))
    ours, groups = LearningRate(args, STEPS), [{"wd_mult": 0.0}, {"lr_mult": 0.5}]
    for step in range(STEPS):
        if step == 9:
            state, ours = ours.state_dict(), LearningRate(args, STEPS)
            ours.load_state_dict(state, 0)
        ours.write(groups)
        assert groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
        assert groups[1]["lr"] == pytest.approx(groups[0]["lr"] / 2)
        optimizer.step()
        theirs.step()
        ours.step()


def test_a_run_that_goes_on_follows_its_own_rate_and_length(tmp_path):
    from mca_train.lr_schedule import LearningRate

    first = LearningRate(arguments(tmp_path, "linear"), STEPS)
    for _ in range(STEPS):
        first.step()
    assert first.value == 0.0
    args = arguments(tmp_path, "linear")
    args.learning_rate = 1e-2
    longer, whole = LearningRate(args, 2 * STEPS), LearningRate(args, 2 * STEPS)
    longer.load_state_dict(first.state_dict(), 0)
    whole.move(STEPS)
    for _ in range(3):
        assert longer.value == whole.value > 0.0
        longer.step()
        whole.step()


def test_a_least_rate_over_none_is_a_problem_of_its_schedule(tmp_path):
    from mca_train.lr_schedule import schedule_problems

    args = arguments(tmp_path, "cosine_with_min_lr")
    args.learning_rate, args.lr_scheduler_kwargs = 0.0, {"min_lr": 1e-6}
    (problem,) = schedule_problems(args)
    assert problem.startswith(
        "lr_scheduler_type cosine_with_min_lr with lr_scheduler_kwargs {'min_lr': 1e-06}: "
    )


def test_warm_up_stable_decay(tmp_path):
    from mca_train.lr_schedule import LearningRate

    rate, seen = LearningRate(arguments(tmp_path, "warmup_stable_decay"), STEPS), []
    for _ in range(STEPS):
        seen.append(rate.value)
        rate.step()
    assert seen[0] < 5e-4
    assert seen[4:14] == [2e-3] * 10
    assert seen[14:] == sorted(seen[14:], reverse=True)
    assert seen[-1] < 1e-3


@pytest.mark.parametrize("warmup", [{"warmup_steps": 0.2}, {"warmup_steps": 4}])
def test_warm_up_as_a_share_or_as_steps(warmup, tmp_path):
    from mca_config import TrainingArguments
    from mca_train.lr_schedule import LearningRate

    args = TrainingArguments(
        output_dir=str(tmp_path), learning_rate=2e-3, report_to="none", use_cpu=True, **warmup
    )
    rate, seen = LearningRate(args, STEPS), []
    for _ in range(6):
        seen.append(rate.value)
        rate.step()
    assert seen[:5] == pytest.approx([0.0, 5e-4, 1e-3, 1.5e-3, 2e-3])
    assert seen[5] < seen[4]


def test_groups_with_rates_of_their_own_go_from_the_highest_to_the_least(tmp_path):
    from mca_train.lr_schedule import LearningRate

    rate = LearningRate(arguments(tmp_path, "linear", min_lr=1e-3), STEPS)
    groups = [
        {"max_lr": 2e-3, "min_lr": 1e-3},
        {"max_lr": 8e-3, "min_lr": 4e-3},
        {"max_lr": 8e-3, "min_lr": None},
    ]
    seen = []
    for _ in range(STEPS + 1):
        rate.write(groups)
        seen.append([group["lr"] for group in groups])
        rate.step()
    assert seen[0] == [0.0] * 3
    assert seen[4] == pytest.approx([2e-3, 8e-3, 8e-3])
    assert seen[12] == pytest.approx([1.5e-3, 6e-3, 4.5e-3])
    assert seen[-1] == pytest.approx([1e-3, 4e-3, 1e-3])


def test_a_plateau_of_the_metric_lowers_the_rate(tmp_path):
    from mca_train.lr_schedule import LearningRate

    args = arguments(tmp_path, "reduce_lr_on_plateau", eval_strategy="steps", eval_steps=5)
    args.lr_scheduler_kwargs = {"patience": 1, "factor": 0.5}
    rate = LearningRate(args, STEPS)
    for _ in range(4):
        rate.step()
    assert rate.value == 2e-3
    for metric in (1.0, 1.0, 1.0):
        rate.scheduler.step(metric)
    assert rate.value == 1e-3
    args.min_lr = 4e-4
    ended = LearningRate(args, STEPS)
    seen = []
    for _ in range(6):  # as many evaluations as a schedule with a warm-up would have steps of it, and more
        ended.scheduler.step(1.0)
        seen.append(ended.value)
    assert seen == pytest.approx([2e-3, 2e-3, 1.2e-3, 1.2e-3, 8e-4, 8e-4]), (
        "no jump after warmup_steps evaluations"
    )


@pytest.mark.parametrize("name", BY_METRIC)
def test_a_run_goes_on_by_steps_after_a_metric_and_back(name, tmp_path):
    from mca_train.lr_schedule import LearningRate

    def plateau():
        return LearningRate(arguments(tmp_path, name, eval_strategy="steps", eval_steps=5), STEPS)

    def saved(rate):
        return json.loads(json.dumps(rate.state_dict()))

    first, counted = plateau(), LearningRate(arguments(tmp_path, "linear"), STEPS)
    first.scheduler.step(1.0)
    by_steps = LearningRate(arguments(tmp_path, "linear"), STEPS)
    by_steps.load_state_dict(saved(first), 9)
    for _ in range(9):
        counted.step()
    for _ in range(3):
        assert by_steps.value == counted.value < 2e-3
        by_steps.step()
        counted.step()
    again = plateau()
    again.load_state_dict(saved(by_steps), 12)
    again.scheduler.step(1.0)
    assert again.value == by_steps.value
    assert again.scheduler.num_bad_epochs == first.scheduler.num_bad_epochs


def test_a_rate_that_is_kept_leaves_those_of_other_groups_alone(tmp_path):
    """Resumed with another learning_rate, a schedule by metric keeps the run's; rates of parts keep their share."""
    from mca_train.lr_schedule import LearningRate

    def plateau(highest, least):
        args = arguments(tmp_path, "reduce_lr_on_plateau", eval_strategy="steps", min_lr=least)
        args.lr_scheduler_kwargs, args.learning_rate = {"patience": 0, "factor": 0.5}, highest
        return LearningRate(args, STEPS)

    first = plateau(2e-3, 4e-4)
    for value in (1.0, 1.0):
        first.scheduler.step(value)
    assert first.value == pytest.approx(1.2e-3)
    again = plateau(2e-4, 1e-4)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())), 0)
    groups = [{"max_lr": 2e-4, "min_lr": 1e-4}, {"max_lr": 1e-3, "min_lr": 0.0}, {}]
    again.write(groups)
    assert [group["lr"] for group in groups] == pytest.approx([1.2e-3, 5e-4, 1.2e-3])
    assert again.value == first.value


def test_a_schedule_that_follows_another_metric_keeps_its_rate_alone(tmp_path):
    from mca_train.lr_schedule import LearningRate

    def plateau(metric):
        args = arguments(
            tmp_path, "reduce_lr_on_plateau", eval_strategy="steps", metric_for_best_model=metric
        )
        args.lr_scheduler_kwargs = {"patience": 0}
        return LearningRate(args, STEPS)

    first = plateau("loss")
    for value in (1.0, 1.0, 0.5):
        first.scheduler.step(value)
    for metric, best in (("eval_loss", 0.5), ("accuracy", float("inf"))):
        again = plateau(metric)
        again.load_state_dict(first.state_dict(), 0)
        assert (again.value, again.scheduler.best) == (first.value, best)


def test_a_run_that_is_all_warm_up_is_refused_at_its_start(tmp_path):
    """Transformers' polynomial schedule divides by the steps after the warm-up, at the end of the run."""
    from mca_config.errors import McaError
    from mca_train.lr_schedule import LearningRate, run_rate, schedule_problems

    args = arguments(tmp_path, "polynomial")
    assert not list(schedule_problems(args)), "the length of the run is not known yet"
    rate = LearningRate(args, 4)
    with pytest.raises(ZeroDivisionError):
        for _ in range(4):
            rate.step()
    with pytest.raises(
        McaError, match=r"polynomial .*warmup_steps \(the run has 4 steps, 4 of them of warm-up\)"
    ):
        run_rate(args, 4)
    assert run_rate(args, 5).value == 0.0
    assert run_rate(arguments(tmp_path, "linear"), 4).value == 0.0
