"""Safe reading and writing of files, for all other packages: all may import it, and it imports none of them.

`reading` reads untrusted files: no pipe, no device, a bounded length and depth. `writing` writes
every file: whole or not at all, and never through a link.
"""
