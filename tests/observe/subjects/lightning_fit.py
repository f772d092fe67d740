import lightning
import torch
from common import data, net, report
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, index):
        x, y = batch
        self.last = ((self.net(x) - y) ** 2).mean()
        return self.last

    def validation_step(self, batch, index):
        self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


module = Module()
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    barebones=False,
)
trainer.fit(module, DataLoader(data(), batch_size=16), DataLoader(data(64), batch_size=16))
report(trainer.global_step, module.last)
