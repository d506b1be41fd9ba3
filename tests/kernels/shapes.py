"""One table of shapes for every implementation of every op: odd lengths, group sizes 1 to 16, edges of the window."""

from typing import NamedTuple


class Attention(NamedTuple):
    """A paged case: rows with these committed lengths run ``tokens`` queries each."""

    lengths: tuple[int, ...]
    tokens: int
    kv_heads: int
    groups: int
    head_dim: int
    page: int


PAGED = {
    "one token, first of all": Attention((0,), 1, 1, 1, 16, 4),
    "empty row beside a long one": Attention((0, 61), 3, 2, 2, 24, 8),
    "batch mix, pages half full": Attention((5, 17, 40), 4, 2, 3, 64, 16),
    "more rows than are sliced one by one": Attention((3, 0, 9, 21, 1, 7, 2, 30, 5, 16, 11), 2, 2, 2, 16, 8),
    "exactly full pages": Attention((16, 32), 9, 1, 4, 20, 16),
    "one position a page": Attention((3, 7), 2, 2, 1, 18, 1),
    "sixteen queries a key head": Attention((33,), 5, 1, 16, 128, 32),
    "wide heads": Attention((9,), 7, 3, 1, 256, 8),
    "prefill chunk": Attention((19, 0), 37, 2, 2, 32, 8),
}


class Window(NamedTuple):
    """A ring case: committed lengths, then ``drafted`` recurrent entries, seen through window and sink."""

    lengths: tuple[int, ...]
    drafted: int
    window: int
    sink: int
    spare: int
    kv_heads: int
    groups: int
    head_dim: int


WINDOWS = {
    "shorter than the window": Window((3, 6), 2, 16, 4, 5, 2, 2, 24),
    "one below the edge": Window((11,), 1, 8, 4, 3, 1, 4, 16),
    "on the edge": Window((12,), 1, 8, 4, 3, 1, 4, 16),
    "one past the edge": Window((13,), 1, 8, 4, 3, 1, 4, 16),
    "wrapped many times": Window((200, 57, 131), 4, 13, 3, 5, 2, 3, 64),
    "no sink": Window((90, 4), 3, 7, 0, 4, 2, 1, 18),
    "window of one": Window((40, 2), 1, 1, 2, 2, 1, 2, 128),
    "sink only just filled": Window((5, 6), 0, 3, 5, 2, 1, 1, 16),
    "wide heads, long ring": Window((700,), 2, 300, 64, 4, 1, 16, 256),
    "native": Window((31, 9), 3, 40, 0, 0, 2, 2, 20),
    "native, several blocks": Window((2100, 1500), 2, 2500, 0, 0, 1, 2, 16),
}


class Delta(NamedTuple):
    """A gated-delta-rule case."""

    rows: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int


DELTAS = {
    "one token": Delta(2, 1, 3, 8, 12),
    "verified run": Delta(1, 5, 2, 16, 10),
    "longest verified run": Delta(2, 9, 4, 24, 24),
    "one short of a chunk": Delta(1, 63, 1, 8, 20),
    "one chunk": Delta(2, 64, 2, 12, 8),
    "one past a chunk": Delta(1, 65, 3, 8, 8),
    "several chunks": Delta(1, 150, 2, 128, 64),
}


class StateSpace(NamedTuple):
    """A case of state-space duality: rows of at most ``tokens`` tokens, padded, of which these many are ``valid``."""

    valid: tuple[int, ...]
    tokens: int
    heads: int
    groups: int
    width: int
    size: int


STATE_SPACES = {
    "one token": StateSpace((1, 1), 1, 3, 1, 4, 8),
    "one token, empty row": StateSpace((0, 1), 1, 2, 2, 4, 8),
    "two tokens, a group a head": StateSpace((2,), 2, 3, 3, 12, 10),
    "more heads a group than run together": StateSpace((3,), 3, 18, 2, 4, 8),
    "verified run": StateSpace((5,), 5, 4, 2, 64, 128),
    "longest verified run": StateSpace((9, 4, 0), 9, 6, 3, 4, 8),
    "one past a run": StateSpace((10, 0), 10, 4, 2, 4, 8),
    "one short of a chunk": StateSpace((63,), 63, 2, 1, 20, 8),
    "one chunk": StateSpace((64, 33), 64, 4, 4, 8, 12),
    "one past a chunk": StateSpace((65, 64), 65, 6, 2, 4, 8),
    "several chunks": StateSpace((150, 0, 71), 150, 4, 2, 64, 64),
}

# What the Mosaic GPU kernels take: head dimensions of 64, 128 or 256, pages of 64 tokens and more, rings of 64 slots.
GPU_PAGED = {
    "first token of an empty row": Attention((0,), 1, 1, 1, 64, 64),
    "mixed batch, pages half full": Attention((5, 197, 64), 4, 2, 3, 64, 64),
    "edges of tiles and pages": Attention((63, 64, 127), 1, 1, 4, 128, 128),
    "longest run, sixteen queries a key head": Attention((150,), 9, 1, 16, 64, 64),
    "verified run of the 35B": Attention((300, 0), 7, 2, 8, 256, 256),
    "prefill chunk over tiles": Attention((70, 0), 37, 1, 4, 128, 64),
}

GPU_WINDOWS = {
    "one below the edge": Window((67,), 1, 64, 4, 4, 1, 4, 64),
    "on the edge and past it": Window((68, 69), 1, 64, 4, 4, 1, 4, 64),
    "wrapped many times, odd slots": Window((31, 1057, 131), 3, 64, 3, 6, 2, 3, 64),
    "no sink, tiles of eight": Window((390, 4), 3, 65, 0, 7, 2, 1, 128),
    "window of one": Window((400, 2), 1, 1, 80, 2, 1, 16, 128),
    "native, several tiles": Window((300, 150, 0), 2, 320, 0, 0, 1, 3, 64),
}

GPU_DELTAS = {
    "one token": Delta(1, 1, 2, 64, 64),
    "verified run of the 35B": Delta(2, 7, 1, 128, 128),
    "longest verified run": Delta(1, 9, 2, 256, 64),
    "batch of copies and one more": Delta(1, 33, 1, 64, 64),
}

GPU_STATE_SPACES = {
    "one token, a group a head": StateSpace((1,), 1, 2, 2, 64, 64),
    "two groups, empty row": StateSpace((7, 0), 7, 4, 2, 64, 128),
    "batch of copies and one more": StateSpace((33,), 33, 2, 1, 64, 64),
}
