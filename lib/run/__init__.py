"""The driver: processes, clocks, signals, printing. `python -m lib.run` is the one way in; see `lib.run.cli`.

Everything that decides the future of a run is in its state; this room could be thrown away and written again in a day.
"""
