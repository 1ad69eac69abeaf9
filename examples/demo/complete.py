"""Reload what the demo trained with plain transformers: the loss before and after, and a completion.

python complete.py FOLDER
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

PROMPT = "class Point:\n    def __init__(self, x, y):\n        self."

folder = Path(sys.argv[1])
held_out = torch.tensor(list((folder / "held_out.txt").read_bytes())).view(-1, 128)


@torch.no_grad()
def loss(model):
    return sum(model(input_ids=batch, labels=batch).loss.item() for batch in held_out.split(64)) / (
        len(held_out) // 64
    )


start = AutoModelForCausalLM.from_pretrained(folder / "start")
trained = AutoModelForCausalLM.from_pretrained(folder / "trained")
before, after = loss(start), loss(trained)

torch.manual_seed(0)
ids = torch.tensor([list(PROMPT.encode())])
completed = trained.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=160, do_sample=True, top_k=5)
print(f"\n--- completion ---\n{bytes(completed[0].tolist()).decode(errors='replace')}\n---")
print(f"loss on held-out source, nats a byte: {before:.3f} before, {after:.3f} after")
if not after < before - 1:
    sys.exit("the loss did not fall as it should")
