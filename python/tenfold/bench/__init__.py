"""How fast tenfold is under PyTorch, beside other backends in the same run: `python -m tenfold.bench --help`.

`operations` measures single calls through `torch.distributed`, `ddp` steps of a training, `overhead` a call
that moves nothing. Without PyTorch, and against MPI, `tenfold bench` measures operations from Rust.
"""
