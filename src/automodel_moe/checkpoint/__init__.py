"""What transformers' load and save lack for sharded MoE models.

- `load.py`: the context around `from_pretrained`; `headers.py`, `plan.py` and `preflight.py` check a checkpoint before
  a weight is read; `guard.py` keeps conversions from running on slices where that would change the result.
- `quantized.py`: MXFP4 and FP8 checkpoints as bfloat16.
- `save.py`: `save_pretrained` of a sharded model in the checkpoint's own layout. `reverse.py` finds which parameters
  become which keys, `layout.py` where their bytes go, `shares.py` which of them a rank holds; `writer.py` writes them,
  and `commit.py` puts the new checkpoint in the place of an earlier one.
- `reload.py`: a checkpoint read into a model that is there already, in place.
- `stream.py`: the same keys and tensors for a running engine instead of a disk.
- `patching.py`: how a function of transformers is wrapped, and only while a model is loading.
"""
