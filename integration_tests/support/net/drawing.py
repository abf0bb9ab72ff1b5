"""Draws cases. A part that is refused is drawn again, except in one case of ten: those prove that it is refused."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness import MAX_RANKS
from mca_config.layout import SIZE_FIELDS, ParallelLayout
from mca_train.config.model import smallest_world
from net import models, options
from net.admission import is_admitted
from net.case import Case
from reference import FAMILY_CASES

UNRULY = 0.1
TRIES = 60


def draw(seed: int, number: int) -> Case:
    """Case ``number`` of ``seed``; the same as long as this folder and what the product refuses do not change."""
    rng = random.Random(f"{seed}/{number}")
    unruly = rng.random() < UNRULY
    while True:
        plain = _model_and_ranks(rng, seed, number)
        case = next((each for each in _laid_out(rng, plain) if unruly or is_admitted(each)), None)
        if case is not None:
            break
    for choices in options.chosen(rng, sparse=models.is_sparse(case.base), prediction=bool(case.prediction)):
        tried = (replace(case, options=options.together(case.options, choice)) for choice in choices)
        case = next((each for each in tried if unruly or is_admitted(each)), case)
    return replace(case, short=rng.choice((0, 0, 1)))


def _model_and_ranks(rng: random.Random, seed: int, number: int) -> Case:
    """A family and the sizes of a layout that stands on few enough ranks."""
    bases = sorted(FAMILY_CASES)
    base = rng.choice(bases + [case for case in bases if models.is_sparse(case)])
    prediction = models.prediction_layers(rng, base)
    lora = models.adapter(rng, base) if not prediction and rng.random() < 0.25 else None
    most = rng.choice((2, 4, 4, MAX_RANKS))  # ranks are what a case costs
    while True:
        sizes = options.layout(rng, sparse=models.is_sparse(base))
        ranks = _ranks(rng, sizes)
        if ranks <= most:
            return Case(
                seed=seed,
                number=number,
                base=base,
                prediction=prediction,
                lora=lora,
                ranks=ranks,
                options=sizes,
            )


def _laid_out(rng: random.Random, case: Case) -> Iterator[Case]:
    """With models of other sizes, dealt to the stages in other ways."""
    for _ in range(TRIES):
        changes = models.sizes(rng, case.base)
        split = options.split(rng, case.options, changes["num_hidden_layers"], case.prediction)
        sizes = case.options | split
        yield replace(case, changes=changes, options=sizes | options.batch(rng, sizes))


def _ranks(rng: random.Random, sizes: dict[str, Any]) -> int:
    """Return the ranks of the drawn number of replicas; an invalid layout gets any number."""
    names = {SIZE_FIELDS[axis] for axis in ("tp", "pp", "cp", "ep", "etp")}
    plain = ParallelLayout(**{name: sizes[name] for name in names & sizes.keys()})
    return smallest_world(plain) * rng.choice((1, 1, 1, 2, 2, 4))
