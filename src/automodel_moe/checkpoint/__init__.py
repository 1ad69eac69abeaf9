"""What transformers' load and save lack for sharded MoE models."""
