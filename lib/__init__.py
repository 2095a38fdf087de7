"""purestep: training of neural networks as a pure function, `state, metrics = train_step(state, batch)`.

Axes have one letter for the whole project:

    a  micro-batches        b  rows of a batch      s  positions (bytes or tokens)
    d  width                h  query heads          g  key-value heads      k  head width
    f  inner width          v  vocabulary           l  layers               t  keys a query sees

`axis` is a mesh axis, `dim` a tensor dimension.

The wall: everything here is pure except two rooms, `lib.store` (disk) and `lib.run` (clocks, processes, signals, printing);
`lib.testing`, above the core, also seeds the world's generators and puts them back. Imports point one way:
run -> store -> core. This module imports nothing, so that reading a config costs no torch import.

Public names:

    from lib.step import train_step, make_train_step, eval_step
    from lib.state import init_state, abstract_state
    from lib.store import save, load
    from lib.config import Recipe, load_config
    from lib.testing import check_step
"""
