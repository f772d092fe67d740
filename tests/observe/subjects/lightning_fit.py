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
        self.log("train_loss", self.last)
        return self.last

    def validation_step(self, batch, index):
        x, y = batch
        error = self.net(x) - y
        self.log("val_size", error.abs().max())
        self.log("val_loss", (error**2).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


module = Module()
trainer = lightning.Trainer(
    max_epochs=3,
    accumulate_grad_batches=3,
    log_every_n_steps=5,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(module, DataLoader(data(), batch_size=16), DataLoader(data(64), batch_size=16))
report(trainer.global_step, module.last)
