# needs: transformers
# %% [markdown]
# # Hugging Face models
#
# The library works on an unmodified model of transformers, with tied embeddings and caches. It needs no list of layers.

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pathspace as ps

config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
inputs = {"input_ids": torch.arange(8)[None]}
graph = ps.trace(model, kwargs=inputs)
print(graph.num_weights, "weights,", graph.num_units, "free scales, of which", graph.num_exact_units, "are exact")

# %% [markdown]
# Rescale the units that are exact for the unchanged model: the logits do not change.

# %%
with torch.no_grad():
    before = model(**inputs).logits
    ps.rescale_(model, graph, torch.randn(graph.num_units), exact=True)
    print(torch.allclose(model(**inputs).logits, before, atol=1e-5))

# %% [markdown]
# Quantisation tools use lists of layers between which scales can be moved. Here these pairs follow from the model.

# %%
pairs = ps.smoothing_pairs(graph)
for pair in pairs:
    print(", ".join(pair.writers), "->", ", ".join(pair.readers))

# %% [markdown]
# A skeleton needs no weights, so it also works for models that are larger than the memory.

# %%
with torch.device("meta"):
    large = LlamaForCausalLM(config)
bare = ps.trace(large, kwargs={"input_ids": torch.zeros(1, 8, dtype=torch.long, device="meta")})
print(bare.num_units == graph.num_units)

# %% [markdown]
# Next: `model.config.save_pretrained("llama")` writes a configuration. `pathspace masks transformers:llama/config.json -o masks.safetensors`
# reads it. For checkpoints on disk there is `pathspace balance`.
