"""Everything about a machine with a GPU, in one command: what is exact, what is fast, and what waits.

    make gpu                                      # ten minutes at most
    make gpu PYTHON=python3                       # with the packages of the system, without a network
    python -m benchmarks.gpu --only resume,waits --scripts train_vae,train_vqgan --json results.json
    python -m benchmarks.gpu --scale toy          # tiny models, also on a CPU, where some rows have no value

Parts, in this order:
    tests      those that need a GPU (tests/gpu)
    resume     a run that SIGKILL ended and that was started again leaves the same bits as one that was left alone
    processes  two processes on the one GPU leave the same bits as one process, with --batch_parts 2
    waits      how often per update the host waits for the GPU
    zero       losses of DeepSpeed's ZeRO stages and of FSDP against those of one process without them
    speed      samples per second and peak memory, and those of the references with PyTorch's own settings

Each job has a process and a time limit of its own: one that fails or is too slow is a row that says why. Jobs whose
time is measured run alone, the others several at a time. A part may also use the time that earlier parts left.
Exit code 1: bits differ, or a job failed. Exit code 2: there is no GPU, so nothing could be shown.
"""
