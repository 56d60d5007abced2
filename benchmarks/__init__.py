"""How fast the scripts are, and how much memory they take, against plain PyTorch and plain Pillow.

    python -m benchmarks                         # make bench: everything
    python -m benchmarks --only training,loading
    python -m benchmarks --only loading --image_folder photos/

Every comparison takes turns (A, B, A, B, ...), as short as can be, so that whatever else the machine does meets both
sides alike; a ratio is formed per round and reported as median, least and most. Ratios are ours over the reference.
"""
