"""Where batch n comes from: arithmetic on indices, which opens nothing.

    bytes       text to ids and back; the identity of a tokenizer
    split       which documents are held out, for ever
    shuffle     a keyed permutation of [0, n), both directions in O(1)
    rows        the stream cut into rows, the cursor, and seeking
    pack        rows of whole documents, planned ahead
    source      streams, and sources: a stream with a name, a weight and a row plan
    mix         which source each row of a run comes from
    plan        the shape of an update, also where it grows
    share       a rank's rows of a batch
    cut         rows as arrays        repeat    rows that are not learnt       invariants  what every batch obeys
    arrays      the batch of one update as arrays                              heldout     the rows of an evaluation
    batch       the same as TensorDicts; the one module here that needs torch

A *stream* is documents laid end to end. Batch n is a function of (sources, plan, seed, n): no generator, no position
kept by a reader, no number of workers or machines enters. Formats are read in `lib.store`.
"""
