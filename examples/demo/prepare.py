"""Make what the demo trains: a small Qwen3-MoE checkpoint with random weights, and the standard library as text.

python prepare.py FOLDER
"""

import sys
import sysconfig
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

TEXT_BYTES, HELD_OUT_BYTES = 4_000_000, 65_536

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)

sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = b"\n".join(source.read_bytes() for source in sources)
(folder / "held_out.txt").write_bytes(text[:HELD_OUT_BYTES])
(folder / "text.txt").write_bytes(text[HELD_OUT_BYTES:][:TEXT_BYTES])

torch.manual_seed(0)
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=256,  # a token is a byte: no tokenizer is needed
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
    )
)
model.save_pretrained(folder / "start")
parameters = sum(parameter.numel() for parameter in model.parameters())
print(f"{folder / 'start'}: Qwen3-MoE, 4 layers of 8 experts, {parameters / 1e6:.1f} M parameters, random weights")
print(
    f"{folder / 'text.txt'}: {len(sources)} modules of the standard library, at most {TEXT_BYTES / 1e6:.0f} MB of them"
)
