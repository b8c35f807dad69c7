# needs: transformers
# %% [markdown]
# # Rotate a language model before it is rounded
#
# One large feature in the stream of a language model makes the steps large by which all features of a token are rounded. The stream may be
# rotated without a change of the function; a rotation spreads the large feature over all others.

# %%
from copy import deepcopy

import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pathspace as ps

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():
    model.model.embed_tokens.weight[:, 20] *= 20  # the outlier
tokens = torch.randint(128, (8, 32))

# %% [markdown]
# The spaces are read off the graph. `O` is free up to orthogonal matrices, `GL` up to invertible ones; equal layers share a row.

# %%
spaces = ps.spaces(model, kwargs={"input_ids": tokens[:1]})
spaces

# %%
def linear_inputs(model, change):
    """Run the model with inputs of linear layers changed; the logits."""
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: (change(args[0]),))
        for layer in model.modules()
        if isinstance(layer, torch.nn.Linear)
    ]
    with torch.no_grad():
        logits = model(tokens).logits
    for hook in hooks:
        hook.remove()
    return logits


def plot(model, title):
    """The largest absolute value of each feature where the first block reads the stream."""
    seen = []
    linear_inputs(model, lambda x: seen.append(x) or x)
    figure, axis = plt.subplots(figsize=(5, 2.4), layout="constrained")
    axis.bar(range(64), seen[0].abs().amax((0, 1)).numpy())
    axis.set(title=title, xlabel="feature of the stream", ylabel="largest |activation|", ylim=(0, 8.5))


plot(model, "as made, with an outlier")

# %% [markdown]
# Hadamard matrices for all spaces. The logits stay the same, the outlier is gone.

# %%
rotated = ps.rotate_(deepcopy(model), spaces, "hadamard", seed=0)
logits = model(tokens).logits.detach()
print("same logits:", torch.allclose(rotated(tokens).logits, logits, atol=1e-5))
plot(rotated, "after Hadamard matrices")

# %% [markdown]
# Now round the inputs of all linear layers to 6 bits, with one step for each token.

# %%
def round_rows(x, bits=6):
    step = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (x / step).round() * step


def error(model):
    """Relative error of the logits."""
    return float((linear_inputs(model, round_rows) - logits).norm() / logits.norm())


print(f"error before: {error(model):.1%}, after: {error(rotated):.1%}")

# %% [markdown]
# A certificate measures that each space is free, by random elements of its group and at a second set of weights.

# %%
certificate = ps.verify(model, kwargs={"input_ids": tokens[:1]}, spaces=spaces)
print("holds:", certificate.spaces["holds"], "- dimension:", certificate.spaces["dimension"])

# %% [markdown]
# llm-compressor can rotate a checkpoint in its own pipeline. The recipe tells it which modules write a space and which read it (long lines are cut here):

# %%
recipe = ps.rotation_recipe(model, spaces)
for line in recipe[recipe.index("          R1:") :].splitlines():
    print(line[:80])

# %% [markdown]
# Hadamard matrices do not depend on your data. `ps.choose_gauge` begins at them and descends over the matrices of all spaces to the least noise
# from rounding; the result is taken only if batches that nothing was chosen on are better. Signal over noise is in dB.

# %%
batches = [{"input_ids": torch.randint(128, (4, 32))} for _ in range(6)]
chosen = ps.choose_gauge(model, spaces, ps.Noise(bits=8, activations=8), batches)
best = ps.rotate_(deepcopy(model), spaces, chosen)
print("same logits:", torch.allclose(best(tokens).logits, logits, atol=1e-5))
print("Hadamard gains more than 10 dB:", chosen.hadamard > chosen.before + 10)
print("chosen matrices gain more than 1 dB beyond:", chosen.after > chosen.hadamard + 1)

# %% [markdown]
# Next: [rotate a language model](../rotations.md); `pathspace rotate path/to/folder path/to/rotated`.
