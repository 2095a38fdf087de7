"""Where batch n comes from: arithmetic on indices, which opens nothing.

    bytes     text to ids and back; the identity of a tokenizer
    split     which documents are held out, for ever
    shuffle   a keyed permutation of [0, n), both directions in O(1)
    rows      the stream cut into rows, the cursor, and seeking
    batch     the rows of one update as tensors; the rows of an evaluation; what every batch must obey

A *stream* is documents laid end to end, each closed by its end mark. Batch n is a function of (stream, plan, seed,
n): no generator, no position kept by a reader, no number of workers or machines enters. Formats are read in
`lib.store`; packing, mixtures and shares of ranks are further modules here, each from the same few integers.
"""
