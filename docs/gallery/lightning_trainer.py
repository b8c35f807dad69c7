# needs: lightning
# %% [markdown]
# # Lightning
#
# The optimizers of the library are torch optimizers, and a callback watches the run.

# %%
import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pathspace as ps
from pathspace.diagnostics import lightning_callback
from pathspace.training import GaugeFixed

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Task(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        graph = ps.trace(self.net, torch.randn(4, 8))
        return GaugeFixed(torch.optim.AdamW(self.net.parameters(), lr=1e-2), graph)


torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 8), torch.randint(0, 3, (128,)))
watch = lightning_callback(every=4)
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, callbacks=[watch],
)  # fmt: skip
trainer.fit(Task(), DataLoader(data, batch_size=16))
print(trainer.global_step, "steps;", len(watch.watch.rows), "measured; alarms:", watch.watch.causes)

# %% [markdown]
# Next: [watch a run](../watching.md) for the measurements, and `fabric_callback` for Lightning Fabric.
