"""What a stream remembers on a stage: key and value rings. Tensors only; knows nothing about scheduling or prompts."""
