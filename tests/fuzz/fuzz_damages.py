"""What the fuzzer does to one file of a valid input. Every function takes the random numbers of its case alone."""

from __future__ import annotations

import io
import os
import random
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

Content = Callable[[random.Random, bytes], bytes]

HUGE = 1 << 40  # bytes of files that have no content

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_STRING = re.compile(rb'"(?:[^"\\\n]|\\.){0,200}"')
_VALUES = [
    b"0", b"-1", b"1", b"2", b"7", b"1000000000000", b"1" + b"0" * 30, b"9" * 5000, b"4194304", b"1e400", b"1e308",
    b"-0.0", b"1e-320", b"NaN", b"Infinity", b"9223372036854775807", b"18446744073709551615", b"true", b"null", b'"x"',
    b'""', b"[]", b"{}", b"[1, 2, 3]", b'{"a": 1}',
]  # fmt: skip
_STRINGS = [
    b'""', b'"../outside/secret"', b'"/etc/passwd"', b'"/dev/zero"', b'"a\\u0000b"', b'"\\ud800"', b'"."', b'".."',
    b'"~"', b'"%s"', b'"{0..1000000000000}.tar"', b'"' + b"a" * 5000 + b'"', b'"\\u001b[2J"',
    b'"https://example.invalid/x"', b"5", b"null", b"[]",
]  # fmt: skip
_TEXTS = [
    b"[" * 100_000, b'{"a":' * 100_000, b"- " * 50_000, b"a: &a [*a]\n", b"\0" * 100, b"\xff\xfe\x00",
    b"!!python/object:x {}\n", b"{}", b"[]", b"null", b"", b"\n", b"9" * 20_000, b'"' + b"x" * 3_000_000,
    b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9) if n else b"x") for n in range(20)),
]  # fmt: skip
_SIGNS = [
    b'"', b'"', b'""', b"'", b"\t", b"\r", b"\n", b",", b"\xef\xbb\xbf", "\u2028".encode(), "\x85".encode(),
    "e\u0301".encode(), "\u200b".encode(), b"\xff\xfe",
]  # fmt: skip
_WORDS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def bits(rng: random.Random, content: bytes) -> bytes:
    """A few bytes are others."""
    changed = bytearray(content)
    for _ in range(rng.choice([1, 1, 3, 20])):
        if changed:
            changed[rng.randrange(len(changed))] = rng.choice([0, 255, 0x80, rng.randrange(256)])
    return bytes(changed)


def header_bits(rng: random.Random, content: bytes) -> bytes:
    """As `bits`, where most formats keep their sizes."""
    return bits(rng, content[:200]) + content[200:]


def words(rng: random.Random, content: bytes) -> bytes:
    """A binary number is another one."""
    kind = rng.choice(["<I", ">I", "<Q", ">Q", "<H"])
    size = struct.calcsize(kind)
    place = rng.randrange(max(1, min(len(content), rng.choice([64, 1024, 1 << 30]))))
    word = struct.pack(kind, rng.choice(_WORDS) % (1 << (8 * size)))
    return content[:place] + word + content[place + size :]


def cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def moved(rng: random.Random, content: bytes) -> bytes:
    """A part is missing, is there twice, or is repeated often."""
    begin, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    part = content[begin:end] * rng.choice([0, 2, 2, 50 if end - begin < 1000 else 3])
    return content[:begin] + part + content[end:]


def appended(rng: random.Random, content: bytes) -> bytes:
    """The file follows itself, at once or behind zeros; or a part of it does, or something else."""
    between = rng.choice([b"", b"", bytes(512), bytes(10240)])
    return content + between + rng.choice([content, content, content[: rng.randrange(len(content) + 1)], b"x" * 600])


def signs(rng: random.Random, content: bytes) -> bytes:
    """In a text stand signs that programs take for the end of a row or of a cell, or for none."""
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = rng.choice([0, rng.randrange(len(content) + 1), content.rfind(b"\n") + 1, content.find(b"\t") + 1])
        content = content[:place] + rng.choice(_SIGNS) + content[place:]
    return content


def numbers(rng: random.Random, content: bytes) -> bytes:
    """A number in a text is another value."""
    return _replaced(rng, content, _NUMBER, _VALUES)


def strings(rng: random.Random, content: bytes) -> bytes:
    """A string in a text is another one."""
    return _replaced(rng, content, _STRING, _STRINGS)


def text(rng: random.Random, content: bytes) -> bytes:
    """Another text, or a text in the middle of it."""
    new = rng.choice(_TEXTS)
    place = rng.randrange(len(content) + 1)
    return rng.choice([new, content[:place] + new + content[place:]])


def _replaced(rng: random.Random, content: bytes, pattern: re.Pattern[bytes], values: list[bytes]) -> bytes:
    found = list(pattern.finditer(content[:1_000_000]))
    if not found:
        return text(rng, content)
    place = rng.choice(found)
    return content[: place.start()] + rng.choice(values) + content[place.end() :]


def safetensors(rng: random.Random, content: bytes) -> bytes:
    """The JSON in front of the tensors says something else, and its length is right again."""
    length = int.from_bytes(content[:8], "little")
    header = rng.choice([numbers, strings, text, bits])(rng, content[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def npy(rng: random.Random, content: bytes) -> bytes:
    """The shape or the type in the header of an array is another, and its length is right again."""
    length = int.from_bytes(content[8:10], "little")
    header = content[10 : 10 + length].rstrip()
    shapes = [b"()", b"(1000000000000,)", b"(-1,)", b"(0, 1000000000)", b"(1000000, 1000000, 1000000)", b"('a',)"]
    types = [b"'|O'", b"'<f8'", b"'<i8'", b"'<U1000000'", b"'<f2'", b"'V8'", b"[('a', '<f4')]", b"'<c16'"]
    changed = rng.choice([
        lambda: re.sub(rb"\([^)]*\)", lambda _: rng.choice(shapes), header), lambda: bits(rng, header),
        lambda: re.sub(rb"'[<|>][^']*'", lambda _: rng.choice(types), header), lambda: text(rng, header)[:60_000],
    ])()  # fmt: skip
    return content[:8] + len(changed).to_bytes(2, "little") + changed + content[10 + length :]


_PICKLED = [
    b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.", b"\x80\x02})" + b"q\0h\0\x86" * 60 + b"K\x01s.",
    b"\x80\x02]" + b"q\0h\0h\0e" * 3 + b".", b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    b"\x80\x02cposix\nsystem\nX\x0b\0\0\0touch brokenQ\x85R.", b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
]  # fmt: skip


def zipped(rng: random.Random, content: bytes) -> bytes:
    """A member of a zip file is damaged, or all are compressed, and the archive is whole again."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    name, inside = rng.choice([members[0], rng.choice(members)])
    if name.endswith(".pkl"):
        changed = rng.choice([bits, header_bits, words, moved, cut, lambda rng, _: rng.choice(_PICKLED)])(rng, inside)
    else:
        changed = rng.choice([bits, cut, npy if name.endswith(".npy") else words])(rng, inside)
    out = io.BytesIO()
    method = rng.choice([zipfile.ZIP_STORED] * 5 + [zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(out, "w", method) as archive:
        for each, old in members:
            archive.writestr(each, changed if each == name else old)
    return out.getvalue()


def tarred(rng: random.Random, content: bytes) -> bytes:
    """A header of a tar is damaged, and its checksum is right again."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        place = rng.choice(archive.getmembers()).offset
    header = bytearray(content[place : place + 512])
    field = rng.choice(["size", "size", "type", "type", "name", "any"])
    if field == "size":
        sizes = [b"77777777777\0", b"\x80" + bytes(7) + b"\xff" * 4, b"\xff" * 12, b"-1234567890\0", b"x" * 12]
        header[124:136] = rng.choice(sizes)
    elif field == "type":
        header[156] = rng.choice(b"LKxgSV0123456DMNX\0")
    elif field == "name":
        others = [b"../../outside/new", b"/etc/passwd", b"\xff\xfe", b"a" * 100, b"", b"0.jpg"]
        header[0:100] = rng.choice(others).ljust(100, b"\0")
    else:
        header[rng.randrange(512)] = rng.randrange(256)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return content[:place] + bytes(header) + content[place + 512 :]


def index(rng: random.Random, content: bytes) -> bytes:
    """The line of JSON in front of the columns says something else, or a number of a column is another one."""
    header, newline, columns = content.partition(b"\n")
    if rng.randrange(3) == 0:
        return rng.choice([numbers, strings])(rng, header) + newline + columns
    place = rng.randrange(max(1, len(columns)))
    if rng.randrange(3) == 0:
        new = rng.choice([b"..", b"/", b"\0", b"../outside/secret", b"\n", b"~"])
    else:
        place, new = place // 8 * 8, struct.pack("<q", rng.choice([-1, 0, 1, 2, 7, 1 << 40, (1 << 63) - 1, -(1 << 63)]))
    return header + newline + columns[:place] + new + columns[place + len(new) :]


def parquet(rng: random.Random, content: bytes) -> bytes:
    """What stands at the end of a parquet file says something else."""
    length = int.from_bytes(content[-8:-4], "little")
    footer = rng.choice([bits, words, strings])(rng, content[-8 - length : -8])
    return content[: -8 - length] + footer + len(footer).to_bytes(4, "little") + content[-4:]


OF_KIND: dict[str, list[Content]] = {
    ".safetensors": [safetensors, safetensors, safetensors, words], ".npy": [npy, npy, npy],
    ".tar": [tarred, tarred, tarred, appended],
    ".json": [numbers, numbers, strings, text], ".jsonl": [numbers, strings, text, signs],
    ".csv": [numbers, strings, text, signs, signs], ".tsv": [numbers, text, signs, signs],
    ".yaml": [numbers, numbers, strings, text, signs], ".txt": [text, signs], ".pt": [zipped, zipped, zipped],
    ".pth": [zipped, zipped, zipped],
    ".npz": [zipped, words], ".index": [index, index, index], ".parquet": [parquet, parquet, words],
    ".arrow": [words, bits, appended], ".ogg": [appended, words], ".mp3": [appended, words],
}  # fmt: skip
ANY: list[Content] = [bits, header_bits, words, cut, moved, appended]


ENDLESS = ["/dev/zero", "/dev/stdin", "/proc/self/mem", "/dev/full"]
ELSEWHERE = ["outside/secret", "../outside/secret", "../outside", "nowhere", "."]
IN_ITS_PLACE: dict[str, Callable[[random.Random, Path], object]] = {
    "pipe": lambda rng, path: os.mkfifo(path), "folder": lambda rng, path: path.mkdir(),
    "missing": lambda rng, path: None, "endless": lambda rng, path: path.symlink_to(rng.choice(ENDLESS)),
    **{f"link {i}": lambda rng, path: path.symlink_to(rng.choice([*ELSEWHERE, path.name])) for i in range(2)},
    "bottomless": lambda rng, path: (path.write_bytes(rng.choice([b"{", b""])), os.truncate(path, HUGE)),
}  # fmt: skip


def damage(rng: random.Random, path: Path) -> str:
    """Damage a file; returns what was done, for the report."""
    if rng.randrange(8) == 0:
        what = rng.choice([*IN_ITS_PLACE])
        path.unlink()
        IN_ITS_PLACE[what](rng, path)
        return f"{path}: {what}"
    if rng.randrange(16) == 0:  # as another system writes it, as others call captions, or with letters that look alike
        name = rng.choice(
            ["e\u0301" + path.name, path.name + ".txt", path.name.upper(), path.stem + " (1)" + path.suffix]
        )
        path.rename(path.with_name(name))
        return f"{path}: called {name!r}"
    content, done = path.read_bytes(), []
    for _ in range(rng.choice([1, 1, 1, 2])):
        change = rng.choice([*OF_KIND.get(path.suffix, []), rng.choice(ANY)])
        try:
            content = change(rng, content)
        except (ValueError, KeyError, IndexError, NotImplementedError, zipfile.BadZipFile, tarfile.TarError, EOFError):
            change = bits  # the second damage of a file that the first has made unreadable
            content = change(rng, content)
        done.append(change.__name__)
    path.write_bytes(content)
    return f"{path}: {', '.join(done)}"
