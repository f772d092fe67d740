#!/usr/bin/env python

# # Rows of a table

# In[1]:


import sys

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from ended import ended
from torch.utils.data import DataLoader, Dataset

np.random.seed(0)
torch.manual_seed(0)


# In[2]:


df = pd.DataFrame(np.random.rand(2000, 12), columns=[f"c{i}" for i in range(12)])
df["y"] = (df.sum(axis=1) > 6).astype("float32")
df.head()


# In[3]:


class Frame(Dataset):
    def __init__(self, df):
        self.df = df

    def __len__(self):
        return len(self.df)

    def __getitem__(self, i):
        row = self.df.iloc[i]
        x = torch.tensor(row.drop("y").values.astype("float32"))
        return x, torch.tensor(row["y"], dtype=torch.float32)


dl = DataLoader(Frame(df), batch_size=32, shuffle=True)


# In[4]:


model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1))
opt = torch.optim.SGD(model.parameters(), lr=np.float32(0.1))
steps = items = 0
for epoch in range(int(sys.argv[1])):
    for xb, yb in dl:
        loss = nn.functional.binary_cross_entropy_with_logits(model(xb).squeeze(1), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        steps += 1
        items += len(xb)
    print(epoch, loss.item(), flush=True)


# In[5]:


ended(model, steps, items, loss.item())
