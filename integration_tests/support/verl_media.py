"""Answers to prompts with images, a video and text only, with the inputs that verl's agent loop makes of them."""

from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from tensordict import TensorDict
from torch.nn.functional import pad
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils.tokenizer import hf_processor

from verl_data import VISION

START, END, IMAGE, VIDEO = VISION
SIZE = 16, 24, 3
"""Sides of an image in pixels, a multiple of a token's, and its colours."""


class MediaRollout:
    """Rollout of random answers, the same on every rank.

    Args:
        model: Directory of a Qwen2.5-VL.
        answers: Answers to each prompt.
        length: Tokens of an answer.
    """

    def __init__(self, model: str, answers: int, length: int) -> None:
        self._processor = hf_processor(model)
        self._answers, self._length = answers, length

    @cached_property
    def _loop(self) -> Any:
        return SimpleNamespace(
            processor=self._processor,
            tokenizer=self._processor.tokenizer,
            _get_mm_processor_kwargs=lambda audios: {},
        )

    def batch(self, iteration: int) -> TensorDict:
        """Return the answers as verl's rollout returns them; no micro-batch of two answers has text only."""
        generator = np.random.default_rng(iteration)

        def draw(*frames: int) -> Any:
            pixels = generator.integers(0, 256, (*frames, *SIZE), dtype=np.uint8)
            return torch.from_numpy(pixels).permute(0, 3, 1, 2) if frames else Image.fromarray(pixels)

        prompts: list[tuple[str, dict[str, list[Any]]]] = [
            (f"{START}{IMAGE}{END}the quick fox", {"images": [draw()]}),
            ("who is the lazy dog", {}),
            (f"a {START}{VIDEO}{END} red", {"videos": [draw(4)]}),
            (f"{START}{IMAGE}{END}{START}{IMAGE}{END}", {"images": [draw(), draw()]}),
        ]
        rows = [self._row(text, media, generator) for _ in range(self._answers) for text, media in prompts]
        width = max(len(row["prompt"]) for row in rows)
        columns = [self._padded(row, width) for row in rows]
        tensors = {name: torch.cat([each[name] for each in columns]) for name in columns[0]}
        inputs = np.array([row["inputs"] for row in rows], dtype=object)
        # verl's trainer turns the rollout's DataProto into a TensorDict
        found: TensorDict = DataProto.from_single_dict(
            tensors | {"multi_modal_inputs": inputs}
        ).to_tensordict()
        return found

    def _row(self, text: str, media: dict[str, list[Any]], generator: np.random.Generator) -> dict[str, Any]:
        prompt = self._processor(text=[text], **media, return_tensors="pt")["input_ids"][0]
        answer = torch.from_numpy(generator.integers(3, 400, int(generator.integers(4, self._length + 1))))
        return {"prompt": prompt, "answer": answer, "media": media, "inputs": {}}

    def _padded(self, row: dict[str, Any], width: int) -> dict[str, torch.Tensor]:
        """Return the columns of a row, and put its media into it as verl's agent loop does."""
        before, after = width - len(row["prompt"]), self._length - len(row["answer"])
        prompt, answer = pad(row["prompt"], (before, 0))[None], pad(row["answer"], (0, after))[None]
        mask = torch.ones_like(answer).cumsum(1) <= len(row["answer"])
        attention = torch.cat([torch.arange(width)[None] >= before, mask], 1).long()
        ids = torch.cat([prompt, answer], 1)
        output = SimpleNamespace(multi_modal_data=row["media"], mm_processor_kwargs={})
        row["inputs"] = AgentLoopWorker._compute_multi_modal_inputs(self._loop, output, ids)
        places = AgentLoopWorker._compute_position_ids(self._loop, ids, attention, row["inputs"], {})
        return {
            "prompts": prompt,
            "responses": answer,
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": places,
            "response_mask": mask.long(),
        }
