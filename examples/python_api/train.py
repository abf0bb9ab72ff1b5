"""Training from Python: a model, a dataset, a trainer. Run as one process, or on several ranks under torchrun."""

import json
from pathlib import Path

from transformers import AutoTokenizer

from mca_config import TrainingArguments
from mca_models import AutoModel
from mca_train import McaTrainer

tokenizer = AutoTokenizer.from_pretrained("model")
rows = [json.loads(line)["text"] for line in Path("data/text.jsonl").read_text().splitlines()]
dataset = [{"input_ids": [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]} for text in rows]

args = TrainingArguments(
    output_dir="out",
    max_steps=10,
    logging_steps=5,
    learning_rate=1e-3,
    per_device_train_batch_size=4,
    save_strategy="no",
    report_to="none",
)
model = AutoModel.from_pretrained("model", args)
trainer = McaTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
model.save_pretrained_as_hf("out/hf", overwrite=True)
