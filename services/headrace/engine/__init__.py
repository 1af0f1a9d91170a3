"""The engine: model code from transformers; the KV pool, the attention over it, the step loop and sampling are ours."""

from headrace.torch_environment import set_torch_environment

set_torch_environment()
