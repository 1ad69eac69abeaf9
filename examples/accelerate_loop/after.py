"""Fine-tune a causal language model on a text file with accelerate.

python SCRIPT MODEL TEXT OUTPUT, or torchrun --nproc_per_node N SCRIPT MODEL TEXT OUTPUT
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from automodel_moe import MoEAutoModel as AutoModelForCausalLM


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

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
set_seed(0)

model = AutoModelForCausalLM.from_pretrained(args.model)
model.train()
order = torch.Generator().manual_seed(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(byte_blocks(args.text, args.length), args.batch, shuffle=True, generator=order)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step, losses = 0, []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        step += 1
        accelerator.print(f"step {step} loss {sum(losses) / len(losses):.6f} norm {float(norm):.6f}", flush=True)
        losses = []
    if step == args.steps:
        break

accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained(
    args.output, is_main_process=accelerator.is_main_process, save_function=accelerator.save
)
accelerator.end_training()
