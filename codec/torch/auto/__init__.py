"""Choose codecs from measurements, so that all ranks make the same choice.

This package sends no messages: DDP hooks and pipeline stages exchange its reports. `quality.py` converts the user's
quality to a list of specs. `meter.py` and `costs.py` measure, `selector.py` decides, and `gradients.py` and `edges.py`
apply the decisions to hooks of DistributedDataParallel and to edges of pipelines.
"""
