"""Checks and measurements on a machine with a GPU: exact bits, speed, and waits of the host.

    make gpu                                      # ten minutes at most
    make gpu PYTHON=python3                       # with the packages of the system, without a network
    python -m benchmarks.gpu --only resume,waits --scripts train_vae,train_vqgan --json results.json
    python -m benchmarks.gpu --scale toy          # tiny models, also on a CPU, where some rows have no value

Parts, in this order:
    tests      those that need a GPU (tests/gpu)
    resume     a run that was killed and resumed gives the same bits as an uninterrupted one
    processes  two processes on the one GPU give the same bits as one process, with --batch_parts 2
    waits      how often per update the host waits for the GPU
    zero       losses of DeepSpeed's ZeRO stages and of FSDP against those of one process without them
    speed      samples per second and peak memory, and those of the references with PyTorch's own settings

Each job has a process and a time limit of its own: a row reports one that fails or is too slow. Jobs whose time is
measured run alone, the others several at a time. A part may also use the time that earlier parts left.
Exit code 1: bits differ, or a job failed. Exit code 2: there is no GPU.
"""
