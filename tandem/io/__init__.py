"""Safe reading and writing of files, for every other package: it imports none of them, and all of them may import it.

A file that somebody else may have made is read by `reading`: no pipe, no device, a bounded length and depth. Every file
is written by `writing`: whole or not at all, and never through a link.

It stands in the folder `tandem`, because a leaf can then import it by one name, from a checkout and when installed.
"""
