"""Fine-tune a causal language model on a text file with a plain torch loop.

python SCRIPT MODEL TEXT OUTPUT, or torchrun --nproc_per_node N SCRIPT MODEL TEXT OUTPUT
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
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

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)

model = AutoModelForCausalLM.from_pretrained(args.model).to(device)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

blocks = byte_blocks(args.text, args.length)
sampler = DistributedSampler(blocks, num_replicas=world_size, rank=rank, seed=0, drop_last=True)
loader = DataLoader(blocks, batch_size=args.batch, sampler=sampler, drop_last=True)

for step, batch in zip(range(1, args.steps + 1), loader, strict=False):
    batch = batch.to(device)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

    mean = loss.detach()
    if world_size > 1:
        dist.all_reduce(mean)
        mean /= world_size
    if rank == 0:
        print(f"step {step} loss {mean.item():.6f} norm {float(norm):.6f}", flush=True)

model.save_pretrained(args.output)
