"""Runs micro-steps on one rank: the blocks of its stage, eager or compiled, and on rank 0 the sampler."""
