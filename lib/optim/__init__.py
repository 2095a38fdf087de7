"""Training rules as pairs of pure functions, `init(params) -> slot` and `update(...)`, and the parts they are chained of.

rule = chain(clip_value(1.0), decay("*.w*"), scale_by_adam(), descend())
rule = partition({"tables": ("embed.*", scaled(sgd(), lr=10))}, rest=adamw())
step = make_train_step(loss, rule=rule)
"""

from __future__ import annotations

from lib.optim.adafactor import adafactor, scale_by_adafactor
from lib.optim.adam import adam, adamw, scale_by_adam, scale_by_rms
from lib.optim.combine import chain, freeze, hyper, identity, mask, partition, scaled
from lib.optim.decay import decay, l2
from lib.optim.lion import lion, scale_by_lion
from lib.optim.muon import muon, orthogonalize
from lib.optim.named import frozen, rule_of
from lib.optim.parts import clip_norm, clip_value, descend, momentum, sign
from lib.optim.rule import Now, Rule
from lib.optim.schedule_free import averaged, free, schedule_free
from lib.optim.sgd import sgd

__all__ = [
    "Now",
    "Rule",
    "adafactor",
    "adam",
    "adamw",
    "averaged",
    "chain",
    "clip_norm",
    "clip_value",
    "decay",
    "descend",
    "free",
    "freeze",
    "frozen",
    "hyper",
    "identity",
    "l2",
    "lion",
    "mask",
    "momentum",
    "muon",
    "orthogonalize",
    "partition",
    "rule_of",
    "scale_by_adafactor",
    "scale_by_adam",
    "scale_by_lion",
    "scale_by_rms",
    "scaled",
    "schedule_free",
    "sgd",
    "sign",
]
