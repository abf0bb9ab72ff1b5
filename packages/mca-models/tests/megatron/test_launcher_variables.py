"""Missing variables of a launcher raise one error, before a rank waits for another or takes its GPU."""

import pytest

from mca_config.errors import McaError
from mca_models.megatron.platform._device import local_rank, require_launcher

WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in WHOLE.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (WHOLE | {"RANK": "x"}, "RANK is 'x'; expected a number"),
        (WHOLE | {"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'; expected a number"),
        (WHOLE | {"RANK": "2"}, "RANK 2 is not below WORLD_SIZE 2"),
        (without("MASTER_ADDR"), "MASTER_ADDR must be set"),
        (without("MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR and MASTER_PORT must be set"),
        (WHOLE | {"MASTER_PORT": ""}, "MASTER_PORT is ''"),
    ],
)
def test_variables_that_no_rank_could_join_with(environment: dict[str, str], message: str) -> None:
    with pytest.raises(McaError, match=message):
        require_launcher(environment)


def test_variables_of_a_launcher_pass() -> None:
    require_launcher(WHOLE)
    require_launcher(without("LOCAL_RANK"))


@pytest.mark.parametrize(
    ("environment", "gpus", "expected"),
    [
        ({}, 8, 0),
        ({"LOCAL_RANK": "-1"}, 8, 0),
        (WHOLE, 2, 1),
        (without("LOCAL_RANK"), 1, 0),
        (without("LOCAL_RANK") | {"WORLD_SIZE": "1"}, 8, 0),
        (without("LOCAL_RANK"), 8, "LOCAL_RANK is not set, so that all ranks .* first of its 8 GPUs"),
        (WHOLE, 1, "LOCAL_RANK is 1, but this process sees 1 GPU;"),
        (WHOLE | {"LOCAL_RANK": "8"}, 8, "LOCAL_RANK is 8, but this process sees 8 GPUs;"),
        (WHOLE | {"LOCAL_RANK": "one"}, 8, "LOCAL_RANK is 'one'"),
        (WHOLE | {"LOCAL_RANK": "-1"}, 8, "LOCAL_RANK is '-1'"),
    ],
)
def test_a_rank_takes_its_own_gpu_or_says_why_not(
    environment: dict[str, str], gpus: int, expected: int | str
) -> None:
    if isinstance(expected, int):
        assert local_rank(environment, gpus) == expected
        return
    with pytest.raises(McaError, match=expected):
        local_rank(environment, gpus)
