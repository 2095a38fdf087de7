"""Layers as functions of (parameters, inputs): no modules, no state, no randomness but a key."""
