"""Trains a character-level GPT: a configuration at the top, get_batch(), evaluations and checkpoints in the loop."""

import ast
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F

# Each value may be replaced on the command line: python gpt.py eval_iters=20 block_size=32
out_dir = "out"
data = ""  # a text file; without one, text is made up
eval_interval = 250
eval_iters = 200
log_interval = 10
batch_size = 16
block_size = 64
n_layer = 2
n_head = 4
n_embd = 64
dropout = 0.0
learning_rate = 1e-3
weight_decay = 0.1
beta2 = 0.99
grad_clip = 1.0
max_iters = 3000

for argument in sys.argv[1:]:
    key, _, value = argument.partition("=")
    if key not in globals():
        raise SystemExit(f"unknown configuration key: {key}")
    try:
        globals()[key] = ast.literal_eval(value)
    except (SyntaxError, ValueError):
        globals()[key] = value

torch.manual_seed(1337)
os.makedirs(out_dir, exist_ok=True)
text = Path(data).read_text() if data else "".join(chr(97 + (i * i + i // 7) % 26) for i in range(300_000))
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
texts = {"train": text[: len(text) * 9 // 10], "val": text[len(text) * 9 // 10 :]}


def encode(s):
    return [stoi[c] for c in s]


def get_batch(split):
    part = texts[split]
    starts = torch.randint(len(part) - block_size - 1, (batch_size,))
    x = torch.stack([torch.tensor(encode(part[i : i + block_size])) for i in starts])
    y = torch.stack([torch.tensor(encode(part[i + 1 : i + 1 + block_size])) for i in starts])
    return x, y


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, n_head, C // n_head).transpose(1, 2) for z in self.c_attn(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout if self.training else 0.0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block() for _ in range(n_layer)])
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, len(chars), bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


model = GPT()
optimizer = torch.optim.AdamW(
    model.parameters(), lr=learning_rate, betas=(0.9, beta2), weight_decay=weight_decay
)
X, Y = get_batch("train")
t0 = time.time()
for iter_num in range(max_iters + 1):
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    logits, loss = model(X, Y)
    X, Y = get_batch("train")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    t1 = time.time()
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {(t1 - t0) * 1000:.2f}ms", flush=True)
    t0 = t1
