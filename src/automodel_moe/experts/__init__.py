"""How experts compute.

A backend is one file with one function of this contract:

    f(experts, x_RH, idx_RK, weights_RK, *, n_pairs=None) -> y_RH

- `experts`: the model's own experts module. Its parameters keep transformers' names and layout; its flags say how
  they are laid out: `has_gate`, `has_bias`, `is_transposed`, `is_concatenated`, `has_post_expert_norm`, and its
  `_apply_gate` (or `act_fn` without a gate) is the activation.
- `x_RH`: R rows of hidden size H. `idx_RK`: local expert ids in [0, e), or -1 for a slot that adds nothing: no
  output, no bias, no gradient. `weights_RK`: routing weights, read as float32.
- `n_pairs`: how many of the R x K slots are not -1, where the caller knows it on the host.
- `y_RH[r] = sum over k of weights[r, k] * expert[idx[r, k]](x[r])`, in x's dtype, summed in float32. Every parameter
  of the module gets a gradient in every backward, zeros where no row reached it: FSDP2 reduces gradients in lockstep.

Legend of the shape suffixes: T tokens here, R rows received, K top-k, H hidden, I expert intermediate, E experts,
e local experts, N (row, slot) pairs sorted by expert.
"""
