"""Model catalogue, checkpoints, network parts and the loader that builds them.

Where torchao is installed, diffusers imports it at every start, quantised or not, and they then log what does not
concern a user, such as which CUDA extensions are for other GPUs. That is muted here; errors are not.
"""

import logging

for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer"):
    logging.getLogger(_name).setLevel(logging.ERROR)
