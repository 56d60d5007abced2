"""How fast the scripts are, and how much memory they take, against plain PyTorch and plain Pillow.

    python -m benchmarks                         # make bench: everything
    python -m benchmarks --only training,loading
    python -m benchmarks --only loading --image_folder photos/

The sides of a comparison take short turns (A, B, A, B, ...), so that other load on the machine affects both alike. Each
round gives a ratio, ours over the reference; the table has their median, least and most.
"""
