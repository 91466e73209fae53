"""Writes float8.txt: how PyTorch converts to and from eight-bit floats. Run with any torch that has them.

halves KIND HASH          FNV-1a of the codes of all 65 536 float16 values in order, with 0 for those of NaN
values KIND VALUE...      the f32 bits of all 256 codes
single BITS CODE...       the codes of one f32, a kind each; random bits, and random numbers near ties
"""

import torch
torch.manual_seed(7)
KINDS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
half = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()

def fnv(bs):
    h = 0xcbf29ce484222325
    for b in bs: h = ((h ^ b) * 0x100000001b3) & 0xffffffffffffffff
    return h
lines = []
for kind in KINDS:
    codes = half.to(kind).view(torch.uint8).clone()
    codes[half.isnan()] = 0  # the sign of NaN is not compared
    lines.append(f"halves {str(kind)[6:]} {fnv(codes.tolist()):016x}")
for kind in KINDS:
    v = torch.arange(256, dtype=torch.uint8).view(kind).float().view(torch.int32)
    f = torch.arange(256, dtype=torch.uint8).view(kind).float()
    lines.append(f"values {str(kind)[6:]} " + " ".join("nan" if n else f"{b & 0xffffffff:08x}" for b, n in zip(v.tolist(), f.isnan().tolist())))
bits = torch.randint(-2**31, 2**31, (400,)).to(torch.int32)
near = (torch.randint(90, 150, (400,)) << 23 | torch.randint(0, 8, (400,)) << 20 | torch.randint(0,2,(400,)) << 19 | torch.randint(0, 3, (400,))).to(torch.int32)
x = torch.cat([bits, near]).view(torch.float32)
codes = [x.to(k).view(torch.uint8).tolist() for k in KINDS]
for i, b in enumerate(torch.cat([bits, near]).tolist()):
    if x[i].isnan(): continue
    lines.append(f"single {b & 0xffffffff:08x} " + " ".join(f"{c[i]:02x}" for c in codes))
open("float8.txt", "w").write("# Made by float8.py with torch " + torch.__version__ + "\n" + "\n".join(lines) + "\n")
