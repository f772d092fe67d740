import torch
from common import net, report
from transformers import Trainer, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, labels=None):
        output = self.net(x)
        return {"loss": ((output - labels) ** 2).mean(), "logits": output}


class Items(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.full((8,), index / 256)
        return {"x": x, "labels": x.sum(0, keepdim=True)}


def main():
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=3,
        use_cpu=True,
        report_to=[],
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=5,
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Items(256), eval_dataset=Items(64))
    result = trainer.train()
    if trainer.is_world_process_zero():
        report(trainer.state.global_step, result.training_loss)


if __name__ == "__main__":
    main()
