"""What Trainer, accelerate and plain loops lack for a sharded MoE model."""
