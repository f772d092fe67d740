"""Trains an LSTM language model: no DataLoader, no optimizer, threads as on a larger machine."""

import argparse
import math
import time

import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="word-level language model")
parser.add_argument("--data", default="", help="a text file; without one, words are made up")
parser.add_argument("--emsize", type=int, default=64, help="size of word embeddings")
parser.add_argument("--nhid", type=int, default=64, help="number of hidden units per layer")
parser.add_argument("--nlayers", type=int, default=2)
parser.add_argument("--lr", type=float, default=5.0)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch_size", type=int, default=20)
parser.add_argument("--bptt", type=int, default=25)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--seed", type=int, default=1111)
parser.add_argument("--threads", type=int, default=8, help="of the machine it was written on")
parser.add_argument("--log-interval", type=int, default=100)
parser.add_argument("--save", default="model.pt")
args = parser.parse_args()
torch.manual_seed(args.seed)
torch.set_num_threads(args.threads)


class Corpus:
    def __init__(self, path):
        if path:
            with open(path) as f:
                words = f.read().split()
        else:
            words = [f"w{(i * i + i // 11) % 997}" for i in range(120_000)]
        self.idx2word = sorted(set(words))[:2000]
        word2idx = {word: i for i, word in enumerate(self.idx2word)}
        ids = torch.tensor([word2idx.get(word, 0) for word in words])
        self.train, self.valid = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


corpus = Corpus(args.data)
ntokens = len(corpus.idx2word)
eval_batch_size = 10
train_data, val_data = batchify(corpus.train, args.batch_size), batchify(corpus.valid, eval_batch_size)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(args.dropout)
        self.encoder = nn.Embedding(ntokens, args.emsize)
        self.rnn = nn.LSTM(args.emsize, args.nhid, args.nlayers, dropout=args.dropout)
        self.decoder = nn.Linear(args.nhid, ntokens)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, ntokens)
        return torch.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return tuple(weight.new_zeros(args.nlayers, bsz, args.nhid) for _ in range(2))


model = RNNModel()
criterion = nn.NLLLoss()


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(data_source):
    model.eval()
    total_loss, hidden = 0.0, model.init_hidden(eval_batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(epoch, lr):
    model.train()
    total_loss, start_time, hidden = 0.0, time.time(), model.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            cur_loss, elapsed = total_loss / args.log_interval, time.time() - start_time
            print(
                f"| epoch {epoch:3d} | {batch:5d}/{len(train_data) // args.bptt:5d} batches | lr {lr:02.2f} | ms/batch "
                f"{elapsed * 1000 / args.log_interval:5.2f} | loss {cur_loss:5.2f} | ppl {math.exp(cur_loss):8.2f}",
                flush=True,
            )
            total_loss, start_time = 0.0, time.time()


lr, best_val_loss = args.lr, None
for epoch in range(1, args.epochs + 1):
    epoch_start_time = time.time()
    train(epoch, lr)
    val_loss = evaluate(val_data)
    print(
        f"| end of epoch {epoch:3d} | time: {time.time() - epoch_start_time:5.2f}s | valid loss {val_loss:5.2f}",
        flush=True,
    )
    if best_val_loss is None or val_loss < best_val_loss:
        with open(args.save, "wb") as f:
            torch.save(model, f)
        best_val_loss = val_loss
    else:
        lr /= 4.0
