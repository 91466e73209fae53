"""Speed of tenfold under PyTorch, compared with other backends in one run: `python -m tenfold.bench --help`.

`operations` measures single calls through `torch.distributed`, `ddp` steps of DDP training, `overhead` calls
that move no data. Without PyTorch, and against MPI, `tenfold bench` measures operations from Rust.
"""
