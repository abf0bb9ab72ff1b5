"""Names of ``mcore_adapter`` as ROLL's Megatron strategy and weight update import them, on top of mca.

``docs/other_programs.md`` lists what maps and what does not. The facade for LLaMA-Factory is another package of the
same name.
"""

from .training_args import TrainingArguments

__all__ = ["TrainingArguments"]
