"""What a gradient weighs on a link: ways to write a slice, most of them with error feedback.

* `spec.py`    CompressionSpec and parse_compression: the text form. No torch: jobs are checked with it.
* `slice_codec.py`   Encoder (worker) and Decoder (server): what callers use. Import it from there.
* `form.py`    Piece and Form: what both ends know of a slice; Method: one way to write it.
* `dense.py`   none, fp16, bf16, fp8, terngrad, qsgd, signsgd: something for every element.
* `sparse.py`  topk, dgc, sbc: a few elements and where they stand.
* `lowrank.py` powersgd.
* `bits.py`    packing: ternary digits, bit planes, Golomb-coded positions. numpy only.
* `message.py` Reader: a received message, every field of which is hostile.

This file imports no torch, so that the controller stays free of it.
"""

from paceline.comm.compression.spec import (
    COMPRESSION_FORMS,
    CompressionSpec,
    parse_compression,
    refuse_useless,
)

__all__ = ["COMPRESSION_FORMS", "CompressionSpec", "parse_compression", "refuse_useless"]
