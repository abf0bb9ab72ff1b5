"""How much a rank sends in a step of more micro-batches than were run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mca_train.dry_run.tracker import Message, MessageKind, Tally

_BETWEEN_STAGES = ("send", "recv", "recv_any_source")


def told_apart(
    tally: Tally, before: Mapping[MessageKind, Message], passes: Sequence[int], micro_batches: int
) -> tuple[Message, ...]:
    """The messages of ``tally``, with what each micro-batch adds.

    Args:
        tally: Of a step.
        before: Those of a reference, which runs all micro-batches before the first is trained.
        passes: Numbers of one forward and one backward pass of each chunk, with which nothing is sent that is sent
            once in a step.
        micro_batches: How many were run.
    """
    found = []
    for kind, message in tally.messages.items():
        of_all, of_one = (
            before.get(kind, Message(*kind)),
            [tally.messages_in.get(number, {}) for number in passes],
        )
        if message.operation in _BETWEEN_STAGES:  # they follow other passes than their own
            of_all, of_one = message, []
        own = [sent[kind] for sent in of_one if kind in sent]
        count = of_all.count / micro_batches + sum(each.count for each in own)
        size = of_all.bytes / micro_batches + sum(each.bytes for each in own)
        found.append(replace(message, each_count=count, each_bytes=size))
    return tuple(found)


def in_step(message: Message, further: int) -> Message:
    """The same in a step of so many ``further`` micro-batches."""
    return replace(
        message,
        count=message.count + round(further * message.each_count),
        bytes=message.bytes + round(further * message.each_bytes),
    )
