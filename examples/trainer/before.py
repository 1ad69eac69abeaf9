"""Fine-tune a causal language model on a text file with `Trainer`.

python SCRIPT MODEL TEXT OUTPUT, or torchrun --nproc_per_node N SCRIPT MODEL TEXT OUTPUT
"""

import argparse

import torch
from transformers import Trainer, TrainingArguments
from transformers import AutoModelForCausalLM


def byte_blocks(path, length):
    """The file's bytes as int64 ids, shape [blocks, length]."""
    with open(path, "rb") as file:
        ids = torch.tensor(list(file.read()))
    return ids[: len(ids) // length * length].view(-1, length)


parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text")
parser.add_argument("output")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=8, help="sequences a process")
parser.add_argument("--length", type=int, default=64, help="tokens a sequence")
args = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(args.model)
trainer = Trainer(
    model=model,
    train_dataset=[{"input_ids": block, "labels": block} for block in byte_blocks(args.text, args.length)],
    args=TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_grad_norm=1.0,
        logging_steps=max(1, args.steps // 20),
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
)
trainer.train()
trainer.save_model()
trainer.save_state()
