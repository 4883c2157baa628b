"""What a rank computes: a stage's blocks on a micro-step, and the sampler on rank 0."""
