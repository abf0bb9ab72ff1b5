"""Samples that a case trains and evaluates on: ragged ones, or packs that are filled to the last token."""

from typing import Any

from net.case import STEPS, Case
from train_cases import filled_packs, samples

PER_PACK, HELD_OUT = 3, 5


def data_parallel_size(case: Case) -> int:
    sizes = [
        case.options.get(f"{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")
    ]
    return case.ranks // (sizes[0] * sizes[1] * sizes[2])


def step_size(case: Case) -> int:
    """Samples (packs) of a step."""
    return case.micro * int(case.options["gradient_accumulation_steps"]) * data_parallel_size(case)


def units(case: Case) -> int:
    """Samples (packs) of all steps; the last may be short."""
    return max(STEPS * step_size(case) - case.short, (STEPS - 1) * step_size(case) + 1)


def training_data(case: Case) -> Any:
    vocab = case.changes["vocab_size"]
    if not case.packed:
        return samples(units(case), longest=24, vocab=vocab, seed=case.number)
    unit = 2 * case.options.get("context_parallel_size", 1)
    return filled_packs(units(case), PER_PACK, length=8 * unit, unit=unit, vocab=vocab, seed=case.number)


def pack_length(case: Case) -> int | None:
    return 16 * case.options.get("context_parallel_size", 1) if case.packed else None


def held_out(case: Case) -> Any:
    longest = 16 if case.packed else 24
    return samples(HELD_OUT, longest=longest, vocab=case.changes["vocab_size"], seed=9)


def micro_batches(case: Case) -> list[list[list[Any]]]:
    """By step and micro-batch (those of all replicas, in the order of the samples), its samples."""
    data = training_data(case)
    rows = [data[index] for index in range(len(data))]
    each = PER_PACK if case.packed else 1
    packs = [rows[start : start + each] for start in range(0, len(rows), each)]
    of_step = [packs[start : start + step_size(case)] for start in range(0, len(packs), step_size(case))]
    return [
        [
            [sample for pack in step[start : start + case.micro] for sample in pack]
            for start in range(0, len(step), case.micro)
        ]
        for step in of_step
    ]
