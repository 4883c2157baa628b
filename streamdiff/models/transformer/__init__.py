"""The causal Wan transformer on diffusers' modules. Knows nothing about caches or prompts as text."""
